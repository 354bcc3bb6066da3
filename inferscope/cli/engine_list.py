"""List of this host's engines: as a table, as JSON, and as a choice on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inferscope.cli.listening import listening_addresses
from inferscope.errors import NotFound
from inferscope.json_document import Document, json_line
from inferscope.records import EngineInfo
from inferscope.ring import EngineRings, RingFile, description_of_rings, extent_of_rings
from inferscope.text.plots import UNKNOWN, duration, fit_name, plain

SOURCE = "engine list"
MAX_LISTED = 10
_ROLES = ("frontend", "core", "worker")
"""Roles in the order in which a process's pid represents its engine: the server comes first."""
_HEADINGS = ("ENGINE", "PID", "STATE", "ADDRESS", "MODEL")
_MIN_MODEL_WIDTH = 12


class ListedEngine(msgspec.Struct, frozen=True):
    """One engine of the list."""

    engine_id: str
    """ID of the engine, accepted by every command."""
    model: str | None
    """Served name of the model, else its own name; None where the rings do not hold it."""
    engine: str | None
    """Inference engine with its version; None where the rings do not hold it."""
    pid: int
    """Process ID of the server."""
    pids: tuple[int, ...]
    """Process IDs of all observed processes."""
    addresses: tuple[str, ...]
    """Hosts and ports on which the server listens; empty where they are not known."""
    is_alive: bool
    """Whether the heartbeat is fresh."""
    age_ns: int
    """Time since the first process started."""
    ended_ago_ns: int | None
    """Time since the last record; None while the engine is alive."""


class EngineList(Document, frozen=True, kw_only=True):
    """Engines of this host, printed where a command needs one of several."""

    source: str = SOURCE
    """Source of the document, always `engine list`."""
    engines: tuple[ListedEngine, ...]
    """Engines, the newest first."""


def listed(engine: EngineRings) -> ListedEngine:
    """Return the list's entry for an engine, from its rings and its processes."""
    now_ns, real_ns = time.monotonic_ns(), time.time_ns()
    is_alive = engine.is_alive(now_ns)
    rings = _by_role(engine, now_ns)
    info = description_of_rings(ring.path for ring in reversed(engine.rings))
    extent = None if is_alive else extent_of_rings(ring.path for ring in engine.rings)
    last_ns = real_ns if extent is None else extent.last_real_ns
    servers = [ring for ring in rings if ring.identity.role == rings[0].identity.role]
    found = [each for ring in servers if is_alive for each in listening_addresses(ring)]
    return ListedEngine(
        engine.engine_id,
        model=_model(info),
        engine=None if info is None else f"{info.engine} {info.version}".strip(),
        pid=rings[0].identity.pid,
        pids=engine.pids,
        addresses=tuple(dict.fromkeys(found)),
        is_alive=is_alive,
        age_ns=max(0, real_ns - engine.rings[0].identity.start_real_ns),
        ended_ago_ns=None if is_alive else max(0, real_ns - last_ns),
    )


def is_named(target: str, engine: EngineRings) -> bool:
    """Return whether an engine's ID or model name begins with the target, ignoring case."""
    wanted = target.casefold()
    info = description_of_rings(ring.path for ring in reversed(engine.rings))
    names = [engine.engine_id]
    for name in () if info is None else (info.served_name, info.model):
        names += [name, Path(name).name]  # Llama-3 also matches meta-llama/Llama-3
    return bool(wanted) and any(name.casefold().startswith(wanted) for name in names)


def engine_table(engines: Sequence[ListedEngine], *, width: int | None = None) -> list[str]:
    """Return engines as lines under headings; only model names are cut to fit `width`."""
    rows = [
        _HEADINGS,
        *(
            (
                plain(each.engine_id),
                str(each.pid),
                _state(each),
                ", ".join(each.addresses) or UNKNOWN,
                plain(each.model or "") or UNKNOWN,
            )
            for each in engines
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(widths[:-1]) + 2 * len(widths[:-1])
    room = widths[-1] if width is None else max(width - before, _MIN_MODEL_WIDTH)
    lines = []
    for row in rows:
        cells = [f"{cell:<{cells}}" for cell, cells in zip(row[:-1], widths, strict=False)]
        model = row[-1] if len(row[-1]) <= room else fit_name(row[-1], room)
        lines.append("  ".join((*cells, model)).rstrip())
    return lines


def write_list(engines: Sequence[EngineRings]) -> None:
    """Write the newest engines to standard error, above an error that asks for one of them."""
    if not engines:
        return
    shown = [listed(engine) for engine in engines[:MAX_LISTED]]
    lines = engine_table(shown, width=_terminal_width() - 2)
    sys.stderr.write("".join(f"  {line}\n" for line in lines))
    if len(engines) > MAX_LISTED:
        sys.stderr.write(f"  … {len(engines) - MAX_LISTED} more, older\n")


def list_json(engines: Sequence[EngineRings]) -> str:
    """Return all engines as one JSON document."""
    return json_line(EngineList(engines=tuple(map(listed, engines))))


def ask_which(engines: list[EngineRings]) -> EngineRings:
    """Ask on the terminal for one of the engines, and return it.

    Raises:
        NotFound: the user chose none.
    """
    lines = engine_table([listed(engine) for engine in engines], width=_terminal_width() - 5)
    sys.stderr.write(f"     {lines[0]}\n")
    sys.stderr.write("".join(f"{i:>3}  {line}\n" for i, line in enumerate(lines[1:], 1)))
    while True:
        sys.stderr.write(f"Which engine? 1-{len(engines)}, or q to quit [1]: ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if answer.strip() in ("q", "quit") or not answer:
            raise NotFound(f"none of the {len(engines)} running engines was chosen.")
        number = answer.strip() or "1"
        if number.isdecimal() and 1 <= int(number) <= len(engines):
            return engines[int(number) - 1]


def _by_role(engine: EngineRings, now_ns: int) -> list[RingFile]:
    """Return an engine's rings: running processes first, then by role, rank and start."""

    def order(ring: RingFile) -> tuple[bool, int, int, int]:
        me = ring.identity
        role = _ROLES.index(me.role) if me.role in _ROLES else len(_ROLES)
        return not ring.is_alive(now_ns), role, me.rank, -me.start_ns

    return sorted(engine.rings, key=order)


def _model(info: EngineInfo | None) -> str | None:
    return None if info is None else info.served_name or info.model or None


def _state(engine: ListedEngine) -> str:
    if engine.ended_ago_ns is None:
        return f"up {duration(engine.age_ns)}"
    return f"ended {duration(engine.ended_ago_ns)} ago"


def _terminal_width() -> int:
    """Return the width of the terminal on standard error; 1000 if it is not a terminal."""
    if not sys.stderr.isatty():
        return 1000
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return shutil.get_terminal_size().columns
