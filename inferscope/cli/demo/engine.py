"""Handle of the demo's engine process, and the source of its snapshots from the start on.

    DemoSource.snapshot ─► start ─► stage, stage, … ─► ready ─► snapshots of its rings
                                          └─► failed: the screen ends with the error

The engine takes seconds to import and to measure. The screen is drawn before the engine starts, and
shows the stage of the start.
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

from inferscope.cli.demo.link import Ready, Rounds, Settings, Stage
from inferscope.engine.server import Failed
from inferscope.errors import InferScopeError
from inferscope.fold import Snapshot
from inferscope.insight import LevelsWatch
from inferscope.probe import ENGINE_ID_VARIABLE
from inferscope.tui import SnapshotSource

_GRACE_S = 15.0
_FIRST_STAGE = "importing modules"
_READ_BYTES = 1 << 16


class EngineFailed(InferScopeError):
    """Error for an engine process that did not start, or crashed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Host:
    """Handle of the engine's process.

    Attributes:
        stage: stage of the start that the process reported last.
        ready: message that reported the begin of the load; None before.
    """

    def __init__(self, command: Sequence[str], engine_id: str, *, stderr: IO[bytes] | None) -> None:
        """Start the process; None for `stderr` inherits this process's."""
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
        """Return a line with the stage of the start and the time since it began."""
        elapsed_s = time.monotonic() - self._began_s
        return f"starting the engine: {self.stage} ({elapsed_s:.0f} s)"

    @property
    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def advance(self, wait_s: float = 0.0) -> None:
        """Read the messages that the process has sent.

        Args:
            wait_s: maximum wait for the next message, in seconds.

        Raises:
            EngineFailed: the process reported a failure, or exited.
        """
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        if not select.select([handle], [], [], wait_s)[0]:
            return
        chunk = os.read(handle, _READ_BYTES)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=Stage | Ready | Failed)
            if isinstance(message, Failed):
                raise EngineFailed(message.message, message.exit_code)
            if isinstance(message, Ready):
                self.ready = message
            else:
                self.stage = message.text
        if not chunk and self.ready is None:
            raise EngineFailed("the demo's engine exited while it was starting.", 1)

    def exit_code(self) -> int:
        """Wait until the process exits by itself, and return its exit code."""
        return self._process.wait(_GRACE_S)

    def stop(self) -> None:
        """Stop the process and wait for it; closing its standard input stops a ready process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self.ready is None:
            self._process.kill()  # while it imports, it does not read its input for seconds
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def demo_command(settings: Settings | Rounds) -> tuple[str, ...]:
    """Return the command that runs the demo's engine."""
    written = msgspec.json.encode(settings).decode()
    return (sys.executable, "-m", "inferscope.cli.demo.start", written)


class DemoSource:
    """Source of snapshots of the demo's engine; they are None until its load begins.

    Attributes:
        title: title of the header until there is a snapshot.
        focus: ID of the request for which snapshots hold each token.
        has_steps: whether snapshots hold recent steps.
        failure: error that prevented the start; None if there is none.
        levels: judge of the requests; None without objectives.
        when_failed: callback for a failure, called once from the thread that takes snapshots.
    """

    def __init__(self, start: Callable[[], Host], watch: Callable[[Ready], SnapshotSource]) -> None:
        """Prepare the source; the first snapshot starts the engine.

        Args:
            start: function that starts the engine's process.
            watch: function that opens the source of snapshots of a ready engine.
        """
        self.title = "demo"
        self.focus: str | None = None
        self.has_steps = False
        self.failure: EngineFailed | None = None
        self.when_failed: Callable[[], object] = lambda: None
        self.levels: LevelsWatch | None = None
        self._start, self._watch = start, watch
        self._host: Host | None = None
        self._source: SnapshotSource | None = None

    @property
    def status(self) -> str:
        """Return a line on the engine's start, for the time before the first snapshot."""
        return "starting the engine" if self._host is None else self._host.status

    def snapshot(self, window_ns: int) -> Snapshot | None:
        """Return the present view over a window; None before the load has begun."""
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
        if hasattr(self._source, "has_steps"):
            self._source.has_steps = self.has_steps
        return self._source.snapshot(window_ns)

    def close(self) -> None:
        """Close the source of snapshots; safe to call twice."""
        if self._source is not None:
            self._source.close()

    def stop(self) -> None:
        """Close the source and stop the engine."""
        self.close()
        if self._host is not None:
            self._host.stop()
