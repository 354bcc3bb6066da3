"""A re-entrant lock with a signal behind one of its calls, where CPython runs handlers."""

from __future__ import annotations

import signal
import threading


class InterruptedLock:
    """A lock that sends this process SIGALRM behind each `acquire`, or each `release`."""

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._name = name

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_acquired = self._lock.acquire(blocking, timeout)
        self._behind("acquire")
        return is_acquired

    def release(self) -> None:
        self._lock.release()
        self._behind("release")

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _behind(self, name: str) -> None:
        if name == self._name:
            signal.raise_signal(signal.SIGALRM)


def is_free(lock: InterruptedLock) -> bool:
    """Return whether another thread can acquire a lock now."""
    found = []
    other = threading.Thread(target=lambda: found.append(lock._lock.acquire(blocking=False)))
    other.start()
    other.join()
    return found[0]
