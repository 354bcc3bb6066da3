"""Files that only their owner can read, which is every file we write."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from inferscope.errors import BadInput


def private_file(path: Path) -> IO[bytes]:
    """Create a file, or empty it, so that only its owner can read it.

    Raises:
        BadInput: it cannot be created, with the reason.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(handle).st_mode):  # never a device: root could change it
            os.fchmod(handle, 0o600)  # it may have been there, open to others
        return os.fdopen(handle, "wb")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another place.") from error
