"""`inferscope attach PID` to a process that was started without us, on Python 3.14 and later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import child

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
PYTHON = PEERS / "venvs" / "py314" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"no {PYTHON}: Python 3.14 with llama-cpp-python, gguf and inferscope-llm[reader]",
    ),
]

PROGRAM = """
import sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, seed=1)
print("up", flush=True)
while True:
    llm.create_completion("tales", max_tokens=40, temperature=0.0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables under which rings lie in a folder, and nothing is switched on."""
    kept = {name: value for name, value in os.environ.items() if name != "INFERSCOPE"}
    return {**kept, "INFERSCOPE_DIR": str(tmp_path / "rings")}


@pytest.fixture
def process(tmp_path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that generates and knows nothing of us."""
    gguf = tmp_path / "tiny.gguf"
    subprocess.run([PYTHON, Path(__file__).with_name("tiny_gguf.py"), gguf], check=True, timeout=60)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with child([PYTHON, program, gguf], env=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        yield running


def _inferscope(
    python: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "inferscope", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.conformance("llama-cpp-python", "`attach PID`, started without us (Python 3.14)")
def test_a_running_process_is_observed_from_outside(
    process: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    words = ("attach", str(process.pid), "--once", "--json")
    first = _inferscope(PYTHON, environment, *words)
    assert first.returncode == 0, first.stderr
    again = _inferscope(PYTHON, environment, *words)
    (engine,) = json.loads(again.stdout)["engines"]
    assert engine["engine"] == "llama-cpp-python"
    assert engine["pids"] == [process.pid]
    assert engine["num_finished"] > 0
    assert engine["device_ns"]["decode"] > 0
    assert process.poll() is None


def test_forbidden_attach_names_the_command_to_start_with(
    process: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    done = _inferscope(
        PYTHON, {**environment, "INFERSCOPE_REMOTE_EXEC": "0"}, "attach", str(process.pid), "--once"
    )
    assert done.returncode == 1
    assert "inferscope run -- " in done.stderr
    assert not list(Path(environment["INFERSCOPE_DIR"]).rglob("*.ring"))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python is one of those that can")
def test_an_older_python_cannot_and_reports_the_command(
    process: subprocess.Popen[bytes], environment: dict[str, str]
) -> None:
    done = _inferscope(Path(sys.executable), environment, "attach", str(process.pid), "--once")
    assert done.returncode == 1
    assert "inferscope run -- " in done.stderr
