"""Asking a probe for a kernel profile: a file beside its ring, as the control byte is, no listener.

x.profile         the request, for as long as it is being answered: one at a time
x.trace.json      the answer, a Chrome trace with all in it
x.profile-error   or why there is none
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from inferscope.errors import BadInput, InferScopeError
from inferscope.private import write_private

MOST_S = 30.0
"""A profile slows the engine down, and its trace grows all the while."""
_STALE_S = 300.0
"""A request this old was of a process that has died with it."""
_LARGEST_BYTES = 64


class ProfileBusy(InferScopeError):
    """Another profile of the process is under way."""


def request_path(ring_path: Path) -> Path:
    """Return where a probe looks for requests."""
    return ring_path.with_suffix(".profile")


def trace_path(ring_path: Path) -> Path:
    """Return where it leaves the trace."""
    return ring_path.with_suffix(".trace.json")


def error_path(ring_path: Path) -> Path:
    """Return where it says why there is none."""
    return ring_path.with_suffix(".profile-error")


def ask(ring_path: Path, seconds: float) -> None:
    """Ask the probe that writes a ring for a profile.

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
    for old in (trace_path(ring_path), error_path(ring_path)):
        old.unlink(missing_ok=True)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{seconds}\n")


def requested(ring_path: Path) -> float | None:
    """Return how long a profile is asked for; None where none is, or not by our user."""
    path = request_path(ring_path)
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        if status.st_size > _LARGEST_BYTES or time.time() - status.st_mtime > _STALE_S:
            return None
        seconds = float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or half written: the next look sees it whole
        return None
    return seconds if 0 < seconds <= MOST_S else None


def answer(ring_path: Path, *, error: str = "") -> None:
    """Say that a request is done; the trace lies there already where there is one."""
    with suppress(OSError):  # a full disk: else the request would be answered again and again
        if error:
            write_private(error_path(ring_path), error.encode())
    with suppress(OSError):  # last: who asked looks for an answer when this is gone
        request_path(ring_path).unlink(missing_ok=True)
