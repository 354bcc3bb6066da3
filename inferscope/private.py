"""Files that only their owner can read: recordings, exports, pictures of the screen."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import IO

from inferscope.errors import BadInput


def open_private(path: Path, *, alone: bool = False) -> int:
    """Create a file, or empty it, so that only its owner can read it; return its handle.

    Args:
        path: the file.
        alone: lock it as long as it is open, and leave one alone that is locked.

    Raises:
        BlockingIOError: it is locked.
        OSError: it cannot be created.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # never a device: root could change it
            if alone:
                _lock(handle)
            os.ftruncate(handle, 0)
            os.fchmod(handle, 0o600)  # it may have been there, open to others
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read.

    Raises:
        OSError: it cannot be written.
    """
    with os.fdopen(open_private(path), "wb") as file:
        file.write(content)


def private_file(path: Path) -> IO[bytes]:
    """Create a file, or empty it, so that only its owner can read it.

    Raises:
        BadInput: it cannot be created, with the reason.
    """
    try:
        return os.fdopen(open_private(path), "wb")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another place.") from error
