"""Sources of the screen's snapshots, and the thread that fetches them.

The thread owns the source: only it calls and closes it, so a source needs no lock and a slow one
delays only its own next snapshot.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from inferscope.errors import InferScopeError
from inferscope.fold import Snapshot

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class SnapshotSource(Protocol):
    """Source of snapshots for the screen.

    A source may also have a `title`, shown until the first snapshot; a `status`, its activity until
    then; a `focus`, the request whose token times it returns; `has_steps`, whether it returns
    recent steps; and `levels`, the judge of its requests.
    """

    def snapshot(self, window_ns: int) -> Snapshot | None:
        """Return the current view over a window; None while there is nothing to show."""

    def close(self) -> None:
        """Release the source."""


class Feed:
    """Thread that fetches a snapshot at the repaint rate."""

    def __init__(
        self,
        source: SnapshotSource,
        *,
        window_ns: int,
        refresh_hz: float,
        on_snapshot: Callable[[Snapshot], None],
        on_failure: Callable[[str], None],
        on_status: Callable[[str], None] = lambda status: None,
    ) -> None:
        """Set up the feed; `start` begins. The callbacks are called on the feed's thread."""
        self._source = source
        self._window_ns = window_ns
        self._refresh_hz = refresh_hz
        self._on_snapshot = on_snapshot
        self._on_failure = on_failure
        self._on_status = on_status
        self._focus: str | None = None
        self._has_steps = False
        self._actions: queue.SimpleQueue[Callable[[SnapshotSource], object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_stopping = False
        # No daemon: the fold runs NumPy, whose C++ parts abort a process that exits under them.
        self._thread = threading.Thread(target=self._run, name="inferscope-feed")

    def start(self) -> None:
        """Start fetching."""
        self._thread.start()

    def set_pace(self, *, window_ns: int, refresh_hz: float) -> None:
        """Change window and rate; the next snapshot is taken at once."""
        self._window_ns = window_ns
        self._refresh_hz = refresh_hz
        self._wake.set()

    def call(self, action: Callable[[SnapshotSource], object]) -> None:
        """Call a function with the source, on the feed's thread, before the next snapshot."""
        self._actions.put(action)
        self._wake.set()

    def set_needs(self, *, focus: str | None, has_steps: bool) -> None:
        """Change the focused request, and whether steps are needed; fetch at once if these change.

        A need that ends does not wake the thread.
        """
        is_new = (focus != self._focus and focus is not None) or (has_steps > self._has_steps)
        self._focus, self._has_steps = focus, has_steps
        if is_new:
            self._wake.set()

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Stop fetching and wait until the source is closed, up to a timeout.

        A source that can is interrupted. The process ends after the thread has closed the source.
        """
        self._is_stopping = True
        self._wake.set()
        if hasattr(self._source, "interrupt"):
            self._source.interrupt()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            # The interpreter's exit ends the loop too: an application may have failed to stop it.
            while not self._is_stopping and threading.main_thread().is_alive():
                pause_s = self._fetch()
                self._wake.wait(pause_s)
                self._wake.clear()
        finally:
            self._source.close()

    def _fetch(self) -> float:
        """Fetch once; return the pause until the next time."""
        try:
            if hasattr(self._source, "focus"):
                self._source.focus = self._focus
            if hasattr(self._source, "has_steps"):
                self._source.has_steps = self._has_steps
            while not self._actions.empty():
                self._actions.get()(self._source)
            snapshot = self._source.snapshot(self._window_ns)
        except InferScopeError as error:
            self._on_failure(str(error))
            return _RETRY_S
        except Exception as error:  # the thread's top level: the screen must show it, not die of it
            logger.exception("cannot take a snapshot")
            self._on_failure(f"{type(error).__name__}: {error}")
            return _RETRY_S
        if snapshot is not None:
            self._on_snapshot(snapshot)
        else:
            self._on_status(getattr(self._source, "status", ""))
        return 1.0 / self._refresh_hz
