"""Creation of this process's ring: its directory, size, name and permissions."""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from inferscope.errors import InferScopeError, RingUnavailable
from inferscope.host_signals import start_thread
from inferscope.probe.clock import Clock
from inferscope.probe.host_log import note, warn
from inferscope.probe.identity import identity
from inferscope.ring import (
    IS_LITTLE_ENDIAN,
    ControlByte,
    NoRoom,
    RingWriter,
    control_path,
    file_name,
    make_private,
    open_control,
    reading_from,
    remove_old_rings,
    ring_directory,
)

DEFAULT_RING_MB = 64
_MOST_RING_MB = 64 * 1024
_SMALLEST_BYTES = 256 * 1024
_MOST_NAMES = 1000
_MOST_REMOVED = 3
PATIENCE_S = 30.0
"""A ring is made in milliseconds; on a slow network disk its blocks take seconds to write."""

_Made = TypeVar("_Made")


def make_ring(role: str, rank: int, clock: Clock, *, engine_id: str | None = None) -> RingWriter:
    """Make the ring file in this engine's directory, smaller if the disk is nearly full.

    Args:
        role: role of the process.
        rank: rank of the process within its role.
        clock: clock that gives the start time.
        engine_id: name of the directory, for a process that belongs to no engine.

    Raises:
        RingUnavailable: there is no space even for a small ring, or no permission.
        InferScopeError: the machine is big-endian, or all names are taken.
    """
    if not IS_LITTLE_ENDIAN:
        raise InferScopeError("columns are little-endian and this machine is not")
    folder, group_id = ring_directory(), _group_id()
    if not os.path.isabs(os.environ.get("INFERSCOPE_DIR") or folder):
        # Child processes inherit the name, and may have another working directory.
        os.environ["INFERSCOPE_DIR"] = str(folder)
    _make_private(folder, group_id)
    try:
        for each in reading_from(folder):
            remove_old_rings(each)
    except Exception as error:  # whatever a damaged ring causes must not stop recording
        note("old rings are left where they are: %s", error)
    me = identity(role, rank, engine=engine_id, clock=clock)
    home = folder / file_name(me.engine_id)
    stem = f"{file_name(role)}-{rank}-{me.pid}"
    capacity = wanted = _ring_bytes()
    num_removed = 0
    for number in range(1, _MOST_NAMES):
        path = home / (f"{stem}.ring" if number == 1 else f"{stem}.{number}.ring")
        while True:
            try:
                _make_private(home, group_id)
                ring = RingWriter(path, me, capacity=capacity, group_id=group_id)
            except FileExistsError:
                break
            except NoRoom:
                if capacity <= _SMALLEST_BYTES:
                    raise
                capacity //= 4
                continue
            except RingUnavailable as error:
                # Another process's cleanup removes an empty folder, at any time before there is a
                # ring in it.
                if num_removed == _MOST_REMOVED or not isinstance(
                    error.__cause__, FileNotFoundError
                ):
                    raise
                num_removed += 1
                continue
            if capacity < wanted:
                warn(
                    "no room for a ring of %.0f MB: %s has %.2g MB",
                    wanted / (1 << 20),
                    path,
                    capacity / (1 << 20),
                )
            if ring.is_remote:
                warn(
                    "%s is on a network or FUSE file system: each record may wait for it. "
                    "Set INFERSCOPE_DIR to a local folder.",
                    path,
                )
            return ring
    raise InferScopeError(f"{home} holds {_MOST_NAMES} rings of this process. Remove some.")


def open_switch(ring: RingWriter) -> ControlByte | None:
    """Make the control byte of a ring and return it; log a failure and return None."""
    try:
        return open_control(ring.path)
    except OSError as error:
        warn("%s cannot be switched: %s", ring.path, error)
        return None


def discard(path: Path) -> None:
    """Delete a closed ring that will not be read, and its control byte."""
    for each in (path, control_path(path)):
        each.unlink(missing_ok=True)


def away_from_signals(
    make: Callable[[], _Made], undo: Callable[[_Made], None], too_late: Callable[[], _Made]
) -> _Made:
    """Return what `make` returns, called on a thread of its own.

    Signal handlers run on the main thread only. What one raises while the caller waits passes
    through here and reaches no `except` clause of `make`, which would take it for the fault of a
    file. What `make` returns after that, or after `PATIENCE_S`, is undone: it may wait for a file
    system that is gone, or run a finaliser that waits for a lock of the caller's.

    Args:
        make: must not raise.
        undo: takes back what `make` has returned.
        too_late: called after `PATIENCE_S`; makes what is returned instead. A caller that returns
            the result itself, without an instruction in between, loses it to no handler.

    Raises:
        RuntimeError: the system gives no more threads.
    """
    made: list[_Made] = []
    is_given_up = False
    is_done = _thread.allocate_lock()

    def run() -> None:
        try:
            made.append(make())  # starts the probe's other threads, which block signals as well
        finally:
            is_done.release()
        if is_given_up:
            take_back()

    def take_back() -> None:
        with suppress(IndexError):  # the other thread does it: `pop` gives it to one alone
            undo(made.pop())

    is_done.acquire()
    try:
        start_thread(run)
        if is_done.acquire(True, PATIENCE_S) and made:
            return made[0]
    except BaseException:
        is_given_up = True
        take_back()
        raise
    is_given_up = True
    take_back()
    return too_late()


def _make_private(folder: Path, group_id: int | None) -> None:
    line = make_private(folder, group_id=group_id)
    if line:
        warn("%s", line)


def _ring_bytes() -> int:
    given = os.environ.get("INFERSCOPE_RING_MB", "")
    try:
        megabytes = float(given) if given else DEFAULT_RING_MB
        if not 0 < megabytes <= _MOST_RING_MB:
            raise ValueError
    except ValueError:
        warn("INFERSCOPE_RING_MB=%s is not a size in MB; using %d", given, DEFAULT_RING_MB)
        megabytes = DEFAULT_RING_MB
    return int(megabytes * (1 << 20))


def _group_id() -> int | None:
    """Return the ID of the group in INFERSCOPE_GROUP (a name or a number), which reads rings."""
    group = os.environ.get("INFERSCOPE_GROUP")
    if not group:
        return None
    if group.isdecimal():
        return int(group)
    import grp  # seldom needed

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        warn("INFERSCOPE_GROUP=%s: no such group; rings stay private", group)
        return None
