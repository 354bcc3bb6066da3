"""One collector per ring folder: two would count everything twice.

The lock is the kernel's: it goes with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inferscope.errors import InferScopeError, RingUnavailable
from inferscope.ring.discovery import make_private

LOCK_NAME = "collect.lock"


@contextmanager
def only_collector(folder: Path) -> Iterator[None]:
    """Be the collector of a ring folder for as long as the context lasts; make the folder.

    Raises:
        InferScopeError: another one runs, with its pid; or the folder cannot be used.
    """
    try:
        make_private(folder)
    except RingUnavailable as error:
        if not folder.is_dir():
            raise
        raise InferScopeError(
            f"{folder} belongs to uid {folder.stat().st_uid}, and a collector keeps its lock there."
            " Collect as that user, or have root make the folder for all users, with mode 1777."
        ) from error
    path = folder / LOCK_NAME
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InferScopeError(
            f"cannot open {path}: {error.strerror}. Collect as the user who owns the rings."
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InferScopeError(
                f"a collector runs already on {folder}, as process {_pid(handle)}. "
                "Stop that one, or give this one other rings."
            ) from None
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _pid(handle: int) -> str:
    """Return who holds the lock by its own word; it may be about to say it."""
    word = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return word if word.isdigit() else "unknown"
