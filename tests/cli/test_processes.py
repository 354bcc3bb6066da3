"""A pid near an engine finds it; the error for an unobserved process names a command for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferscope.cli import remote
from inferscope.cli.processes import (
    ancestors,
    command_line,
    descendants,
    is_python,
    own_command,
    run_command,
)
from inferscope.cli.targets import engine_of, is_remote
from inferscope.errors import InferScopeError, NotFound
from inferscope.probe import EngineInfo, Probe
from inferscope.probe.identity import ENGINE_ID_VARIABLE
from tests.children import child
from tests.cli.running import ANY_PORT

ENGINE = """
import subprocess, sys
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "mine"))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate()
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


class Tree:
    """A launcher, the engine that it starts, and a worker of the engine's."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self.launcher = launcher
        assert launcher.stdout is not None
        self.worker_pid = int(launcher.stdout.readline())


@contextmanager
def running_tree(rings: Path) -> Iterator[Tree]:
    """Run a tree while the context lasts; it ends with its standard input."""
    environment = {**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_RING_MB": "1"}
    environment.pop(ENGINE_ID_VARIABLE, None)
    with child(
        [sys.executable, "-c", LAUNCHER, ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as launcher:
        yield Tree(launcher)
        launcher.communicate("\n", timeout=60)


def test_a_pid_of_several_models_is_no_answer_and_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv(ENGINE_ID_VARIABLE, "here")
    first = Probe.open(EngineInfo(0, "test"))
    assert engine_of(str(os.getpid())).engine_id == "here"
    second = Probe.open(EngineInfo(0, "test"), engine_id="here-2")
    try:
        with pytest.raises(NotFound, match=r"runs 2 models\. Name one by its engine ID"):
            engine_of(str(os.getpid()))
        assert {line.split()[0] for line in capsys.readouterr().err.splitlines()} == {
            "ENGINE", "here", "here-2",
        }  # fmt: skip
        assert engine_of("here-2").engine_id == "here-2"
    finally:
        first.close()
        second.close()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    with running_tree(tmp_path) as made:
        yield made


def test_every_process_of_an_engines_tree_finds_it(tree: Tree) -> None:
    (engine_pid,) = engine_of(None).pids
    for pid in (tree.launcher.pid, engine_pid, tree.worker_pid):
        assert engine_of(str(pid)).pids == (engine_pid,)
    assert engine_pid in ancestors(tree.worker_pid)
    assert {engine_pid, tree.worker_pid} <= descendants(tree.launcher.pid)


def test_a_process_above_two_engines_finds_neither(
    tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_tree(tmp_path):
        with pytest.raises(NotFound, match=f"2 engines run under process {os.getpid()}"):
            engine_of(str(os.getpid()))
        assert len(capsys.readouterr().err.splitlines()) == 3


def test_the_error_for_an_unobserved_process_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv(remote.ALLOW_VARIABLE, "0")
    words = [sys.executable, "-c", "input()", "a b", "it's", "", "$HOME"]
    with child(words, stdin=subprocess.PIPE) as process:
        end_s = time.monotonic() + 60
        while run_command(process.pid) is None:  # its arguments come a moment after its start
            assert time.monotonic() < end_s
            time.sleep(0.01)
        with pytest.raises(NotFound) as caught:
            engine_of(str(process.pid))
        message = str(caught.value)
        assert "\n" not in message
        _, _, command = message.partition("inferscope run -- ")
        assert shlex.split(command) == words
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([sys.executable, "-m", "inferscope", "collect"], "is `inferscope collect`"),
        (["cat"], "(cat) is not Python"),
    ],
    ids=["collector", "program"],
)
def test_no_command_is_advised_for_what_is_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    environment = {**os.environ, **ANY_PORT}
    with child(words, stdin=subprocess.PIPE, env=environment) as process:
        end_s = time.monotonic() + 60
        while command_line(process.pid)[: len(words)] != words:  # not before its exec
            assert time.monotonic() < end_s
            time.sleep(0.01)
        with pytest.raises(NotFound) as caught:
            engine_of(str(process.pid))
    assert message in str(caught.value)
    assert "inferscope run" not in str(caught.value)


def test_the_first_process_is_advised_to_be_observed_if_it_is_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv(remote.ALLOW_VARIABLE, "0")
    with pytest.raises(NotFound) as caught:
        engine_of("1")
    assert ("inferscope run" in str(caught.value)) == is_python(command_line(1))


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("python -m inferscope collect --slo x", "inferscope collect"),
        ("/opt/bin/python /opt/bin/inferscope --x sampler", "inferscope sampler"),
        ("/opt/bin/python /opt/bin/inferscope", "inferscope"),
        ("python -m inferscope serve builtin", None),
        ("/opt/bin/python /opt/bin/vllm serve inferscope", None),
    ],
)
def test_a_command_of_our_own_is_recognised(line: str, command: str | None) -> None:
    assert own_command(line.split()) == command


def test_a_kernels_or_no_process_has_no_command() -> None:
    assert run_command(2**22 + 1) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://gpu7:8000", True),
        ("https://gpu7/metrics", True),
        ("gpu7:8000", True),
        ("127.0.0.1:30000", True),
        ("[::1]:8000", True),
        ("41233", False),
        ("demo.isr", False),
        ("an-engine-1", False),
        (None, False),
    ],
)
def test_a_server_address_is_neither_a_file_nor_a_pid(target: str | None, expected: bool) -> None:
    assert is_remote(target) is expected


def test_remote_exec_is_not_used_where_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "remote_exec", print, raising=False)
    assert remote.executor() is print
    monkeypatch.setenv(remote.ALLOW_VARIABLE, "0")
    assert remote.executor() is None


def test_the_script_switches_a_plain_interpreter_on(tmp_path: Path) -> None:
    ran: list[str] = []

    def execute(pid: int, path: str) -> None:
        code = (
            f"exec(open({path!r}).read()); print([type(each).__name__ for each in sys.meta_path])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        ran.append(done.stdout + done.stderr)

    is_there = remote.observe(1, execute, rings=tmp_path, has_ring=lambda: True)
    assert is_there
    assert "_Waiting" in ran[0]


def test_a_process_that_refuses_tracing_gives_a_one_line_error(tmp_path: Path) -> None:
    def refuse(pid: int, path: str) -> None:
        raise PermissionError("ptrace denied")

    with pytest.raises(InferScopeError, match=r"cannot attach to process 7: ptrace denied"):
        remote.observe(7, refuse, rings=tmp_path, has_ring=lambda: False)
