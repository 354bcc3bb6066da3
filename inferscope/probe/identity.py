"""Which engine this process belongs to.

Processes of one engine share an engine id by inheriting `INFERSCOPE_ENGINE_ID`: `inferscope run`
sets it, and otherwise the first process of a tree that opens a probe names the engine and hands the
name down to its children.
"""

from __future__ import annotations

import os
from pathlib import Path

from inferscope.probe.clock import Clock, SystemClock
from inferscope.ring import Identity, boot_id, file_name

ENGINE_ID_VARIABLE = "INFERSCOPE_ENGINE_ID"


def engine_id() -> str:
    """Return this engine's id, naming it if no parent has."""
    given = os.environ.get(ENGINE_ID_VARIABLE)
    if given:
        return file_name(given)
    made = f"{os.getpid()}-{_start_ticks()}-{boot_id()[:8]}"
    os.environ[ENGINE_ID_VARIABLE] = made
    return made


def identity(
    role: str,
    rank: int,
    *,
    engine: str | None = None,
    synthetic: bool = False,
    clock: Clock | None = None,
) -> Identity:
    """Describe this process as the writer of a ring; of its own engine's, unless one is named."""
    clock = clock or SystemClock()
    return Identity(
        engine_id=engine_id() if engine is None else engine,
        role=role,
        rank=rank,
        pid=os.getpid(),
        host=os.uname().nodename,
        boot_id=boot_id(),
        start_ns=clock.monotonic_ns(),
        start_real_ns=clock.real_ns(),
        synthetic=synthetic,
    )


def _start_ticks() -> str:
    """Return when this process started, in the kernel's ticks: a pid alone is used again."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]
