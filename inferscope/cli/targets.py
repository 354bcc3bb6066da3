"""What a command is pointed at: nothing, a process, a file, or a folder."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inferscope.errors import NotFound
from inferscope.ring.discovery import EngineRings, find_engines, ring_directory
from inferscope.ring.extent import Extent, extent_of_rings
from inferscope.tui.plots import duration

_HOW_TO_START = "Start one with `inferscope demo`, or your own with `inferscope run -- CMD`."
_MOST_LISTED = 10


def path_of(target: str | None) -> Path | None:
    """Return the file or folder that is meant; None where it is a pid, an engine or nothing."""
    if target is None or target.isdigit():
        return None
    path = Path(target)
    return path if path.exists() or path.suffix or "/" in target else None


def engine_of(target: str | None) -> EngineRings:
    """Return the engine that is meant: the only one alive, or the one of a pid or id.

    Raises:
        NotFound: there is none, or more than one, with what to do.
    """
    engines = find_engines()
    if target is None:
        return _only_one(engines)
    if target.isdigit():
        by_pid = [engine for engine in engines if int(target) in engine.pids]
        if not by_pid:
            list_engines(engines)
            raise NotFound(_unknown_pid(int(target)))
        return by_pid[0]
    by_id = [engine for engine in engines if engine.engine_id == target]
    if not by_id:
        list_engines(engines)
        raise NotFound(f"{target} is neither a file, a folder, a pid nor an engine's id.")
    return by_id[0]


def rings_of(engine: EngineRings) -> Callable[[], Iterable[Path]]:
    """Return what finds an engine's rings, those of processes that start later too."""
    folder = engine.rings[0].path.parent
    return lambda: folder.glob("*.ring")


def extent_of(engine: EngineRings) -> Extent | None:
    """Return the time that an engine's rings span; None where they hold nothing."""
    return extent_of_rings(ring.path for ring in engine.rings)


def list_engines(engines: Iterable[EngineRings]) -> None:
    """Tell the user, beside an error, which engines there are: newest first."""
    for engine in list(engines)[:_MOST_LISTED]:
        sys.stderr.write(f"  {_line(engine)}\n")


def _only_one(engines: list[EngineRings]) -> EngineRings:
    now_ns = time.monotonic_ns()
    alive = [engine for engine in engines if engine.is_alive(now_ns)]
    if len(alive) == 1:
        return alive[0]
    if alive:
        list_engines(alive)
        raise NotFound(f"{len(alive)} engines are running. Name one by its pid.")
    if not engines:
        raise NotFound(f"no engine is running under {ring_directory()}. {_HOW_TO_START}")
    list_engines(engines)
    ended = "One that has ended" if len(engines) == 1 else f"{len(engines)} that have ended"
    raise NotFound(
        f"no engine is running under {ring_directory()}. {ended} can still be read: name it by pid"
        " or id, or say how far to look back, as in `inferscope attach --since -5m`."
    )


def _line(engine: EngineRings) -> str:
    pids = ", ".join(map(str, engine.pids))
    roles = " ".join(sorted({ring.identity.role for ring in engine.rings}))
    return f"{engine.engine_id}  pid {pids}  {roles}  {_state(engine)}"


def _state(engine: EngineRings) -> str:
    if engine.is_alive(time.monotonic_ns()):
        return "running"
    extent = extent_of(engine)
    if extent is None:
        return "ended"
    return f"ended {duration(max(0, time.time_ns() - extent.last_real_ns))} ago"


def _unknown_pid(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return f"there is no process {pid}, nor a ring of one under {ring_directory()}."
    return (
        f"process {pid} is not observed: it has no ring under {ring_directory()}. Start it again "
        f"with: inferscope run -- {_command_of(pid)}"
    )


def _command_of(pid: int) -> str:
    """Return how a process was started, as one would type it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        words = []
    return shlex.join(os.fsdecode(word) for word in words) or "CMD"
