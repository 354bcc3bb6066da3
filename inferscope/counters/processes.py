"""Who is at work on a device: our engines, others, or nobody can tell.

The driver names processes as the host does. Seen from the host's pid namespace that is who they
are. Seen from within a container such a number is somebody else or nobody, so there the answer is
"unknown", unless the driver shows us our own engine: then it speaks of our namespace. An engine is
never accused of being foreign to itself.

An engine's processes are found by the locks on their rings: the kernel names each holder in the
namespace of whoever asks, whatever number the process has in its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from inferscope.records import SAMPLER_ROLE
from inferscope.ring.discovery import find_rings, reading_from

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the first one (linux/proc_ns.h: PROC_PID_INIT_INO)."""
_PROC = Path("/proc")
_MOST_GENERATIONS = 64


class Observed(NamedTuple):
    """A living process of an engine."""

    pid: int
    """Here."""
    told_pid: int
    """As its ring says, in its own namespace."""
    engine_id: str


class Holders(NamedTuple):
    """Processes that hold a context on a device."""

    ours: frozenset[int]
    foreign: frozenset[int]
    unknown: frozenset[int]


def observed(folder: Path, now_ns: int) -> list[Observed]:
    """Return the living processes of the engines whose rings are in the folder."""
    locks = _lock_holders()
    found = []
    for ring in find_rings(*reading_from(folder)):
        me = ring.identity
        if me.role == SAMPLER_ROLE or not ring.is_alive(now_ns):
            continue
        try:
            holder = _holder(locks, ring.path.stat())
        except OSError:
            continue
        pid = me.pid if holder is None else holder
        if pid > 0 and (_PROC / str(pid)).exists():
            found.append(Observed(pid, me.pid, me.engine_id))
    return found


def holders(pids: Iterable[int], engines: Iterable[Observed], *, sees_host: bool) -> Holders:
    """Tell our engines' processes among those that the driver names.

    Args:
        pids: the driver's.
        engines: the processes that we know, whose children are theirs.
        sees_host: whether this process is in the host's pid namespace.
    """
    known = {process.pid for process in engines}
    pids = frozenset(pids) - {os.getpid()}
    ours = frozenset(pid for pid in pids if pid in known or not known.isdisjoint(_above(pid)))
    rest = pids - ours
    if sees_host:
        return Holders(ours, rest, frozenset())
    if not ours:
        return Holders(ours, frozenset(), rest)
    foreign = frozenset(pid for pid in rest if (_PROC / str(pid)).exists())
    return Holders(ours, foreign, rest - foreign)


def sees_host() -> bool:
    """Tell whether this process is in the host's pid namespace, whose numbers the driver uses."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def named(names: Iterable[str]) -> dict[str, int]:
    """Return which of these programs run here, by their pids."""
    wanted = set(names)
    found: dict[str, int] = {}
    try:
        entries = os.listdir(_PROC)
    except OSError:
        return found
    for entry in entries:
        if entry.isdigit():
            try:
                name = (_PROC / entry / "comm").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if name.strip() in wanted:
                found[name.strip()] = int(entry)
    return found


def _above(pid: int) -> list[int]:
    """Return the processes that started a process, the nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < _MOST_GENERATIONS:
        try:
            stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def _lock_holders() -> dict[int, dict[str, int]]:
    """Return who holds the flock on which inode of which device, as this process calls him."""
    try:
        lines = (_PROC / "locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[int, dict[str, int]] = {}
    for line in lines:
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE":
            device, _, inode = words[5].rpartition(":")
            if words[4].isdigit() and inode.isdigit():
                found.setdefault(int(inode), {})[device] = int(words[4])
    return found


def _holder(locks: dict[int, dict[str, int]], status: os.stat_result) -> int | None:
    """Return who holds a file; None where that is not told, or could be one of several."""
    by_device = locks.get(status.st_ino, {})
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    if device in by_device:
        return by_device[device]
    # Some file systems number their files' device otherwise than their own.
    return next(iter(by_device.values())) if len(by_device) == 1 else None
