"""Where an export goes: a file, a folder or standard output."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import inferscope
from tests.insight.test_why import SAMPLE
from tests.probe.fakes import FakeClock, make_probe

COMMAND = (sys.executable, "-m", "inferscope", "export")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLE, tmp_path / "run.isr"))


@pytest.mark.thorough
def test_redirected_to_its_default_name_it_is_whole(recording: Path, tmp_path: Path) -> None:
    expected = inferscope("export", str(recording), "-o", "-", rings=tmp_path).stdout
    target = recording.with_suffix(".jsonl")
    with target.open("wb") as out:
        done = subprocess.run(
            [*COMMAND, str(recording), "--format", "jsonl"],
            stdout=out, stderr=subprocess.PIPE, check=True,
        )  # fmt: skip
    assert target.read_text(encoding="utf-8") == expected
    assert [json.loads(line)["kind"] for line in expected.splitlines()][-1] == "run"
    assert done.stderr == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.isr", "run.jsonl"]


def test_the_folder_that_one_is_in_can_be_exported(tmp_path: Path) -> None:
    make_probe(tmp_path, FakeClock()).close()
    done = subprocess.run([*COMMAND, "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kind"] == "run"


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("-o", "/dev/full")], ids=["redirected", "file"])
def test_a_full_disk_is_one_line(recording: Path, options: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, str(recording), *options], stdout=full, stderr=subprocess.PIPE, text=True
        )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "No space left" in line) == (2, True)


@pytest.mark.thorough
def test_a_trace_is_json_on_stdout_too(recording: Path, tmp_path: Path) -> None:
    done = inferscope("export", str(recording), "--format", "perfetto", rings=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["traceEvents"]
    assert list(tmp_path.iterdir()) == [recording]


@pytest.mark.parametrize("options", [(), ("-o", "-")], ids=["redirected", "dash"])
def test_a_folder_cannot_go_to_stdout(
    recording: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = inferscope("export", str(recording), "--format", "parquet", *options, rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "-o PATH" in line
    assert list(tmp_path.iterdir()) == [recording]


@pytest.mark.thorough
def test_on_a_terminal_it_is_a_file_in_the_current_folder(recording: Path) -> None:
    current = recording.parent / "current"
    current.mkdir()
    ours, its_own = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, str(recording)],
            stdout=its_own,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            cwd=current,
        )
        os.close(its_own)
        target = current / "run.jsonl"
        assert done.stderr == (
            "wrote run.jsonl as jsonl (other formats: --format parquet, perfetto)\n"
        )
        assert not recording.with_suffix(".jsonl").exists()
        assert json.loads(target.read_text(encoding="utf-8").splitlines()[-1])["kind"] == "run"
        with pytest.raises(OSError, match="Input/output error"):  # nothing came before its end
            os.read(ours, 1)
    finally:
        os.close(ours)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["jsonl", "perfetto"])
def test_a_reader_that_leaves_ends_it_quietly(recording: Path, form: str) -> None:
    out, its_own = os.pipe()
    os.close(out)
    try:
        done = subprocess.run(
            [*COMMAND, str(recording), "--format", form],
            stdout=its_own, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    finally:
        os.close(its_own)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["jsonl", "perfetto"])
def test_a_file_that_exists_is_replaced_with_force_alone(
    recording: Path, tmp_path: Path, form: str
) -> None:
    target = tmp_path / "out"
    target.write_text("precious", encoding="utf-8")
    words = ("export", str(recording), "--format", form, "-o", str(target))
    refused = inferscope(*words, rings=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"inferscope: --out {target} exists. Overwrite it with --force, or choose another path.\n"
    )
    assert target.read_text(encoding="utf-8") == "precious"
    assert inferscope(*words, "--force", rings=tmp_path).stderr == f"wrote {target}\n"
    assert target.read_text(encoding="utf-8").startswith("{")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "advice"),
    [("a.parquet", "--format parquet or --format jsonl"), ("a.json", "--format perfetto or")],
)
def test_a_suffix_of_another_format_needs_the_format_named(
    recording: Path, tmp_path: Path, name: str, advice: str
) -> None:
    target = tmp_path / name
    refused = inferscope("export", str(recording), "-o", str(target), rings=tmp_path)
    assert refused.returncode == 2
    assert advice in refused.stderr
    assert not target.exists()
    done = inferscope(
        "export", str(recording), "--format", "jsonl", "-o", str(target), rings=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_an_export_leaves_the_file_alone_that_another_is_writing(
    recording: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    for name in ("out.jsonl.partial", "out.jsonl.1.partial"):
        (tmp_path / name).write_text("of another")
    done = inferscope("export", str(recording), "-o", str(target), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("out.*")) == [
        "out.jsonl", "out.jsonl.1.partial", "out.jsonl.partial",
    ]  # fmt: skip
    assert (tmp_path / "out.jsonl.partial").read_text() == "of another"
