"""Atomic exchange of two directories of one file system: renameat2(2) with RENAME_EXCHANGE.

Linux has it since 3.15 on ext4, xfs, btrfs and tmpfs; network file systems mostly do not. Python's
`os` does not offer it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ENOSYS = 38


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories.

    Raises:
        OSError: they were not exchanged; EINVAL or ENOSYS: not supported here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = libc.renameat2
    except AttributeError:  # a C library from before 2018, or other than glibc
        raise OSError(_ENOSYS, os.strerror(_ENOSYS)) from None
    if renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))
