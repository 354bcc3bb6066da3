"""The demo's screen before its engine: it shows the stage of the start, and ends with an error."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferscope.cli.demo.command import wait_until_ready
from inferscope.cli.demo.engine import DemoSource, EngineFailed, Host
from inferscope.cli.demo.link import Ready
from inferscope.tui.app import InferScopeApp
from tests.tui.live_screen import Screen, play
from tests.tui.scenes import MovingSource

ENGINE = """
import sys
for line in sys.stdin.buffer:
    if not line.strip():
        break
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
"""
"""Child that prints its input by line, and ends with it or at an empty line."""


class Start:
    """A process in the place of the engine, and the source over it."""

    def __init__(self) -> None:
        self.host: Host | None = None
        self.shown = MovingSource()
        self.source = DemoSource(self._start, lambda ready: self.shown)

    def _start(self) -> Host:
        self.host = Host([sys.executable, "-c", ENGINE], "starting", stderr=None)
        return self.host

    def send(self, line: str) -> None:
        """Make the process print a line; an empty one ends it."""
        assert self.host is not None
        stdin = self.host._process.stdin
        assert stdin is not None
        stdin.write(f"{line}\n".encode())
        stdin.flush()


@contextmanager
def starting() -> Iterator[Start]:
    start = Start()
    try:
        yield start
    finally:
        start.source.stop()
        assert start.host is None or not start.host.is_running


async def until(running: Screen, text: str) -> None:
    deadline_s = time.monotonic() + 90
    while text not in running.text:
        assert time.monotonic() < deadline_s, running.text
        await running.pilot.pause(0.02)


def test_the_screen_is_drawn_before_the_engine_is_started_and_shows_its_stages() -> None:
    async def scenario() -> None:
        with starting() as start:
            app = InferScopeApp(start.source, refresh_hz=50)
            texts = list[str]()
            begin = start._start

            def noted() -> Host:
                texts.append(Screen(app, pilot).text)
                return begin()

            start.source._start = noted
            async with app.run_test(size=(80, 24)) as pilot:
                running = Screen(app, pilot)
                await until(running, "Starting the engine: importing modules (")
                assert "Starting the engine." in texts[0], "drawn before the process is there"
                start.send('{"type": "Stage", "text": "loading the model Big"}')
                await until(running, "Starting the engine: loading the model Big (")
                start.send('{"type": "Ready", "rate_s": 3.0}')
                await until(running, "chat-7f3a")
                assert "tarting the engine" not in running.text
                assert start.source.failure is None
        assert start.shown.is_closed

    play(scenario)


@pytest.mark.parametrize(
    ("line", "message", "exit_code"),
    [
        (
            '{"type": "Failed", "message": "torch is missing", "exit_code": 2}',
            "torch is missing",
            2,
        ),
        ("", "the demo's engine exited while it was starting", 1),
    ],
)
def test_an_engine_that_cannot_start_ends_the_screen_with_its_error(
    line: str, message: str, exit_code: int
) -> None:
    async def scenario() -> None:
        with starting() as start:
            app = InferScopeApp(start.source, refresh_hz=50)
            start.source.when_failed = app.leave
            async with app.run_test(size=(80, 24)) as pilot:
                await until(Screen(app, pilot), "importing modules (")
                start.send(line)
                deadline_s = time.monotonic() + 90
                while app.is_running:
                    assert time.monotonic() < deadline_s
                    await pilot.pause(0.02)
            failure = start.source.failure
            assert isinstance(failure, EngineFailed)
            assert message in str(failure)
            assert failure.exit_code == exit_code

    play(scenario)


def test_leaving_while_the_engine_starts_ends_it_at_once() -> None:
    with starting() as start:
        assert start.source.snapshot(1) is None
        began_s = time.monotonic()
        start.source.stop()
        assert time.monotonic() - began_s < 10, "it was not waited for"


def test_headless_start_reports_progress_while_the_engine_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with starting() as start:
        assert start.source.snapshot(1) is None
        host = start.host
        assert host is not None
        lines = list[str]()

        def read_then_begin() -> None:
            while len(lines) < 4:
                lines.extend(capsys.readouterr().err.splitlines())
                time.sleep(0.01)
            start.send('{"type": "Ready", "rate_s": 3.0}')

        reader = threading.Thread(target=read_then_begin)
        reader.start()
        ready = wait_until_ready(host, interval_s=0.05)
        reader.join()
    assert ready == Ready(3.0)
    for line in lines:
        assert re.fullmatch(r"demo: starting the engine: importing modules \(\d+ s\)", line)


def test_words_in_pieces_are_read_whole() -> None:
    with starting() as start:
        assert start.source.snapshot(1) is None
        host = start.host
        assert host is not None
        start.send('{"type": "Stage", "text": "one"}\n{"type": "Stage", "text": "two"}')
        while host.stage != "two":
            host.advance(1.0)
        start.send('{"type": "Ready", "rate_s": 3.0}')
        while host.ready is None:
            host.advance(1.0)
        assert host.ready == Ready(3.0)
