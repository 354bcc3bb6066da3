"""A lock that is free in a forked child, whichever thread of the parent holds it.

That thread does not exist in the child, where a call that waits for the lock would never return:
`generate`, and the end of the process, which closes all rings under such a lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def forked_lock() -> Any:
    """Return a new lock, which the thread that holds it may acquire again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # by the thread that forked, which releases it later
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork)
