"""Requests for a kernel profile: files next to a ring, like the control byte, without a listener.

x.profile         the request, until it is answered; one at a time
x.trace.json      the result, a complete Chrome trace
x.profile-error   the reason why there is no result
x.trace.partial   the incomplete result; torch writes to x.trace.partial.tmp before that
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import BadInput, InferScopeError
from inferscope.private import write_private

MOST_S = 30.0
"""Longest profile in seconds: profiling slows the engine and its trace keeps growing."""
_STALE_S = 300.0
"""Age in seconds above which a request is abandoned: its process has ended."""
_LARGEST_BYTES = 64


class ProfileBusy(InferScopeError):
    """Another profile of the process is in progress."""


class Request(NamedTuple):
    """A request for a profile as found by the probe."""

    seconds: float
    inode: int
    changed_ns: int
    """Time of change; identifies the file together with the inode, since all share one name."""


def request_path(ring_path: Path) -> Path:
    """Return the path of a probe's requests."""
    return ring_path.with_suffix(".profile")


def trace_path(ring_path: Path) -> Path:
    """Return the path of the probe's trace."""
    return ring_path.with_suffix(".trace.json")


def partial_paths(ring_path: Path) -> tuple[Path, Path]:
    """Return the paths of the incomplete trace: the probe's own, then torch's."""
    partial = ring_path.with_suffix(".trace.partial")
    return partial, partial.with_name(f"{partial.name}.tmp")


def error_path(ring_path: Path) -> Path:
    """Return the path of the file that states why there is no trace."""
    return ring_path.with_suffix(".profile-error")


def send_request(ring_path: Path, seconds: float) -> Request:
    """Request a profile from the probe that writes a ring; return the request.

    Raises:
        BadInput: the profile would be too long.
        ProfileBusy: another profile is in progress.
        OSError: this user may not write to the folder.
    """
    if not 0 < seconds <= MOST_S:
        raise BadInput(
            f"--seconds is {seconds:g}. Give at most {MOST_S:g}: profiling slows the engine."
        )
    path = request_path(ring_path)
    with suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime > _STALE_S:
            path.unlink()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ProfileBusy(
            f"a profile of this process is in progress ({path}). Wait until it ends."
        ) from None
    with os.fdopen(handle, "wb", buffering=0) as file:
        try:
            for old in (trace_path(ring_path), error_path(ring_path)):
                old.unlink(missing_ok=True)
            file.write(f"{seconds}\n".encode("ascii"))
        except OSError:  # an unread request would profile the engine for nothing
            path.unlink(missing_ok=True)
            raise
        status = os.fstat(handle)
    return Request(seconds, status.st_ino, status.st_ctime_ns)


def requested(ring_path: Path) -> Request | None:
    """Return the request for a profile, None if there is none or another user made it."""
    try:
        # A half-written file is read whole at the next call; a FIFO must not block it.
        handle = os.open(
            request_path(ring_path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        try:
            content = os.read(handle, _LARGEST_BYTES + 1)
            status = os.fstat(handle)
        finally:
            os.close(handle)
        seconds = float(content.decode("ascii"))
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    if len(content) > _LARGEST_BYTES or time.time() - status.st_mtime > _STALE_S:
        return None
    if not 0 < seconds <= MOST_S:
        return None
    return Request(seconds, status.st_ino, status.st_ctime_ns)


def is_pending(ring_path: Path, request: Request) -> bool:
    """Return whether this same request is still unanswered."""
    try:
        status = request_path(ring_path).lstat()
    except OSError:
        return False
    return (status.st_ino, status.st_ctime_ns) == (request.inode, request.changed_ns)


def answer(ring_path: Path, request: Request, *, error: str = "") -> None:
    """Remove a finished request, after its trace, if any, was moved into place."""
    if not is_pending(ring_path, request):
        return
    with suppress(OSError):  # a full disk must not make the probe answer again and again
        if error:
            error_path(ring_path).unlink(missing_ok=True)  # opening a FIFO waits for a reader
            write_private(error_path(ring_path), error.encode("utf-8", "replace"))
    with suppress(OSError):  # last: the requester reads the result once this is gone
        request_path(ring_path).unlink(missing_ok=True)


def withdraw(ring_path: Path, request: Request) -> None:
    """Remove a request and its result, unless a later request exists."""
    with suppress(OSError):
        if is_pending(ring_path, request):
            request_path(ring_path).unlink(missing_ok=True)
        elif request_path(ring_path).exists():
            return
        trace_path(ring_path).unlink(missing_ok=True)
        error_path(ring_path).unlink(missing_ok=True)
