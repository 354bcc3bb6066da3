"""Messages of the probe are logged, unless its owner has configured otherwise."""

from __future__ import annotations

import _thread
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from inferscope.probe import host_log as voice
from inferscope.probe.host_log import note, warn, would_block
from tests.daemon.running import eventually

PROGRAM = """
import logging
{setting}
from inferscope.probe.host_log import warn
warn("something is %s", "wrong")
warn("something is %s", "wrong")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("setting", "num_lines"),
    [
        ("", 2),
        ("logging.getLogger().setLevel(logging.ERROR)", 2),
        ("logging.basicConfig(level=logging.ERROR)", 2),
        ("logging.getLogger('inferscope').setLevel(logging.ERROR)", 0),
    ],
)
def test_a_root_level_meant_for_others_silences_no_line(setting: str, num_lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.count("inferscope: something is wrong") == num_lines


class Redirecting(logging.Handler):
    """A handler without a stream of its own, as those of loguru and rich are."""

    def emit(self, record: logging.LogRecord) -> None:
        os.write(2, record.getMessage().encode())


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_full_pipe_behind_a_handler_without_a_stream_blocks(
    descriptor: int, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, handler = logging.getLogger("inferscope"), Redirecting()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    saved = os.dup(descriptor)
    logger.addHandler(handler)
    os.dup2(writing, descriptor)
    try:
        found = [would_block()]
        for num_bytes in (4096, 1):
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, b"x" * num_bytes)
        found.append(would_block())
        os.close(reading)  # a write fails at once
        found.append(would_block())
    finally:
        os.dup2(saved, descriptor)
        logger.removeHandler(handler)
        for each in (saved, writing):
            os.close(each)
    assert found == [False, True, False]


def test_a_line_for_a_full_pipe_blocks_no_call_and_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferscope.probe.host_log._ROOM_AGAIN_S", 0.01)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    logger = logging.getLogger("inferscope")
    with os.fdopen(writing, "w") as stream:
        handler = logging.StreamHandler(stream)
        logger.addHandler(handler)
        try:
            for number in range(100):  # would not return
                warn("line %d", number)
            found = b""
            while b"line 99" not in found:
                assert select.select([reading], [], [], 30)[0]
                found += os.read(reading, 1 << 16)
        finally:
            logger.removeHandler(handler)
    os.close(reading)
    lines = found[found.index(b"inferscope: ") :].decode().split("\n")
    assert [line for line in lines if line] == [f"inferscope: line {n}" for n in range(84, 100)]


def test_a_full_standard_output_does_not_hold_back_a_log_in_a_file(tmp_path: Path) -> None:
    program = """
import logging, os, sys
reading, writing = os.pipe()
os.set_blocking(writing, False)
try:
    while True:
        os.write(writing, b"x" * 4096)
except BlockingIOError:
    os.dup2(writing, 1)
logging.basicConfig(filename=sys.argv[1])
from inferscope.probe.host_log import warn
warn("a line")
os._exit(0)
"""
    log = tmp_path / "host.log"
    subprocess.run([sys.executable, "-c", program, str(log)], timeout=60, check=True)
    assert "a line" in log.read_text(encoding="utf-8")


def test_an_interrupted_line_leaves_a_voice_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = True
    monkeypatch.setattr(voice, "would_block", lambda: is_full)
    monkeypatch.setattr(voice, "_ROOM_AGAIN_S", 0.01)
    messages: list[object] = []
    monkeypatch.setattr(voice, "_log", lambda message, *values: messages.append(values or message))
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(_thread, "start_new_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            warn("the first")
    warn("the second")
    is_full = False
    eventually(lambda: messages == [("the first",), ("the second",)])


def test_a_forked_child_does_not_print_the_lines_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(voice, "would_block", lambda: True)
    monkeypatch.setattr(voice, "_start_writer", lambda: None)
    warn("of the parent")
    child = os.fork()
    if child == 0:
        os._exit(len(voice._messages))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert voice._messages.pop() == "of the parent"


class OutsideOfRequest(logging.Filter):
    """A filter that needs what is there only within a request of the host."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError("outside of a request")


@pytest.mark.parametrize("say", [warn, note])
def test_a_filter_that_raises_costs_its_line_alone(say: Callable[[str], None]) -> None:
    logger, handler, raising = logging.getLogger("inferscope"), Redirecting(), OutsideOfRequest()
    level = logger.level
    logger.addHandler(handler)
    handler.addFilter(raising)
    logger.setLevel(logging.DEBUG)
    try:
        with pytest.raises(LookupError):
            logger.warning("it does raise")
        say("a line")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_line_is_logged_where_eventlet_has_removed_poll(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(select, "poll")
    warn("a line")
    assert [record.getMessage() for record in caplog.records] == ["inferscope: a line"]
