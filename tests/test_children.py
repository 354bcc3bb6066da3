"""No process outlives the test that started it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import GRACE, child, children

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
_RAW = {"tests/children.py", "tests/cli/running.py"}
"""May call Popen: the context itself, and the interpreter that all commands of a worker share."""
_SLEEP = "[sys.executable, '-c', 'import time; time.sleep(600)']"
_PROGRAM = f"""
import subprocess, sys
import pytest
from tests.children import child

@pytest.fixture(scope="module")
def shared():
    with child({_SLEEP}) as process:
        yield process

def test_first(shared):
    assert shared.poll() is None

def test_leaves_one(shared):
    global left
    left = subprocess.Popen({_SLEEP})

def test_skips(shared):
    with child({_SLEEP}):
        pytest.skip("after it was started")

def test_last(shared):
    assert shared.poll() is None
    print(left.wait())

def test_leaves_an_orphan():
    code = "import subprocess, sys; subprocess.Popen({_SLEEP})"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


@pytest.mark.thorough
def test_a_test_that_leaves_a_process_fails_and_the_process_ends(tmp_path: Path) -> None:
    file = tmp_path / "test_program.py"
    file.write_text(_PROGRAM, encoding="utf-8")
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, str(file)],
        cwd=ROOT,
        env={**os.environ, GRACE: "0.2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("left processes behind") >= 1
    assert "test_leaves_one left processes behind" in done.stdout
    assert "5 passed" not in done.stdout
    assert "4 passed, 1 skipped, 1 error" in done.stdout, done.stdout
    assert "outlived" in done.stdout
    assert "test_leaves_an_orphan" in done.stdout.rpartition("outlived")[2]


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}])
@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.skip.Exception, AssertionError])
def test_a_child_is_gone_however_its_context_ends(
    error: type[BaseException], options: dict[str, bool]
) -> None:
    before = children()
    with pytest.raises(error):
        interrupt(error, **options)
    assert children() == before


def interrupt(error: type[BaseException], **options: bool) -> None:
    """Raise in the context of a child whose own child holds its pipes."""
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']);"
        "print('up', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with child([sys.executable, "-c", code], **pipes, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        raise error


def test_every_process_of_the_suite_is_started_in_a_context() -> None:
    found = []
    for path in TESTS.rglob("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if name not in _RAW and "Popen(" in text:
            found += [
                f"{name}:{node.lineno}"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.Popen"
            ]
    assert found == []
