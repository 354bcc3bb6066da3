"""Target of a command: an engine, a process, a file, a folder or a server's address."""

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
from inferscope.ring import (
    EngineRings,
    Extent,
    closed_under,
    extent_of_rings,
    find_engines,
    is_there,
    names_of,
    owner_of,
    ring_directory,
    sampler_rings,
    search_directories,
    why_closed,
)

_HOW_TO_START = "Start one with `inferscope demo`, or your own with `inferscope run -- CMD`."
Choose: TypeAlias = Callable[[list[EngineRings]], EngineRings]

_HOST_AND_PORT = re.compile(r"(?=.*[A-Za-z.\[])[\w.\-]+:\d+|\[[0-9A-Fa-f:.]+\]:\d+")


def is_remote(target: str | None) -> bool:
    """Return whether a target is a server's address: a URL, or a host and a port."""
    if target is None or ("://" not in target and is_there(Path(target))):
        return False
    return "://" in target or _HOST_AND_PORT.fullmatch(target) is not None


def path_of(target: str | None) -> Path | None:
    """Return the file or folder that a target names; None for a pid, an engine or no target.

    Model names contain slashes and dots, so a path that does not exist may be a model name.
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
    """Return the engine that a target names; without a target, the only running engine.

    A target is a pid, an engine ID, a model name, or the beginning of an ID or a model name.

    Args:
        target: target as given on the command line.
        choose: function that picks one of several running engines; without it they are an error.

    Raises:
        NotFound: the target names no engine, or more than one.
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
    """Return the engine by model name or the beginning of a name; running engines come first."""
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
            "Name one by its pid or its whole ID."
        )
    refuse_if_closed(target)
    raise NotFound(
        f"{target} is neither a file, a folder, a pid, an engine ID nor a model served here."
    )


def rings_of(engine: EngineRings) -> Callable[[], Iterable[Path]]:
    """Return a function that finds an engine's rings and the samplers' rings, including new ones.

    If an engine's folder is in a standard place, its other processes may use another standard
    place. Rings of another user never belong to the engine, even in a folder with its name.
    Samplers' rings are read if they belong to the engine's user, to this user or to root.
    """
    homes = {ring.path.parent for ring in engine.rings}
    owners = {ring.owner for ring in engine.rings}

    def find() -> list[Path]:
        standard, found, siblings = (
            search_directories(),
            set(homes),
            {home.parent for home in homes},
        )
        if not siblings.isdisjoint(standard):
            found |= {folder / home.name for folder in standard for home in homes}
            siblings |= set(standard)
        paths = (path for home in sorted(found) for path in home.glob("*.ring"))
        rings = [path for path in paths if owner_of(path) in owners]
        trusted = owners | {os.geteuid(), 0}
        samplers = sampler_rings(*sorted(siblings))
        return [*rings, *(path for path in samplers if owner_of(path) in trusted)]

    return find


def running_engines() -> list[EngineRings]:
    """Return the engines of this host that are alive, the newest first."""
    now_ns = time.monotonic_ns()
    return [engine for engine in find_engines() if engine.is_alive(now_ns)]


def rings_of_running() -> Callable[[], Iterable[Path]]:
    """Return a function that finds the rings of all engines that run now, or ran since."""
    finders: dict[tuple[int, str], Callable[[], Iterable[Path]]] = {}

    def find() -> list[Path]:
        for engine in running_engines():
            finders.setdefault((engine.rings[0].owner, engine.engine_id), rings_of(engine))
        return list(dict.fromkeys(path for finder in finders.values() for path in finder()))

    return find


def extent_of(engine: EngineRings) -> Extent | None:
    """Return the time range of an engine's records; None if its rings hold none."""
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
        raise NotFound(f"{len(alive)} engines are running. Name one by its model, ID or pid.")
    if not engines:
        refuse_if_closed(None)
        raise NotFound(
            f"no engine is running under {names_of(search_directories())}. {_HOW_TO_START}"
        )
    write_list(engines)
    ended = "One that has ended" if len(engines) == 1 else f"{len(engines)} that have ended"
    raise NotFound(
        f"no engine is running under {names_of(search_directories())}. {ended} can still be read: "
        "name it by pid or ID, or give a start time, as in `inferscope attach --since -5m`."
    )


def refuse_if_closed(engine_id: str | None) -> None:
    """Raise an error if there are rings that this user may not read.

    Args:
        engine_id: engine to check; None for all engines.

    Raises:
        NotFound: unreadable rings exist; the error names them.
    """
    for folder in search_directories():
        for path in closed_under(folder):
            if engine_id is None or path == folder or engine_id in path.parts:
                raise NotFound(why_closed(path))


def _engine_of_pid(pid: int, engines: list[EngineRings]) -> EngineRings:
    """Return the engine of a process: by its own ring, an ancestor's or a descendant's.

    `ps` often shows a server's launcher, or a worker that the server started.
    """
    own = [engine for engine in engines if pid in engine.pids]
    now_ns = time.monotonic_ns()
    alive = [engine for engine in engines if engine.is_alive(now_ns)]
    models = [engine for engine in own if engine in alive]
    if len(models) > 1:
        write_list(models)
        raise NotFound(f"process {pid} runs {len(models)} models. Name one by its engine ID.")
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
    """Start the probe in a running process, and return its engine."""

    def own_engines() -> list[EngineRings]:
        return [engine for engine in find_engines() if pid in engine.pids]

    if remote.observe(pid, execute, rings=ring_directory(), has_ring=lambda: bool(own_engines())):
        return own_engines()[0]
    raise NotFound(
        f"the probe was loaded into process {pid}, which has no ring yet: it opens one when its "
        f"engine works. Attach again then, or restart it with: {run_command(pid)}"
    )


def _unknown_pid(pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return (
            f"process {pid} does not exist and has no ring under {names_of(search_directories())}."
        )
    argv = command_line(pid)
    if not argv:
        return f"process {pid} is not observed and has no command line. {_HOW_TO_START}"
    ours = own_command(argv)
    if ours is not None:
        return (
            f"process {pid} is `{ours}`, which runs no model. Name an engine's process: "
            "`inferscope attach` without a pid lists the running engines."
        )
    command = run_command(pid)
    if command is None:
        return (
            f"process {pid} ({Path(argv[0].split()[0]).name}) is not Python, and cannot be "
            "observed. Name the engine's own process, or a server's address: "
            "`inferscope attach http://HOST:PORT` reads its /metrics."
        )
    return f"process {pid} is not observed. Restart it with: {command}"
