"""Handle of an observation, which adapters of loops in this process return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferscope.host_signals import pass_on, start_thread

_PATIENCE_S = 1.0


class Watch:
    """An observation, until it is closed.

    Attributes:
        path: the ring, None where nothing is recorded.
    """

    def __init__(self, path: Path | None, stop: Callable[[], None]) -> None:
        """Make a handle from the ring and the function that ends the observation."""
        self.path = path
        self._stop: Callable[[], None] | None = stop

    def close(self) -> None:
        """End the observation. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def run_locked(lock: Any, action: Callable[[], None]) -> None:
    """Call `action` while holding a lock, after a second of waiting on a thread of its own.

    A finaliser of the host may run on the thread that opens a ring, for a caller that holds the
    lock and waits for that thread.
    """

    def run() -> None:
        with lock:
            action()

    if lock._is_owned():  # by a call around this one, which releases it
        action()
        return
    # A signal handler may raise right behind any call, so no note of the acquisition is sure to be
    # made. None is needed: only the owner can release the lock.
    try:
        if lock.acquire(timeout=_PATIENCE_S):
            action()
            return
    finally:
        try:
            lock.release()
        except RuntimeError as error:  # it was not acquired
            pass_on(error)
    with suppress(RuntimeError):  # the interpreter is ending, and all rings are closed
        start_thread(run)
