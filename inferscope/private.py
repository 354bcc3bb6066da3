"""Files that only their owner can read: recordings, exports, pictures of the screen."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from inferscope.errors import BadInput


def open_private(path: Path) -> int:
    """Create a file, or empty it, so that only its owner can read it; return its handle.

    Raises:
        OSError: it cannot be created.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # never a device: root could change it
            os.fchmod(handle, 0o600)  # it may have been there, open to others
    except OSError:
        os.close(handle)
        raise
    return handle


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
