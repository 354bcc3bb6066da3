"""What a terminal that cannot draw, and a stream that lacks signs, are given."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.cli import status_line, terminal
from inferscope.probe import EngineInfo, Probe
from inferscope.records import PREFILL
from tests.children import child
from tests.cli.running import inferscope, inferscope_cold
from tests.insight.test_why import SAMPLE

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.thorough
def test_a_dumb_terminal_gets_one_look_as_text(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with child(
        [sys.executable, "-m", "inferscope", "attach", str(SAMPLE)],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path), "TERM": "dumb"},
    ) as process:  # fmt: skip
        os.close(theirs)
        printed = b""
        try:
            while piece := os.read(ours, 65536):
                printed += piece
        except OSError:  # the terminal's other end is closed
            pass
        assert process.wait(90) == 0
    os.close(ours)
    assert b"Where latency went" in printed
    assert b"\x1b" not in printed


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_what_cannot_move_its_cursor_is_not_drawn_on(
    monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as stream:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert terminal.can_draw(stream)
        monkeypatch.setenv("TERM", term)
        assert not terminal.can_draw(stream)


@pytest.mark.thorough
def test_an_ascii_output_is_printed_with_signs_that_it_has(tmp_path: Path) -> None:
    done = inferscope_cold("attach", str(SAMPLE), "--once", rings=tmp_path, **ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "  + prefill" in done.stdout
    assert "#####" in done.stdout


def printed(monkeypatch: pytest.MonkeyPatch, text: str, *, is_json: bool) -> bytes:
    out = io.BytesIO()
    stream = io.TextIOWrapper(out, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.replace_unencodable(is_json=is_json)
    stream.write(text)
    stream.flush()
    return out.getvalue()


@given(text=st.text())
def test_any_text_is_printed_cell_by_cell(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert len(printed(monkeypatch, text, is_json=False)) == len(text)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_json_means_the_same_in_ascii(text: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        document = json.dumps({"a": text}, ensure_ascii=False)
        assert json.loads(printed(monkeypatch, document, is_json=True)) == {"a": text}


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b5m\u202e\r\ninferscope: forged"
"""What sets a title, clears the screen, turns the direction of writing, begins a line."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the ring of an engine all of whose names are hostile."""
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    info = EngineInfo(0, f"e{ESCAPES}", version=f"v{ESCAPES}", model=f"m{ESCAPES}")
    probe = Probe.open(info, engine_id=f"id{ESCAPES}")
    probe.unsupported(f"feature{ESCAPES}")
    noted = {"tenant": f"t{ESCAPES}"}
    index = probe.queued(
        f"r{ESCAPES}", prompt_tokens=3, external_id=f"x{ESCAPES}", attributes=noted
    )
    probe.admitted(index)
    now_ns = time.monotonic_ns()
    probe.plan(1, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1)
    probe.start(1)
    probe.stop(1)
    probe.slices(1, requests=[index], phases=[PREFILL], tokens=[3], contexts=[0])
    probe.emitted([index], [1], step=1)
    probe.finished(index, "length")
    probe.close()
    return tmp_path / "rings"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ("attach", "FOLDER", "--once"), ("attach", "none"), ("doctor",), ("findings", "FOLDER"),
        ("off", "id"), ("record", "id", "-o", "OUT"), ("shares", "FOLDER", "--by", "tenant"),
        ("slo", "check", "SLO", "FOLDER"), ("slo", "check", "SLO", "FOLDER", "--json"),
        ("why", "x", "FOLDER"), ("why", "none", "FOLDER"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_names_in_rings_move_no_cursor_and_begin_no_line(
    hostile: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("slos: [{metric: availability, objective: 99%, window: 30d}]", encoding="utf-8")
    paths = {
        "OUT": str(tmp_path / "out.isr"),
        "FOLDER": str(next(hostile.iterdir())),
        "SLO": str(slo),
    }
    done = inferscope(*(paths.get(word, word) for word in words), rings=hostile)
    shown = done.stdout + done.stderr
    assert shown
    assert not any(line.startswith("inferscope: forged") for line in shown.splitlines())
    assert shown.replace("\n", "").isprintable()


def test_a_line_about_an_engine_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status_line.write_status(f"id{ESCAPES} is refused")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown[:-1].isprintable()
