"""The static check: what an installed engine lacks, by feature, read from its source alone.

    interpreter ─► where its packages are, and their versions      (a process that imports none)
    source ─► classes, methods, parameters, fields ─► compared with the table ─► Lack, ...

Nothing of the engine is imported, so no device is touched and the check may run in another
environment. What an engine makes as it runs, such as a class in a function, is not seen.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from inferscope.adapters.needs.feature import Engine, Feature, Fields, Place
from inferscope.adapters.needs.llama_cpp import LLAMA_CPP
from inferscope.adapters.needs.sglang import SGLANG
from inferscope.adapters.needs.source import Function, Member, Source
from inferscope.adapters.needs.transformers import TRANSFORMERS
from inferscope.adapters.needs.vllm import VLLM
from inferscope.errors import BadInput

ENGINES = (VLLM, SGLANG, TRANSFORMERS, LLAMA_CPP)
_ASK_S = 60
_ASK = """
import json, sys
from importlib import metadata, util
if sys.path and not sys.path[0]: del sys.path[0]
found = {}
for package, distribution in json.loads(sys.argv[1]):
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if folders:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            version = ""
        found[package] = folders[0], version
print(json.dumps(found))
"""
"""`find_spec` of a package at the top of the tree imports nothing."""


class Lack(NamedTuple):
    """A feature that an engine cannot be observed by, and what of it is missing."""

    feature: Feature
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.feature.name}: {', '.join(self.missing)}"


class Installed(NamedTuple):
    """An engine of an environment."""

    engine: Engine
    version: str
    """Empty where the environment does not name it."""
    lacks: tuple[Lack, ...]

    @property
    def is_observed(self) -> bool:
        """Return whether it has all that any observation of it needs."""
        return not any(lack.feature.is_needed for lack in self.lacks)


def engines_of(python: str) -> list[Installed]:
    """Check the engines of the environment that an interpreter runs in.

    Raises:
        BadInput: The interpreter does not run.
    """
    pairs = json.dumps([(engine.package, engine.distribution) for engine in ENGINES])
    try:
        done = subprocess.run(
            [python, "-c", _ASK, pairs],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
        places = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{python} does not run: {error}. Give a Python.") from error
    except ValueError as error:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BadInput(f"{python} cannot be asked for its packages: {why}.") from error
    installed = []
    for engine in ENGINES:
        if engine.package in places:
            folder, version = places[engine.package]
            lacks = lacks_of(engine, Source(engine.package, Path(folder)))
            installed.append(Installed(engine, version, tuple(lacks)))
    return installed


def lacks_of(engine: Engine, source: Source) -> Iterator[Lack]:
    """Yield the features of which an engine's source does not have all that they need."""
    for feature in engine.features:
        missing = [*_missing(source, feature.places)]
        if missing and feature.otherwise and not [*_missing(source, feature.otherwise)]:
            missing = []
        missing += _missing_fields(source, feature.fields)
        if missing:
            yield Lack(feature, tuple(missing))


def _missing(source: Source, places: Iterable[Place]) -> Iterator[str]:
    for place in places:
        module, _, path = place.target.partition(":")
        owner, _, name = path.rpartition(".")
        target = f"{module}:{owner}" if owner else module
        members = source.members(target)
        dotted = f"{module}.{path}"
        if members is None:
            yield f"{target.replace(':', '.')} is missing"
        elif name not in members and not (owner and name == "__init__"):
            yield f"{dotted} is missing"
        elif members.get(name, Member()).function is not None:
            yield from _mismatches(dotted, members[name], place)


def _mismatches(dotted: str, member: Member, place: Place) -> Iterator[str]:
    """Yield in what a method's parameters are not those that the hook has."""
    assert member.function is not None
    positional, by_name, has_rest = _parameters(member.function)
    if not member.is_static:
        positional = positional[1:]
    if not has_rest and tuple(positional[: len(place.takes)]) != place.takes:
        absent = [name for name in place.takes if name not in (*positional, *by_name)]
        if absent:
            yield f"{dotted} has no {', '.join(absent)}"
        elif not set(place.takes) <= set(by_name):
            yield f"{dotted} takes {', '.join(positional)} in another order"
    more = [name for name in (*positional, *by_name) if name not in place.takes]
    if more and not place.is_open:
        yield f"{dotted} takes {', '.join(more)} too"


def _parameters(function: Function) -> tuple[list[str], list[str], bool]:
    """Return the positional parameters, those by name alone, and whether any others are taken."""
    args = function.args
    positional = [each.arg for each in (*args.posonlyargs, *args.args)]
    return positional, [each.arg for each in args.kwonlyargs], bool(args.vararg and args.kwarg)


def _missing_fields(source: Source, fields: Iterable[Fields]) -> Iterator[str]:
    for each in fields:
        members = source.members(each.target)
        dotted = each.target.replace(":", ".")
        if members is None:
            yield f"{dotted} is missing"
            continue
        absent = [name for name in each.names if name not in members]
        if absent:
            yield f"{dotted} has no {', '.join(absent)}"
