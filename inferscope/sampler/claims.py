"""Exclusive claims: one sampler per device and ring directory, one PM session per device.

    Claims         a device, in one ring directory      its readers see each counter once
    SessionClaims  a device's PM session, on the host   the hardware supports one

Ring directories are private to their owner, so a sampler serves the readers of one directory. A
host-wide claim would hide a device from the readers of all other directories, although NVML and
GPM serve any number of clients. Only PM sampling is exclusive. The kernel releases both kinds of
claim when their process ends. A second sampler skips the device, reports the holder and retries.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from inferscope.private import lock_holder
from inferscope.ring import file_name
from inferscope.sampler.source import Unavailable

HOST = "host"
"""Name of the claim on the host's own counters."""
_UNIX_SOCKETS = Path("/proc/net/unix")


class Claims:
    """Locks on the devices that this process samples, shared by its sources."""

    def __init__(self, folder: Path) -> None:
        """Store the directory of the lock files, which must exist before the first claim."""
        self._folder = folder
        self._handles: dict[str, int] = {}

    def take(self, device: str) -> None:
        """Claim a device unless this process holds it already.

        Raises:
            Unavailable: another process holds it, or the lock file cannot be created.
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
            holder = lock_holder(handle)
            os.close(handle)
            raise Unavailable(
                f"process {holder} samples {device} already; this sampler takes over when it exits."
            ) from None
        except OSError as error:
            os.close(handle)
            raise Unavailable(f"cannot lock {path}: {error.strerror}.") from error
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handles[device] = handle

    def close(self) -> None:
        """Release all devices; safe to call twice."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)


class SessionClaims:
    """Claims on the devices' PM sessions, across all users and ring directories of the host.

    A claim is an abstract Unix socket named after the device: no file that other users cannot
    open, and none that outlives its process. The name of a second socket holds the process ID,
    because all users can read socket names. Names belong to one network namespace; between
    containers, CUPTI itself refuses a second session.
    """

    def __init__(self, sockets: Path = _UNIX_SOCKETS) -> None:
        """Store the path of the kernel's list of Unix sockets."""
        self._sockets = sockets
        self._held: dict[str, tuple[socket.socket, ...]] = {}

    def take(self, device: str) -> None:
        """Claim a device's session unless this process holds it already.

        Raises:
            Unavailable: another process holds it, or the socket cannot be created.
        """
        if device in self._held:
            return
        name = f"inferscope-pm/{file_name(device)}"
        try:
            first = _bound(name)
        except OSError as error:
            holder = self._holder(name)
            by = f"process {holder}" if holder else f"another process ({error.strerror})"
            raise Unavailable(
                f"{by} holds the PM session of {device}; this sampler takes over when it exits."
            ) from None
        held: tuple[socket.socket, ...] = (first,)
        with suppress(OSError):  # the name is information for others: the claim holds without it
            held += (_bound(f"{name}/{os.getpid()}"),)
        self._held[device] = held

    def give_back(self, device: str) -> None:
        """Release a device's session if this process holds it."""
        for one in self._held.pop(device, ()):
            one.close()

    def close(self) -> None:
        """Release all sessions; safe to call twice."""
        for device in list(self._held):
            self.give_back(device)

    def _holder(self, name: str) -> int | None:
        """Return the process ID that the holder of a name published; None if there is none yet."""
        try:
            lines = self._sockets.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return None
        pids = [line.partition(f" @{name}/")[2] for line in lines]
        return next((int(pid) for pid in pids if pid.isdecimal()), None)


class NoClaims:
    """Claims that always succeed, for a single reading that excludes no other sampler."""

    def take(self, device: str) -> None:
        """Accept the device without a lock."""


def _bound(name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made
