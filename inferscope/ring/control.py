"""The control byte: switches a probe off and on from outside, without a listener or a restart.

It stands in a file of its own beside the ring, so that readers can open the ring read-only. The
probe's thread beside the engine reads it every 100 ms. It is not mapped: `echo 0 > x.control`
shortens the file first, and a mapped byte beyond the end of its file kills the process with SIGBUS.
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
    """The probe's end of the control file."""

    def __init__(self, handle: int) -> None:
        self._handle = with_high_number(handle)
        self._inode = self._inode_now()

    def is_on(self) -> bool:
        """Read the byte; on, where there is none or the file cannot be read."""
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
        """Return whether the host has neither closed the descriptor nor given its number away."""
        try:
            return self._inode_now() == self._inode
        except OSError as error:
            pass_on(error)
            return False

    def _inode_now(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_dev, status.st_ino


def control_path(ring_path: Path) -> Path:
    """Return the control file that belongs to a ring."""
    return ring_path.with_suffix(".control")


def open_control(ring_path: Path) -> ControlByte:
    """Make the control file, switched on, for the probe to read."""
    path = control_path(ring_path)
    path.unlink(missing_ok=True)  # of an earlier process with this pid, or not ours at all
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # no space for a byte: the ring matters more, and none means on
        os.pwrite(handle, bytes([SWITCHED_ON]), 0)
    return ControlByte(handle)


def switch(ring_path: Path, *, to: int, owner: int | None = None) -> None:
    """Switch the probe that writes this ring on or off, within 100 ms and its next step.

    Args:
        ring_path: the ring.
        to: SWITCHED_ON or SWITCHED_OFF.
        owner: user of the ring as it was found; None if any will do. For root: the owner of a
            folder can put a link to another user's folder in its place at any time.

    Raises:
        OSError: it has no control byte, or this user may not write it.
    """
    # Not blocking: a pipe by that name would wait for a reader forever.
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
