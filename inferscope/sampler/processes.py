"""The processes on a device: observed engines, foreign processes, or unknown ones.

The driver reports PIDs of the host's namespace. In a container such a PID may denote another
process or none, so the result there is "unknown", unless the driver lists an observed engine: then
its PIDs belong to the container's namespace. An engine never counts as foreign to itself.

The processes of an engine are found by the locks on their rings: the kernel reports each lock's
holder as a PID of the reader's namespace.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from inferscope.records import SAMPLER_ROLE
from inferscope.ring import find_rings, reading_from

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's PID namespace (linux/proc_ns.h: PROC_PID_INIT_INO)."""
_PROC = Path("/proc")
_MOST_GENERATIONS = 64


class Observed(NamedTuple):
    """A running process of an observed engine."""

    pid: int
    """PID in this process's namespace."""
    own_pid: int
    """PID in its own namespace, from its ring."""
    engine_id: str


class Holders(NamedTuple):
    """PIDs of the processes with a context on a device, by origin."""

    ours: frozenset[int]
    foreign: frozenset[int]
    unknown: frozenset[int]


def observed(folder: Path, now_ns: int) -> list[Observed]:
    """Return the running processes of the engines whose rings are in the directory."""
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
    """Classify the processes that the driver lists.

    Args:
        pids: PIDs from the driver.
        engines: observed processes; their descendants belong to the engines too.
        sees_host: whether this process is in the host's PID namespace.
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
    """Return whether this process is in the host's PID namespace, which the driver uses."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def named(names: Iterable[str]) -> dict[str, int]:
    """Return the PIDs of those of these programs that are running, by name."""
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
    """Return the PIDs of a process's ancestors, nearest first."""
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
    """Return the PIDs that hold write flocks, by inode and device, in this namespace."""
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
    """Return the PID that holds a file's lock; None if unknown or ambiguous."""
    by_device = locks.get(status.st_ino, {})
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    if device in by_device:
        return by_device[device]
    # On some file systems (btrfs, overlayfs) st_dev differs from the device in /proc/locks.
    return next(iter(by_device.values())) if len(by_device) == 1 else None
