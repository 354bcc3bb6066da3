"""The report as a user asks for it: its file, its refusals, a running engine, and a browser."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest

from inferscope.cli.main import main
from inferscope.probe import EngineInfo, Probe
from inferscope.records import DECODE, PREFILL
from tests.fold.scripts import Script
from tests.insight.test_why import SAMPLE
from tests.report.html import parse
from tests.report.recorded import write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Record an engine without a request: its report has no plot, which would take a second."""
    script = Script()
    script.ring()
    return write(script, tmp_path / "run.isr")


def test_the_file_is_private_and_replaced_with_force_alone(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.html"
    asked = ["report", str(recording), "-o", str(target)]
    assert main(asked) == 0
    assert capsys.readouterr().err == f"wrote {target}\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    written = target.read_bytes()
    assert main(asked) == 2
    assert "exists. Overwrite it with --force" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0
    assert target.read_bytes() == written, "the same records give the same bytes"
    assert sorted(os.listdir(tmp_path)) == ["report.html", "run.isr"]


def test_what_cannot_be_reported_is_one_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger, empty = tmp_path / "stranger.isr", tmp_path / "empty.isr"
    stranger.write_bytes(b"PK\x03\x04 something else")
    write(Script(), empty)
    target = str(tmp_path / "out.html")
    for words, code, reason in (
        ([str(tmp_path / "none.isr"), "-o", target], 1, "does not exist"),
        ([str(stranger), "-o", target], 1, "is not an InferScope recording"),
        ([str(empty), "-o", target], 1, "holds no records of an engine"),
        ([str(recording), "-o", str(recording), "--force"], 2, "is the file to report on"),
        ([str(recording), "-o", f"{tmp_path}/none/x.html"], 2, "No such file or directory"),
        ([str(recording), "-o", target, "--slo", str(stranger)], 2, "stranger.isr"),
    ):
        assert main(["report", *words]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("inferscope: ")
        assert reason in line
    assert not Path(target).exists()


@pytest.mark.thorough
def test_a_running_engine_is_reported_up_to_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probe = Probe.open(EngineInfo(0, "my-engine", model="my-model"))
    try:
        for request in range(3):
            serve(probe, f"request-{request}", step=4 * request)
        time.sleep(1.2)  # a fold is half a second behind
        assert main(["report", "-o", str(tmp_path / "live.html")]) == 0
    finally:
        probe.close()
    page = parse((tmp_path / "live.html").read_text(encoding="utf-8"))
    assert page.values["verdict", "finished"] == 3
    assert any("The engine was running" in text for text in page.texts)


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra(recording: Path, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from inferscope.cli.main import main;"
        f" sys.exit(main(['report', {str(recording)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"inferscope: this command needs {package}. Install it with:"
        ' pip install "inferscope-llm[report]"\n'
    )


def serve(probe: Probe, name: str, *, step: int) -> None:
    """Serve a request of four steps."""
    index = probe.queued(name, prompt_tokens=8)
    probe.admitted(index)
    for at in range(4):
        now_ns = time.monotonic_ns()
        probe.plan(step + at, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1)
        probe.start(step + at)
        time.sleep(0.002)
        probe.stop(step + at)
        phase, tokens, context = (DECODE, 1, 7 + at) if at else (PREFILL, 8, 0)
        probe.slices(
            step + at, requests=[index], phases=[phase], tokens=[tokens], contexts=[context]
        )
        probe.emitted([index], [1], step=step + at)
    probe.finished(index, "length")


def browse(page: Path, *options: str) -> str:
    """Open a page in a headless browser; return what it logs."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stderr


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    slo = SAMPLE.parent / "slo.yaml"
    assert main(["report", str(SAMPLE), "--slo", str(slo), "-o", str(path)]) == 0
    return path


@pytest.mark.thorough
@pytest.mark.process
@in_a_browser
@pytest.mark.parametrize(("scheme", "paper"), [("1", "fbfbf9"), ("0", "0f1318")])
def test_a_browser_shows_it_in_the_readers_scheme(page: Path, scheme: str, paper: str) -> None:
    shot = page.parent / f"{scheme}.png"
    log = browse(
        page,
        f"--screenshot={shot}",
        "--window-size=1200,4000",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    assert not re.findall(r".*CONSOLE.*", log), "an error, or something that the policy refused"
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (4000, 1200)
    assert "".join(f"{each:02x}" for each in pixels[2, 2]) == paper
    is_paper = (pixels == pixels[2, 2]).all(axis=2)
    assert 0.02 < 1 - is_paper.mean() < 0.6
    rows = (~is_paper).any(axis=1)
    assert rows[:3800].reshape(-1, 200).any(axis=1).all(), "a part of the page is empty"


@pytest.mark.thorough
@pytest.mark.process
@in_a_browser
def test_it_prints_with_all_ledgers_open(page: Path) -> None:
    paper = page.parent / "page.pdf"
    browse(page, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert paper.read_bytes().startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) > 5
