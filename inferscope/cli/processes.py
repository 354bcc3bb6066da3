"""Ancestors and descendants of a process, and its command line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from inferscope.cli.run.target import find_target
from inferscope.errors import BadInput

_PROC = Path("/proc")
_WITH_AN_ENGINE = ("serve", "demo")


def ancestors(pid: int) -> list[int]:
    """Return a process's ancestors, the parent first and without process 1."""
    found: list[int] = []
    parent = _parent(pid)
    while parent > 1 and parent not in found:
        found.append(parent)
        parent = _parent(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Return the processes that a process started, directly or indirectly."""
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
    """Return the command that starts a process again with the probe; None if there is none."""
    argv = command_line(pid)
    if not argv or own_command(argv) is not None or not is_python(argv):
        return None
    return f"inferscope run -- {shlex.join(argv)}"


def command_line(pid: int) -> list[str]:
    """Return a process's program and arguments; empty for a kernel thread or an ended process."""
    try:
        given = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    argv = [os.fsdecode(arg) for arg in given.removesuffix(b"\0").split(b"\0")]
    return argv if argv[0] else []


def is_python(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of a Python interpreter."""
    try:
        return find_target(argv, os.environ).interpreter is not None
    except BadInput:  # a title set by the process, or a program not in our PATH
        return False


def own_command(argv: Sequence[str]) -> str | None:
    """Return the InferScope command that a command line runs; None if it may run an engine."""
    for at, arg in enumerate(argv[:3]):
        if Path(arg).name == "inferscope":
            command = next((arg for arg in argv[at + 1 :] if not arg.startswith("-")), "")
            return None if command in _WITH_AN_ENGINE else f"inferscope {command}".strip()
    return None


def _parent(pid: int) -> int:
    """Return a process's parent; 0 if there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
