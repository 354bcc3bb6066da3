"""Whose Python a command runs: `run` must know whether that one has inferscope.

A command may be an interpreter, a console script (its first line names one), or anything else. What
starts a Python of its own choosing later, a shell script say, cannot be asked beforehand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import BadInput

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?")
_LONG_SHEBANG = re.compile(r"""^['"]+exec['"]+\s+['"]?([^'"\s]+)""")
"""How pip and uv name an interpreter whose path is too long, or has blanks, for a first line."""
_HEAD_BYTES = 1024
_PROBE_S = 60
_PROBE = """
import sys
if sys.path and not sys.path[0]: del sys.path[0]
import inferscope.probe
from inferscope.adapters import inject, shim
print(*shim.__path__)
"""
"""Without the current folder, which the command itself may not see."""


class Target(NamedTuple):
    """A command, and the interpreter that will run it; None for a program that is not Python."""

    program: str
    interpreter: str | None


class Unobservable(BadInput):
    """A command that would run, but unseen.

    Attributes:
        what: is the matter.
        fix: what to do about it.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; --unobserved runs it all the same. {fix}")
        self.what = what
        self.fix = fix


def find_target(words: Sequence[str], environment: Mapping[str, str]) -> Target:
    """Find a command's program and interpreter.

    Raises:
        BadInput: There is no such program.
    """
    search = environment.get("PATH")
    program = shutil.which(words[0], path=search)
    if program is None:
        if Path(words[0]).suffix == ".py" and Path(words[0]).is_file():
            raise BadInput(f"{words[0]} is not executable. Give its Python: python {words[0]}")
        raise BadInput(f"there is no program {words[0]}. Check the name, or give its path.")
    # Not resolved: a virtual environment's python is a link, and is itself only by its own path.
    if _PYTHON.fullmatch(Path(program).name):
        return Target(program, program)
    return Target(program, _named_by(Path(program), search))


def shim_of(interpreter: str, environment: Mapping[str, str]) -> str:
    """Return the shim's folder in an interpreter's own inferscope.

    Raises:
        Unobservable: It cannot be imported there.
    """
    try:
        asked = subprocess.run(
            [interpreter, "-c", _PROBE],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{interpreter} does not run: {error}. Check the command.") from error
    if asked.returncode == 0:
        return asked.stdout.strip().splitlines()[-1]
    why = (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    install = shlex.join([interpreter, "-m", "pip", "install", "inferscope"])
    raise Unobservable(
        f"the command's Python cannot import inferscope ({why})",
        f"Install it there with: {install}",
    )


def _named_by(script: Path, search: str | None) -> str | None:
    """Return the Python that a script's first lines name."""
    try:
        with script.open("rb") as file:
            head = os.fsdecode(file.read(_HEAD_BYTES)).splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    elif words and Path(words[0]).name in ("sh", "bash") and len(head) > 1:
        named = _LONG_SHEBANG.match(head[1])
        words = [named[1]] if named else words
    if not words or not _PYTHON.fullmatch(Path(words[0]).name):
        return None
    return shutil.which(words[0], path=search)
