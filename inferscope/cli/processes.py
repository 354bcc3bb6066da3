"""Processes around a pid, and the command line that one was started with."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_PROC = Path("/proc")


def ancestors(pid: int) -> list[int]:
    """Return a process's parent, its parent and so on; what began the machine is not among them."""
    found: list[int] = []
    parent = _parent(pid)
    while parent > 1 and parent not in found:
        found.append(parent)
        parent = _parent(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Return the processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for each in _PROC.iterdir():
        if each.name.isdigit():
            children.setdefault(_parent(int(each.name)), []).append(int(each.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def run_command(pid: int) -> str | None:
    """Return the command that starts a process again, observed; None where it cannot be known."""
    try:
        given = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    words = [os.fsdecode(word) for word in given.removesuffix(b"\0").split(b"\0")]
    if not words or not words[0]:
        return None  # the kernel's own, or one that has ended
    return f"inferscope run -- {shlex.join(words)}"


def _parent(pid: int) -> int:
    """Return a process's parent, 0 for none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
