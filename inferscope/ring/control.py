"""The control byte: turns a probe off and on from outside, without a listener or a restart.

It is a file of its own next to the ring, so that readers can open the ring read-only. The probe's
own thread reads it every 100 ms. The file is not mapped: `echo 0 > x.control` truncates it
first, and access to a mapped byte beyond the end of its file kills the process with SIGBUS.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from inferscope.host_signals import pass_on
from inferscope.ring.writer import with_high_number

SWITCHED_ON = 1
SWITCHED_OFF = 0
_OFF_BYTES = (bytes([SWITCHED_OFF]), b"0")


class ControlByte:
    """The probe's handle of the control file."""

    def __init__(self, handle: int) -> None:
        self._handle = with_high_number(handle)
        self._inode = self._inode_now()

    def is_on(self) -> bool:
        """Return whether the probe is on; true if the byte is missing or cannot be read."""
        try:
            return not self._is_ours() or os.pread(self._handle, 1, 0) not in _OFF_BYTES
        except OSError:
            return True

    def close(self) -> None:
        """Close the file; safe to call twice."""
        is_ours, handle, self._handle = self._is_ours(), self._handle, -1
        if is_ours:
            os.close(handle)

    def _is_ours(self) -> bool:
        """Return whether the descriptor still refers to this file; hosts may close it."""
        try:
            return self._inode_now() == self._inode
        except OSError as error:
            pass_on(error)
            return False

    def _inode_now(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_dev, status.st_ino


def control_path(ring_path: Path) -> Path:
    """Return the path of a ring's control file."""
    return ring_path.with_suffix(".control")


def open_control(ring_path: Path) -> ControlByte:
    """Create the control file, switched on, and return the probe's handle of it."""
    path = control_path(ring_path)
    path.unlink(missing_ok=True)  # left by an earlier process with this PID, or foreign
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # without space for the byte the probe records all the same
        os.pwrite(handle, bytes([SWITCHED_ON]), 0)
    return ControlByte(handle)


def switch(ring_path: Path, *, to: int, owner: int | None = None) -> None:
    """Turn the probe that writes this ring on or off; it reacts within 100 ms, at its next step.

    Args:
        ring_path: the ring.
        to: SWITCHED_ON or SWITCHED_OFF.
        owner: user ID of the ring's owner as found; None accepts any. Root needs it: the owner of a
            folder can replace it by a link to another user's folder at any time.

    Raises:
        OSError: the ring has no control byte, or this user may not write it.
    """
    # Non-blocking: opening a pipe of that name would wait forever for a reader.
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(control_path(ring_path), flags)
    try:
        status = os.fstat(handle)
        is_theirs = owner is None or status.st_uid == owner
        if not is_theirs or not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, f"not a plain file of uid {owner}")
        os.pwrite(handle, bytes([to]), 0)
    finally:
        os.close(handle)
