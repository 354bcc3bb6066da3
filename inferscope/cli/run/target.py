"""Interpreter of a command, and whether it can import inferscope.

A command may be an interpreter, a console script (its first line names one), or another program. An
interpreter that a program such as a shell script starts later cannot be checked beforehand.

An interpreter's options decide what it can import, so the check passes these options:

    -E  ignores PYTHONPATH, which loads the import hook
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
"""Name of InferScope's distribution for pip."""
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?")
_LONG_SHEBANG = re.compile(r"""^['"]+exec['"]+\s+(.+?)\s+"\$0\"""")
"""Second line of scripts by pip and uv if the interpreter's path does not fit the first line."""
_IMPORT_FLAGS = "IESsP"
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
"""Program that checks the import, without the current folder, which the command may not import."""
_FIND_NAME_CONFLICT = """
import sys
from importlib import metadata
if sys.path and not sys.path[0]: del sys.path[0]
try: found = metadata.distribution('inferscope')
except metadata.PackageNotFoundError: sys.exit()
if not any(entry.group == 'inferscope.exporters' for entry in found.entry_points):
    print(found.version, '(' + str(found.metadata['Summary']) + ')')
"""
"""Program that finds another project's distribution `inferscope`, which has our import name."""


class Target(NamedTuple):
    """Command with its interpreter.

    Attributes:
        program: path of the command's program.
        interpreter: path of the interpreter; None if the program is not Python.
        flags: the interpreter's options that decide what it can import.
        module: module that the command runs with -m; None without -m.
    """

    program: str
    interpreter: str | None
    flags: tuple[str, ...] = ()
    module: str | None = None

    def without(self, flags: Iterable[str]) -> str:
        """Return the advice to leave out options."""
        where = "" if self.program == self.interpreter else f" in the first line of {self.program}"
        return f"Leave out {' '.join(flags)}{where}"


class Unobservable(BadInput):
    """Error for a command that would run without being observed.

    Attributes:
        problem: reason why the command would not be observed.
        fix: action that solves the problem.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; --unobserved runs it all the same. {fix}")
        self.problem = problem
        self.fix = fix


def find_target(argv: Sequence[str], environment: Mapping[str, str]) -> Target:
    """Find a command's program and interpreter.

    Raises:
        BadInput: the program does not exist.
    """
    search = environment.get("PATH")
    program = shutil.which(argv[0], path=search)
    if program is None:
        if Path(argv[0]).suffix == ".py" and Path(argv[0]).is_file():
            raise BadInput(f"{argv[0]} is not executable. Give its Python: python {argv[0]}")
        raise BadInput(f"there is no program {argv[0]}. Check the name, or give its path.")
    # Not resolved: a virtual environment's python is a link and only works under its own path.
    if _PYTHON.fullmatch(Path(program).name):
        return Target(program, program, *_options(argv[1:]))
    named = _named_by(Path(program))
    if not named or not _PYTHON.fullmatch(Path(named[0]).name):
        return Target(program, None)
    return Target(program, shutil.which(named[0], path=search), *_options(named[1:]))


def hides_hook(flags: Sequence[str]) -> tuple[str, str] | None:
    """Return the option that disables the import hook and its effect; None if no option does."""
    for flag in ("-S", "-I", "-E"):
        if flag in flags:
            return flag, "imports no sitecustomize" if flag == "-S" else "ignores PYTHONPATH"
    return None


def shim_of(target: Target, environment: Mapping[str, str]) -> str:
    """Return the shim's folder in the inferscope that a command's interpreter imports.

    Raises:
        Unobservable: the interpreter cannot import inferscope.
    """
    assert target.interpreter is not None
    probe = _run_python(target.interpreter, target.flags, environment)
    if probe.returncode == 0:
        return probe.stdout.strip().splitlines()[-1]
    cause = (probe.stderr.strip().splitlines() or ["it exited with no output"])[-1]
    if target.flags and _run_python(target.interpreter, (), environment).returncode == 0:
        failing = [
            flag
            for flag in target.flags
            if _run_python(target.interpreter, (flag,), environment).returncode
        ] or list(target.flags)
        raise Unobservable(
            f"with {' '.join(failing)} the command's Python cannot import inferscope ({cause})",
            target.without(failing),
        )
    install = shlex.join([target.interpreter, "-m", "pip", "install", DISTRIBUTION])
    other = find_name_conflict(target.interpreter, target.flags, environment)
    if other is not None:
        raise Unobservable(
            f"the command's Python has a package of another project, {other}, with the same "
            f"import name ({cause})",
            f"Replace it with: {resolve_name_conflict(target.interpreter)}",
        )
    raise Unobservable(
        f"the command's Python cannot import inferscope ({cause})",
        f"Install it there with: {install}",
    )


def find_name_conflict(
    interpreter: str, flags: Sequence[str], environment: Mapping[str, str]
) -> str | None:
    """Return name, version and summary of another project's package that hides ours, or None."""
    found = _run_python(interpreter, flags, environment, program=_FIND_NAME_CONFLICT)
    about = found.stdout.strip() if found.returncode == 0 else ""
    return f"inferscope {about}" if about else None


def resolve_name_conflict(interpreter: str) -> str:
    """Return the command that replaces another project's package by ours.

    Both have an `inferscope/__init__.py`: uninstalling one breaks the other.
    """
    pip = [interpreter, "-m", "pip"]
    remove = shlex.join([*pip, "uninstall", "-y", "inferscope", DISTRIBUTION])
    return f"{remove} && {shlex.join([*pip, 'install', DISTRIBUTION])}"


def _run_python(
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


def _options(argv: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return an interpreter's options that affect imports, without duplicates, and its module."""
    flags: dict[str, None] = {}
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-", "--"):
        arg, at = argv[at], at + 1
        if arg.startswith("--"):
            at += arg == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(arg[1:], start=2):
            if letter in _WITH_VALUE + _LAST:
                value = arg[place:] or (argv[at] if at < len(argv) else "")
                if letter in _LAST:
                    return tuple(flags), value if letter == "m" else None
                at += not arg[place:]
                break
            if letter in _IMPORT_FLAGS:
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
    argv = head[0][2:].split()
    if argv and Path(argv[0]).name == "env":
        return _named_by_env(argv[1:])
    if argv and Path(argv[0]).name in ("sh", "bash") and len(head) > 1:
        named = _LONG_SHEBANG.match(head[1])
        return _split(named[1]) if named else argv
    return argv


def _named_by_env(argv: Sequence[str]) -> list[str]:
    """Return the command of `env [OPTION]... [NAME=VALUE]... COMMAND [ARG]...`."""
    left = list(argv)
    while left and (left[0].startswith("-") or "=" in left[0]):
        arg = left.pop(0)
        if arg in _ENV_WITH_VALUE and left:
            left.pop(0)
        elif arg.startswith("-S") and len(arg) > 2:
            left.insert(0, arg[2:])
    return left


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quotation
        return line.split()
