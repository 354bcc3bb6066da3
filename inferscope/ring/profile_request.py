"""Asking a probe for a kernel profile: a file beside its ring, as the control byte is, no listener.

x.profile         the request, for as long as it is being answered: one at a time
x.trace.json      the answer, a Chrome trace with all in it
x.profile-error   or why there is none
x.trace.partial   the answer before it is whole; torch writes to x.trace.partial.tmp before that
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
"""A profile slows the engine down, and its trace grows all the while."""
_STALE_S = 300.0
"""A request this old was of a process that has died with it."""
_LARGEST_BYTES = 64


class ProfileBusy(InferScopeError):
    """Another profile of the process is under way."""


class Request(NamedTuple):
    """A request for a profile, as the probe finds it."""

    seconds: float
    inode: int
    changed_ns: int
    """With the inode: which file it is. A later request has the same name."""


def request_path(ring_path: Path) -> Path:
    """Return where a probe looks for requests."""
    return ring_path.with_suffix(".profile")


def trace_path(ring_path: Path) -> Path:
    """Return where it leaves the trace."""
    return ring_path.with_suffix(".trace.json")


def partial_paths(ring_path: Path) -> tuple[Path, Path]:
    """Return where it writes the trace first, and where torch writes it before that."""
    partial = ring_path.with_suffix(".trace.partial")
    return partial, partial.with_name(f"{partial.name}.tmp")


def error_path(ring_path: Path) -> Path:
    """Return where it says why there is none."""
    return ring_path.with_suffix(".profile-error")


def ask(ring_path: Path, seconds: float) -> Request:
    """Ask the probe that writes a ring for a profile; return the request.

    Raises:
        BadInput: it would be too long.
        ProfileBusy: one is under way.
        OSError: the folder is not ours to write to.
    """
    if not 0 < seconds <= MOST_S:
        raise BadInput(
            f"--seconds is {seconds:g}. Give up to {MOST_S:g}: profiling slows the engine."
        )
    path = request_path(ring_path)
    with suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime > _STALE_S:
            path.unlink()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ProfileBusy(
            f"a profile of this process is under way ({path}). Wait for its end."
        ) from None
    with os.fdopen(handle, "wb", buffering=0) as file:
        try:
            for old in (trace_path(ring_path), error_path(ring_path)):
                old.unlink(missing_ok=True)
            file.write(f"{seconds}\n".encode("ascii"))
        except OSError:  # else the engine would be profiled to no purpose
            path.unlink(missing_ok=True)
            raise
        status = os.fstat(handle)
    return Request(seconds, status.st_ino, status.st_ctime_ns)


def requested(ring_path: Path) -> Request | None:
    """Return the request for a profile; None where there is none, or it is not our user's."""
    try:
        # A file that is half written is seen whole at the next look; a FIFO must not block it.
        handle = os.open(
            request_path(ring_path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        with os.fdopen(handle, "rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
            status = os.fstat(handle)
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
    """Return whether this very request is still there, unanswered."""
    try:
        status = request_path(ring_path).lstat()
    except OSError:
        return False
    return (status.st_ino, status.st_ctime_ns) == (request.inode, request.changed_ns)


def answer(ring_path: Path, request: Request, *, error: str = "") -> None:
    """Remove a request that is done; its trace, where there is one, is in its place already."""
    if not is_pending(ring_path, request):
        return
    with suppress(OSError):  # a full disk: else the request would be answered again and again
        if error:
            write_private(error_path(ring_path), error.encode("utf-8", "replace"))
    with suppress(OSError):  # last: the requester looks for an answer when this is gone
        request_path(ring_path).unlink(missing_ok=True)


def withdraw(ring_path: Path, request: Request) -> None:
    """Remove a request and its answer; do nothing where there is a later request."""
    with suppress(OSError):
        if is_pending(ring_path, request):
            request_path(ring_path).unlink(missing_ok=True)
        elif request_path(ring_path).exists():
            return
        trace_path(ring_path).unlink(missing_ok=True)
        error_path(ring_path).unlink(missing_ok=True)
