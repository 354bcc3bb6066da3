"""The demo's engine process as the screen's process sees it, and snapshots from its start on.

    DemoSource.snapshot ─► start ─► stage, stage, … ─► ready ─► snapshots of its rings
                                          └─► failed: the screen ends with the error

The engine takes seconds to import and to measure. The screen is drawn before it is started, and
shows the stage that it is in.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from inferscope.cli.demo_link import Ready, Settings, Stage
from inferscope.collector.snapshot import Snapshot
from inferscope.engine.server.parent import Failed
from inferscope.errors import InferScopeError
from inferscope.probe.identity import ENGINE_ID_VARIABLE
from inferscope.tui.source import SnapshotSource

_GRACE_S = 15.0
_FIRST_STAGE = "importing it"
_PIECE_BYTES = 1 << 16


class EngineFailed(InferScopeError):
    """The engine's process did not start, or died."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Host:
    """The engine's process.

    Attributes:
        stage: what it does before it is ready.
        ready: what it said when its load began; None before.
    """

    def __init__(self, command: Sequence[str], engine_id: str, *, stderr: IO[bytes] | None) -> None:
        """Start the process; None for `stderr` shares ours."""
        self.stage = _FIRST_STAGE
        self.ready: Ready | None = None
        self._began_s = time.monotonic()
        self._unread = b""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, ENGINE_ID_VARIABLE: engine_id, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )

    @property
    def status(self) -> str:
        """Return what it does, and for how long, in a line."""
        elapsed_s = time.monotonic() - self._began_s
        return f"starting the engine: {self.stage} ({elapsed_s:.0f} s)"

    @property
    def is_running(self) -> bool:
        """Return whether the process is there."""
        return self._process.poll() is None

    def advance(self, wait_s: float | None = 0.0) -> None:
        """Read what the process says on its way to its load.

        Args:
            wait_s: longest wait for its next line, in seconds; None waits until it comes.

        Raises:
            EngineFailed: it cannot begin, or died.
        """
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        if self.ready is not None or not select.select([handle], [], [], wait_s)[0]:
            return
        piece = os.read(handle, _PIECE_BYTES)
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            word = msgspec.json.decode(line, type=Stage | Ready | Failed)
            if isinstance(word, Failed):
                raise EngineFailed(word.message, word.exit_code)
            if isinstance(word, Ready):
                self.ready = word
            else:
                self.stage = word.text
        if not piece and self.ready is None:
            raise EngineFailed("the demo's engine died while it was starting.", 1)

    def exit_code(self) -> int:
        """Wait for the process to end by itself, and return its exit code."""
        return self._process.wait(_GRACE_S)

    def stop(self) -> None:
        """End the process, and wait for it: by closing its standard input once it is ready."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self.ready is None:
            self._process.kill()  # it may be importing, and would not read its input for seconds
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def demo_command(settings: Settings) -> tuple[str, ...]:
    """Return the command that runs the demo's engine."""
    written = msgspec.json.encode(settings).decode()
    return (sys.executable, "-m", "inferscope.cli.demo_start", written)


class DemoSource:
    """Snapshots of the demo's engine; None until its load begins.

    Attributes:
        title: for the header, until there is a snapshot.
        focus: the request whose tokens snapshots hold one by one.
        failure: why the engine could not start; None if it could.
        when_failed: called once, from the thread that takes snapshots.
    """

    def __init__(self, start: Callable[[], Host], watch: Callable[[Ready], SnapshotSource]) -> None:
        """Prepare; the first snapshot starts the engine.

        Args:
            start: starts the engine's process.
            watch: opens the source of snapshots once it is ready.
        """
        self.title = "demo"
        self.focus: str | None = None
        self.failure: EngineFailed | None = None
        self.when_failed: Callable[[], object] = lambda: None
        self._start, self._watch = start, watch
        self._host: Host | None = None
        self._source: SnapshotSource | None = None

    @property
    def status(self) -> str:
        """Return what the engine does before there is a snapshot."""
        return "starting the engine" if self._host is None else self._host.status

    def snapshot(self, window_ns: int) -> Snapshot | None:
        """Return the present view over a window, None before the load has begun."""
        if self.failure is not None:
            return None
        if self._host is None:
            self._host = self._start()
        if self._source is None:
            try:
                self._host.advance()
            except EngineFailed as error:
                self.failure = error
                self.when_failed()
                return None
            if self._host.ready is None:
                return None
            self._source = self._watch(self._host.ready)
        if hasattr(self._source, "focus"):
            self._source.focus = self.focus
        return self._source.snapshot(window_ns)

    def close(self) -> None:
        """Close the source of snapshots; safe to call twice."""
        if self._source is not None:
            self._source.close()

    def stop(self) -> None:
        """End the engine; nothing else uses this source any more."""
        self.close()
        if self._host is not None:
            self._host.stop()
