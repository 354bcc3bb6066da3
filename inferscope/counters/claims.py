"""One sampler per device among those that write to the same readers, and one PM session at all.

    Claims         a device, in one folder of rings     its readers see each counter once
    SessionClaims  a device's PM session, on the host   the hardware has one

Rings are private to their folder's owner, so a sampler serves the readers of one folder only: were
a device claimed for the whole host, whoever came second would see nothing of it, though NVML and
GPM answer everybody. Only PM sampling is exclusive. Both kinds go with their process, however that
ends. Whoever comes second leaves the device alone, says who has it, and asks again later.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from inferscope.counters.source import Unavailable
from inferscope.ring.discovery import file_name

HOST = "host"
"""What is claimed for the machine's own counters."""
_UNIX_SOCKETS = Path("/proc/net/unix")


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


class SessionClaims:
    """The devices whose PM session is this process's, among all users and folders of the host.

    A claim is an abstract Unix socket with the device's name: there is no file that another user
    could not open, or that outlives its process. A second socket's name tells the process; all may
    read the names. They are those of one network namespace: from another container the library
    itself has to refuse.
    """

    def __init__(self, sockets: Path = _UNIX_SOCKETS) -> None:
        """Take where the kernel lists the names."""
        self._sockets = sockets
        self._held: dict[str, tuple[socket.socket, ...]] = {}

    def take(self, device: str) -> None:
        """Claim a device's session, unless it is ours already.

        Raises:
            Unavailable: another process has it, or no socket can be made.
        """
        if device in self._held:
            return
        name = f"inferscope-pm/{file_name(device)}"
        try:
            first = _bound(name)
        except OSError as error:
            holder = self._holder(name)
            why = f"by process {holder}" if holder else f"it seems ({error.strerror})"
            raise Unavailable(
                f"{device} is sampled by PM already, {why}: this one waits to take over."
            ) from None
        held: tuple[socket.socket, ...] = (first,)
        with suppress(OSError):  # a name that somebody has taken in vain says no less
            held += (_bound(f"{name}/{os.getpid()}"),)
        self._held[device] = held

    def give_back(self, device: str) -> None:
        """Give a device's session back, if it is ours."""
        for one in self._held.pop(device, ()):
            one.close()

    def close(self) -> None:
        """Give all sessions back; safe to call twice."""
        for device in list(self._held):
            self.give_back(device)

    def _holder(self, name: str) -> int | None:
        """Return who holds a name by its own word; it may be about to say it."""
        try:
            lines = self._sockets.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return None
        pids = [line.partition(f" @{name}/")[2] for line in lines]
        return next((int(pid) for pid in pids if pid.isdecimal()), None)


class NoClaims:
    """For one reading, which takes no device from anybody."""

    def take(self, device: str) -> None:
        """Claim nothing."""


def _bound(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


def _holder(handle: int) -> str:
    """Return who holds a lock by its own word; it may be about to say it."""
    word = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return word if word.isdigit() else "unknown"
