"""One sampler per device: a lock each, which goes with its process, however that ends.

Whoever comes second leaves the device alone, says who has it, and asks again later.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from inferscope.counters.source import Unavailable
from inferscope.probe.identity import file_name

HOST = "host"
"""What is claimed for the machine's own counters."""


class Claims:
    """The devices that this process samples; its sources share them."""

    def __init__(self, folder: Path) -> None:
        """Take the folder that locks are in; it must exist by the first claim."""
        self._folder = folder
        self._handles: dict[str, int] = {}

    def take(self, device: str) -> None:
        """Claim a device, unless it is ours already.

        Raises:
            Unavailable: another process has it, or no lock can be made.
        """
        if device in self._handles:
            return
        path = self._folder / f"{file_name(device)}.lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unavailable(
                f"cannot open {path}: {error.strerror}. Sample as the user who owns the rings."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise Unavailable(
                f"{device} is sampled already, by process {holder}: this one waits to take over."
            ) from None
        except OSError as error:
            os.close(handle)
            raise Unavailable(f"cannot lock {path}: {error.strerror}.") from error
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handles[device] = handle

    def close(self) -> None:
        """Give all devices back; safe to call twice."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)


class NoClaims:
    """For one reading, which takes no device from anybody."""

    def take(self, device: str) -> None:
        """Claim nothing."""


def _holder(handle: int) -> str:
    """Return who holds a lock by its own word; it may be about to say it."""
    word = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return word if word.isdigit() else "unknown"
