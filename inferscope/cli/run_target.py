"""Whose Python a command runs: `run` must know whether that one has inferscope.

A command may be an interpreter, a console script (its first line names one), or anything else. What
starts a Python of its own choosing later, a shell script say, cannot be asked beforehand.

An interpreter's own options decide what it can import, so it is asked with those that matter:

    -E  ignores PYTHONPATH, by which the import hook comes
    -S  does not import `site`: no site-packages, no `sitecustomize`
    -s  leaves out the user's site-packages
    -P  leaves out the folder of the script
    -I  -E, -P and -s
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import BadInput

DISTRIBUTION = "inferscope-llm"
"""The name under which pip installs InferScope."""
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?")
_LONG_SHEBANG = re.compile(r"""^['"]+exec['"]+\s+(.+?)\s+"\$0\"""")
"""How pip and uv name an interpreter whose path is too long, or has blanks, for a first line."""
_MATTER = "IESsP"
_WITH_VALUE = "WX"
_LAST = "cm"
_ENV_WITH_VALUE = ("-u", "-C", "--unset", "--chdir")
_HEAD_BYTES = 1024
_PROBE_S = 60
_PROBE = """
import sys
if sys.path and not sys.path[0]: del sys.path[0]
import inferscope.probe
inferscope.observe
from inferscope.adapters import inject, shim
print(*shim.__path__)
"""
"""Without the current folder, which the command itself may not see."""
_FIND_NAMESAKE = """
import sys
from importlib import metadata
if sys.path and not sys.path[0]: del sys.path[0]
try: found = metadata.distribution('inferscope')
except metadata.PackageNotFoundError: sys.exit()
if not any(entry.group == 'inferscope.exporters' for entry in found.entry_points):
    print(found.version, '(' + str(found.metadata['Summary']) + ')')
"""
"""On package indexes, `inferscope` is another project, whose package has the same import name."""


class Target(NamedTuple):
    """A command, and the interpreter that will run it; None for a program that is not Python.

    Attributes:
        program: its path.
        interpreter: its path.
        flags: the interpreter's options that decide what it can import.
        module: what it runs with -m.
    """

    program: str
    interpreter: str | None
    flags: tuple[str, ...] = ()
    module: str | None = None

    def without(self, flags: Iterable[str]) -> str:
        """Return the advice to leave options out."""
        where = "" if self.program == self.interpreter else f" in the first line of {self.program}"
        return f"Leave out {' '.join(flags)}{where}"


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
        return Target(program, program, *_options(words[1:]))
    named = _named_by(Path(program))
    if not named or not _PYTHON.fullmatch(Path(named[0]).name):
        return Target(program, None)
    return Target(program, shutil.which(named[0], path=search), *_options(named[1:]))


def hides_hook(flags: Sequence[str]) -> tuple[str, str] | None:
    """Return the option that keeps the import hook out and what it does; None if none does."""
    for flag in ("-S", "-I", "-E"):
        if flag in flags:
            return flag, "imports no sitecustomize" if flag == "-S" else "ignores PYTHONPATH"
    return None


def shim_of(target: Target, environment: Mapping[str, str]) -> str:
    """Return the shim's folder in the inferscope that a command's interpreter imports.

    Raises:
        Unobservable: It cannot import one.
    """
    assert target.interpreter is not None
    asked = _ask(target.interpreter, target.flags, environment)
    if asked.returncode == 0:
        return asked.stdout.strip().splitlines()[-1]
    why = (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    if target.flags and _ask(target.interpreter, (), environment).returncode == 0:
        guilty = [
            flag
            for flag in target.flags
            if _ask(target.interpreter, (flag,), environment).returncode
        ] or list(target.flags)
        raise Unobservable(
            f"with {' '.join(guilty)} the command's Python cannot import inferscope ({why})",
            target.without(guilty),
        )
    install = shlex.join([target.interpreter, "-m", "pip", "install", DISTRIBUTION])
    namesake = find_namesake(target.interpreter, target.flags, environment)
    if namesake is not None:
        raise Unobservable(
            f"the command's Python has a package of another project, {namesake}, whose name is "
            f"ours to Python ({why})",
            f"Replace it with: {replace_namesake(target.interpreter)}",
        )
    raise Unobservable(
        f"the command's Python cannot import inferscope ({why})",
        f"Install it there with: {install}",
    )


def find_namesake(
    interpreter: str, flags: Sequence[str], environment: Mapping[str, str]
) -> str | None:
    """Return the distribution of another project that hides ours; None if there is none.

    Returns:
        its name, version and summary.
    """
    found = _ask(interpreter, flags, environment, program=_FIND_NAMESAKE)
    about = found.stdout.strip() if found.returncode == 0 else ""
    return f"inferscope {about}" if about else None


def replace_namesake(interpreter: str) -> str:
    """Return the command line that installs ours in place of another project's.

    Both have an `inferscope/__init__.py`: uninstalling either breaks the other.
    """
    pip = [interpreter, "-m", "pip"]
    remove = shlex.join([*pip, "uninstall", "-y", "inferscope", DISTRIBUTION])
    return f"{remove} && {shlex.join([*pip, 'install', DISTRIBUTION])}"


def _ask(
    interpreter: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str = _PROBE,
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [interpreter, *flags, "-c", program],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{interpreter} does not run: {error}. Check the command.") from error


def _options(words: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return those of an interpreter's options that matter, once each, and its module."""
    flags: dict[str, None] = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word, at = words[at], at + 1
        if word.startswith("--"):
            at += word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], start=2):
            if letter in _WITH_VALUE + _LAST:
                value = word[place:] or (words[at] if at < len(words) else "")
                if letter in _LAST:
                    return tuple(flags), value if letter == "m" else None
                at += not word[place:]
                break
            if letter in _MATTER:
                flags[f"-{letter}"] = None
    return tuple(flags), None


def _named_by(script: Path) -> list[str]:
    """Return the interpreter that a script's first lines name, and its options."""
    try:
        with script.open("rb") as file:
            head = os.fsdecode(file.read(_HEAD_BYTES)).splitlines()
    except OSError:
        return []
    if not head or not head[0].startswith("#!"):
        return []
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env":
        return _named_by_env(words[1:])
    if words and Path(words[0]).name in ("sh", "bash") and len(head) > 1:
        named = _LONG_SHEBANG.match(head[1])
        return _split(named[1]) if named else words
    return words


def _named_by_env(words: Sequence[str]) -> list[str]:
    """Return the command of `env [OPTION]... [NAME=VALUE]... COMMAND [ARG]...`."""
    left = list(words)
    while left and (left[0].startswith("-") or "=" in left[0]):
        word = left.pop(0)
        if word in _ENV_WITH_VALUE and left:
            left.pop(0)
        elif word.startswith("-S") and len(word) > 2:
            left.insert(0, word[2:])
    return left


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quotation
        return line.split()
