"""What a command is pointed at: nothing, a process, a file, or a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inferscope.errors import NotFound
from inferscope.ring.discovery import EngineRings, find_engines, ring_directory

_HOW_TO_START = "Start one with `inferscope demo`."


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
            raise NotFound(_unknown_pid(int(target)))
        return by_pid[0]
    by_id = [engine for engine in engines if engine.engine_id == target]
    if not by_id:
        raise NotFound(
            f"{target} is neither a file, a folder, a pid nor an engine's id. "
            "`inferscope attach` without a target lists the engines."
        )
    return by_id[0]


def rings_of(engine: EngineRings) -> Callable[[], Iterable[Path]]:
    """Return what finds an engine's rings, those of processes that start later too."""
    folder = engine.rings[0].path.parent
    return lambda: folder.glob("*.ring")


def _only_one(engines: list[EngineRings]) -> EngineRings:
    now_ns = time.monotonic_ns()
    alive = [engine for engine in engines if engine.is_alive(now_ns)]
    if len(alive) == 1:
        return alive[0]
    if not alive:
        dead = (
            f" {len(engines)} ended engine(s) have left rings there: name one to read it."
            if (engines)
            else ""
        )
        for engine in engines[:5]:
            sys.stderr.write(f"  {_line(engine)}\n")
        raise NotFound(f"no engine is running under {ring_directory()}. {_HOW_TO_START}{dead}")
    for engine in alive:
        sys.stderr.write(f"  {_line(engine)}\n")
    raise NotFound(f"{len(alive)} engines are running. Name one by its pid.")


def _line(engine: EngineRings) -> str:
    pids = ", ".join(map(str, engine.pids))
    roles = " ".join(sorted({ring.identity.role for ring in engine.rings}))
    return f"{engine.engine_id}  pid {pids}  {roles}"


def _unknown_pid(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return f"there is no process {pid}. `inferscope attach` without a pid lists the engines."
    return (
        f"process {pid} is not observed: it has no ring under {ring_directory()}. {_HOW_TO_START}"
    )
