"""Each mistake: one clear line, a non-zero exit, nothing else."""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.cli.demo import command as demo_command
from inferscope.cli.demo.options import demo_engine
from tests.children import child
from tests.cli.running import Run, inferscope


def one_line(*arguments: str, rings: Path, code: int, **environment: str) -> str:
    """Run a command that must fail; return its message."""
    done = inferscope(*arguments, rings=rings, **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("inferscope: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_nothing_to_attach_to_states_how_to_start_something(tmp_path: Path) -> None:
    line = one_line("attach", rings=tmp_path, code=1)
    assert "no engine is running" in line
    assert "inferscope demo" in line


def test_an_unknown_pid_is_named(tmp_path: Path) -> None:
    assert "process 4194305 does not exist" in one_line("attach", "4194305", rings=tmp_path, code=1)


def test_errors_of_an_unobserved_and_a_missing_process_differ(tmp_path: Path) -> None:
    with child([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        line = one_line("attach", str(process.pid), rings=tmp_path, code=1)
    assert f"process {process.pid} is not observed" in line
    assert line.endswith(f"inferscope run -- {sys.executable} -c 'input()'")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.isr"
    line = one_line("attach", str(missing), "--once", rings=tmp_path, code=1)
    assert str(missing) in line


def test_a_file_that_is_no_recording_is_reported_as_such(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.isr"
    stranger.write_bytes(b"PK\x03\x04 something else entirely")
    line = one_line("replay", str(stranger), "--check", rings=tmp_path, code=1)
    assert "is not an InferScope recording" in line


def test_a_file_that_is_no_ring_is_reported_as_such(tmp_path: Path) -> None:
    stranger = tmp_path / "core-0-1.ring"
    stranger.write_bytes(b"\0" * 8192)
    line = one_line("attach", str(stranger), "--once", rings=tmp_path / "none", code=1)
    assert "not a ring" in line


def test_an_empty_folder_states_what_it_lacks(tmp_path: Path) -> None:
    line = one_line("export", str(tmp_path), "-o", "-", rings=tmp_path, code=1)
    assert "holds no readable rings" in line


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.touch()
    line = one_line("demo", "--headless", "--out", str(a_file / "out"), rings=tmp_path, code=2)
    assert "cannot make the folder" in line


def test_a_ring_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.touch()
    out = str(tmp_path / "out")
    line = one_line("demo", "--headless", "--out", out, rings=a_file / "rings", code=1)
    assert "INFERSCOPE_DIR" in line


@pytest.mark.parametrize("option", ["--duration", "--rate", "--load"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "1e300", "much"])
def test_a_number_out_of_range_is_named(option: str, value: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    demo_command.configure(parser)
    with pytest.raises(argparse.ArgumentError, match=f"{option}.*{value}"):
        parser.parse_args([f"{option}={value}"])


@pytest.mark.thorough
@pytest.mark.parametrize("num", [0, 1025])
def test_a_block_out_of_range_is_refused(tmp_path: Path, num: int) -> None:
    line = one_line("demo", "--block-tokens", str(num), rings=tmp_path, code=2)
    assert f"block_tokens is {num}. Give " in line


def test_an_unknown_quantization_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for verb in (("demo",), ("serve", "builtin", "--port", "0")):
        said = one_line(*verb, "--quantization", "int3", rings=tmp_path, code=2)
        assert "quantization 'int3' is unknown. Use int8, int4, fp8." in said


@pytest.mark.thorough
def test_fp8_on_a_cpu_is_refused_when_the_engine_starts(tmp_path: Path) -> None:
    given = ("--port", "0", "--device", "cpu", "--quantization", "fp8")
    said = one_line("serve", "builtin", *given, rings=tmp_path, code=2)
    assert "compute capability 9.0 (Hopper) or later; the device is cpu" in said


def test_the_demo_keeps_its_pool_whatever_the_block() -> None:
    parser = argparse.ArgumentParser()
    demo_command.configure(parser)
    usual = demo_engine(parser.parse_args([]))
    assert (usual.block_tokens, usual.num_blocks, usual.prefix_cache) == (16, 160, True)
    given = parser.parse_args(["--block-tokens", "8", "--no-prefix-cache"])
    asked = demo_engine(given)
    assert (asked.block_tokens, asked.num_blocks, asked.prefix_cache) == (8, 320, False)


def test_a_load_beyond_twice_the_capacity_is_refused(tmp_path: Path) -> None:
    line = one_line("demo", "--headless", "--load", "9", rings=tmp_path, code=2)
    assert "--load is 9.0" in line


def test_an_export_onto_itself_is_refused(tmp_path: Path, demo: Run) -> None:
    copy = tmp_path / "copy.isr"
    copy.write_bytes((demo.folder / "demo.isr").read_bytes())
    line = one_line("export", str(copy), "-o", str(copy), rings=tmp_path, code=2)
    assert "is the file to export" in line
    assert copy.read_bytes() == (demo.folder / "demo.isr").read_bytes()


def test_an_export_into_a_device_leaves_the_device_in_its_place(tmp_path: Path, demo: Run) -> None:
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    done = inferscope("export", str(demo.folder / "demo.isr"), "-o", str(link), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert link.is_char_device()
    assert link.stat().st_mode & 0o777 == 0o666


def test_an_export_closes_a_file_that_was_open_to_others(tmp_path: Path, demo: Run) -> None:
    target = tmp_path / "out.jsonl"
    target.touch(mode=0o644)
    recording = str(demo.folder / "demo.isr")
    inferscope("export", recording, "--force", "-o", str(target), rings=tmp_path)
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.thorough
def test_a_demo_of_no_checkpoint_names_it_and_keeps_an_older_recording(tmp_path: Path) -> None:
    out, model = tmp_path / "out", tmp_path / "model"
    out.mkdir()
    model.mkdir()
    older = out / "demo.isr"
    older.write_bytes(b"precious")
    line = one_line(
        *("demo", "--headless", "--model", str(model), "--out", str(out)), rings=tmp_path, code=2
    )
    assert str(model) in line
    assert older.read_bytes() == b"precious"


def test_replay_needs_a_terminal(tmp_path: Path, demo: Run) -> None:
    line = one_line("replay", str(demo.folder / "demo.isr"), rings=tmp_path, code=2)
    assert "attach FILE --once" in line


@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("numpy", "shares", "reader"),
        ("numpy", "attach", "tui"),
        ("prometheus_client", "attach http://127.0.0.1:9", "tui"),
        ("torch", "demo --headless --out .", "engine"),
    ],
)
def test_a_missing_module_states_one_extra_that_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, command: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = f"raise ModuleNotFoundError('not here', name='{module}')\n"
    (tmp_path / f"{module}.py").write_text(missing, encoding="utf-8")
    done = inferscope(*command.split(), rings=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert f'pip install "inferscope-llm[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_format_names_the_known_ones(tmp_path: Path, demo: Run) -> None:
    recording = str(demo.folder / "demo.isr")
    line = one_line("export", recording, "--format", "csv", rings=tmp_path, code=2)
    assert "jsonl, parquet, perfetto" in line


def test_a_damaged_recording_is_read_as_far_as_it_goes_and_reported(
    tmp_path: Path, demo: Run
) -> None:
    content = bytearray((demo.folder / "demo.isr").read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged = tmp_path / "damaged.isr"
    damaged.write_bytes(content)
    done = inferscope("export", str(damaged), "-o", "-", rings=tmp_path)
    assert done.returncode == 0
    assert "1 damaged block" in done.stderr
    assert done.stdout.count('"kind":"request"') > 5


def test_a_recording_cut_off_in_the_middle_is_reported_as_such(tmp_path: Path, demo: Run) -> None:
    content = (demo.folder / "demo.isr").read_bytes()
    cut = tmp_path / "cut.isr"
    cut.write_bytes(content[: len(content) * 2 // 3])
    done = inferscope("replay", str(cut), "--check", rings=tmp_path)
    assert done.returncode == 0
    assert "truncated" in done.stderr


def test_a_newer_recording_opens_with_a_warning(tmp_path: Path, demo: Run) -> None:
    content = bytearray((demo.folder / "demo.isr").read_bytes())
    struct.pack_into("<I", content, 8, 99)
    newer = tmp_path / "newer.isr"
    newer.write_bytes(content)
    done = inferscope("replay", str(newer), "--check", rings=tmp_path)
    assert done.returncode == 0
    assert "newer version (format 99)" in done.stderr


def test_an_export_that_fails_leaves_no_empty_file(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    inferscope("export", str(tmp_path / "none.isr"), "-o", str(target), rings=tmp_path)
    assert not target.exists()
