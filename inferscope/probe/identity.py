"""Which engine this process belongs to.

Processes of one engine share an engine id by inheriting `INFERSCOPE_ENGINE_ID`: `inferscope run`
sets it, and otherwise the first process of a tree that opens a probe names the engine and hands the
name down to its children.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import Identity

ENGINE_ID_VARIABLE = "INFERSCOPE_ENGINE_ID"


def engine_id() -> str:
    """Return this engine's id, naming it if no parent has."""
    given = os.environ.get(ENGINE_ID_VARIABLE)
    if given and given.replace("-", "").replace("_", "").replace(".", "").isalnum():
        return given
    name = f"{os.getpid()}-{_start_ticks()}-{boot_id()[:8]}"
    os.environ[ENGINE_ID_VARIABLE] = name
    return name


def identity(role: str, rank: int, *, synthetic: bool = False) -> Identity:
    """Describe this process as the writer of a ring."""
    return Identity(
        engine_id=engine_id(),
        role=role,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=boot_id(),
        start_ns=time.monotonic_ns(),
        start_real_ns=time.time_ns(),
        synthetic=synthetic,
    )


def _start_ticks() -> str:
    """Return when this process started, in the kernel's ticks: a pid alone is used again."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "0"
    return stat.rpartition(")")[2].split()[19]
