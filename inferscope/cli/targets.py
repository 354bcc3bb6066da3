"""What a command is pointed at: nothing, a process, a file, a folder, or a server's address."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from inferscope.cli import remote
from inferscope.cli.engine_list import is_named, write_list
from inferscope.cli.processes import (
    ancestors,
    command_line,
    descendants,
    own_command,
    run_command,
)
from inferscope.errors import NotFound
from inferscope.ring.access import closed_under, is_there, why_closed
from inferscope.ring.discovery import (
    EngineRings,
    find_engines,
    names_of,
    owner_of,
    ring_directory,
    sampler_rings,
    search_directories,
)
from inferscope.ring.extent import Extent, extent_of_rings

_HOW_TO_START = "Start one with `inferscope demo`, or your own with `inferscope run -- CMD`."
Choose: TypeAlias = Callable[[list[EngineRings]], EngineRings]

_HOST_AND_PORT = re.compile(r"(?=.*[A-Za-z.\[])[\w.\-]+:\d+|\[[0-9A-Fa-f:.]+\]:\d+")


def is_remote(target: str | None) -> bool:
    """Tell whether a server's address is meant: a URL, or a host and a port."""
    if target is None or ("://" not in target and is_there(Path(target))):
        return False
    return "://" in target or _HOST_AND_PORT.fullmatch(target) is not None


def path_of(target: str | None) -> Path | None:
    """Return the file or folder that is meant; None where it is a pid, an engine or nothing.

    Models have slashes and dots in their names: what is not there may be one.
    """
    if target is None or target.isdigit():
        return None
    path = Path(target)
    if is_there(path):
        return path
    if not path.suffix and "/" not in target:
        return None
    is_model = any(is_named(target, engine) for engine in find_engines())
    return None if is_model else path


def engine_of(target: str | None, *, choose: Choose | None = None) -> EngineRings:
    """Return the engine that is meant: the only one alive, or the one of a name.

    A name is a pid, an engine's id, a model's name, or the beginning of an id or a model's name.

    Args:
        target: as on the command line.
        choose: asks the user for one of several engines that run; without it they are an error.

    Raises:
        NotFound: there is none, or more than one, with what to do.
    """
    engines = find_engines()
    if target is None:
        return _only_one(engines, choose)
    if target.isdigit():
        return _engine_of_pid(int(target), engines)
    by_id = [engine for engine in engines if engine.engine_id == target]
    if not by_id:
        return _named(target, engines, choose)
    if len({engine.rings[0].owner for engine in by_id}) > 1:
        write_list(by_id)
        raise NotFound(f"{len(by_id)} users have an engine {target}. Name one by its pid.")
    return by_id[0]


def _named(target: str, engines: list[EngineRings], choose: Choose | None) -> EngineRings:
    """Return the engine of a model or of the beginning of a name: of those alive, if one is."""
    found = [engine for engine in engines if is_named(target, engine)]
    now_ns = time.monotonic_ns()
    alive = [engine for engine in found if engine.is_alive(now_ns)]
    if len(alive or found) == 1:
        return (alive or found)[0]
    if alive and choose is not None:
        return choose(alive)
    write_list(found or engines)
    if found:
        state = "are running" if alive else "have ended"
        raise NotFound(
            f"{len(alive or found)} engines named {target} {state}. "
            "Name one by its pid or its whole id."
        )
    refuse_if_closed(target)
    raise NotFound(
        f"{target} is neither a file, a folder, a pid, an engine's id nor a model served here."
    )


def rings_of(engine: EngineRings) -> Callable[[], Iterable[Path]]:
    """Return what finds an engine's rings, also of processes that start later, and samplers' rings.

    Where an engine's folder is in one of the usual places, its other processes may use another.
    Rings of another user are not the engine's, whatever their folder is called. Samplers' are read
    of the engine's user, of this one and of root.
    """
    homes = {ring.path.parent for ring in engine.rings}
    owners = {ring.owner for ring in engine.rings}

    def find() -> list[Path]:
        usual, found, beside = search_directories(), set(homes), {home.parent for home in homes}
        if not beside.isdisjoint(usual):
            found |= {folder / home.name for folder in usual for home in homes}
            beside |= set(usual)
        paths = (path for home in sorted(found) for path in home.glob("*.ring"))
        rings = [path for path in paths if owner_of(path) in owners]
        trusted = owners | {os.geteuid(), 0}
        samplers = sampler_rings(*sorted(beside))
        return [*rings, *(path for path in samplers if owner_of(path) in trusted)]

    return find


def extent_of(engine: EngineRings) -> Extent | None:
    """Return the time that an engine's rings span; None where they hold nothing."""
    return extent_of_rings(ring.path for ring in engine.rings)


def _only_one(engines: list[EngineRings], choose: Choose | None) -> EngineRings:
    now_ns = time.monotonic_ns()
    alive = [engine for engine in engines if engine.is_alive(now_ns)]
    if len(alive) == 1:
        return alive[0]
    if alive and choose is not None:
        return choose(alive)
    if alive:
        write_list(alive)
        raise NotFound(f"{len(alive)} engines are running. Name one by its model, id or pid.")
    if not engines:
        refuse_if_closed(None)
        raise NotFound(
            f"no engine is running under {names_of(search_directories())}. {_HOW_TO_START}"
        )
    write_list(engines)
    ended = "One that has ended" if len(engines) == 1 else f"{len(engines)} that have ended"
    raise NotFound(
        f"no engine is running under {names_of(search_directories())}. {ended} can still be read: "
        "name it by pid or id, or say how far to look back, as in `inferscope attach --since -5m`."
    )


def refuse_if_closed(engine_id: str | None) -> None:
    """Say which rings there are that this user may not read: they look as if there were none.

    Args:
        engine_id: whose they would be; None for anybody's.

    Raises:
        NotFound: there are some.
    """
    for folder in search_directories():
        for path in closed_under(folder):
            if engine_id is None or path == folder or engine_id in path.parts:
                raise NotFound(why_closed(path))


def _engine_of_pid(pid: int, engines: list[EngineRings]) -> EngineRings:
    """Return the engine that a process belongs to: by its own ring, its parents' or its children's.

    A server's launcher, and the workers that it starts, are often what one sees in `ps`.
    """
    own = [engine for engine in engines if pid in engine.pids]
    now_ns = time.monotonic_ns()
    alive = [engine for engine in engines if engine.is_alive(now_ns)]
    models = [engine for engine in own if engine in alive]
    if len(models) > 1:
        write_list(models)
        raise NotFound(f"process {pid} runs {len(models)} models. Name one by its engine id.")
    if own:
        return (models or own)[0]
    above, below = set(ancestors(pid)), descendants(pid)
    related = [engine for engine in alive if above & set(engine.pids)]
    related = related or [engine for engine in alive if below & set(engine.pids)]
    if len(related) == 1:
        return related[0]
    if related:
        write_list(related)
        raise NotFound(f"{len(related)} engines run under process {pid}. Name one by its own pid.")
    execute = remote.executor() if run_command(pid) is not None else None
    if execute is not None:
        return _observed_from_now(pid, execute)
    refuse_if_closed(None)
    raise NotFound(_unknown_pid(pid))


def _observed_from_now(pid: int, execute: remote.Execute) -> EngineRings:
    """Have a running process observe itself, and return its engine."""

    def mine() -> list[EngineRings]:
        return [engine for engine in find_engines() if pid in engine.pids]

    if remote.observe(pid, execute, rings=ring_directory(), has_ring=lambda: bool(mine())):
        return mine()[0]
    raise NotFound(
        f"process {pid} has been told to observe itself and has no ring yet: it makes one when "
        f"its engine works. Attach again then, or start it observed: {run_command(pid)}"
    )


def _unknown_pid(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return (
            f"there is no process {pid}, nor a ring of one under {names_of(search_directories())}."
        )
    words = command_line(pid)
    if not words:
        return f"process {pid} is not observed and has no command line. {_HOW_TO_START}"
    ours = own_command(words)
    if ours is not None:
        return (
            f"process {pid} is `{ours}`, which runs no model. Name an engine's process: "
            "`inferscope attach` without a pid lists them where there are several."
        )
    command = run_command(pid)
    if command is None:
        return (
            f"process {pid} ({Path(words[0].split()[0]).name}) is not Python, and cannot be "
            "observed. Name the engine's own process, or a server's address: "
            "`inferscope attach http://HOST:PORT` reads its /metrics."
        )
    return f"process {pid} is not observed. Start it like this, and it is: {command}"
