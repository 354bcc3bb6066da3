"""Processes around a pid, and the command line that one was started with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from inferscope.cli.run_target import find_target
from inferscope.errors import BadInput

_PROC = Path("/proc")
_WITH_AN_ENGINE = ("serve", "demo")


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
    """Return the command that starts a process again, observed; None where there is none."""
    words = command_line(pid)
    if not words or own_command(words) is not None or not is_python(words):
        return None
    return f"inferscope run -- {shlex.join(words)}"


def command_line(pid: int) -> list[str]:
    """Return a process's program and arguments; none of a kernel thread or an ended process."""
    try:
        given = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    words = [os.fsdecode(word) for word in given.removesuffix(b"\0").split(b"\0")]
    return words if words[0] else []


def is_python(words: Sequence[str]) -> bool:
    """Return whether a command line is that of a Python interpreter."""
    try:
        return find_target(words, os.environ).interpreter is not None
    except BadInput:  # a title that the process gave itself, or a program not in our PATH
        return False


def own_command(words: Sequence[str]) -> str | None:
    """Return the command of InferScope that a command line runs; None if it may be an engine's."""
    for at, word in enumerate(words[:3]):
        if Path(word).name == "inferscope":
            command = next((word for word in words[at + 1 :] if not word.startswith("-")), "")
            return None if command in _WITH_AN_ENGINE else f"inferscope {command}".strip()
    return None


def _parent(pid: int) -> int:
    """Return a process's parent, 0 for none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
