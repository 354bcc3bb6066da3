"""Source of an engine with what a table of needs lists, for checks that read and import none."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from inferscope.adapters.needs.feature import Engine


def split(target: str) -> tuple[str, str]:
    module, _, path = target.partition(":")
    return module, path


def write(engine: Engine, folder: Path, *, without: str = "", instead: str = "") -> Path:
    """Write a package with all that a table needs, but for one target; return its folder.

    Args:
        engine: the table.
        folder: to write into.
        without: `module:Class.name` that is left out.
        instead: a line in its place.
    """
    classes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for feature in engine.features:
        for place in feature.places:
            module, path = split(place.target)
            owner, _, name = path.rpartition(".")
            words = ", ".join([*(["self"] if owner else []), *place.takes])
            line = f"def {name}({words}): ..."
            classes[module][owner].append(instead if place.target == without else line)
        for fields in feature.fields:
            module, owner = split(fields.target)
            for name in fields.names:
                is_left_out = f"{fields.target}{'.' if owner else ':'}{name}" == without
                classes[module][owner].append("" if is_left_out else f"{name} = None")
    for module, lines_by_class in classes.items():
        path = folder.joinpath(*module.split("."))
        if any(each.startswith(f"{module}.") for each in classes):
            path /= "__init__"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ["raise SystemExit('imported')"]
        for owner, lines in lines_by_class.items():
            if owner:
                text += [f"class {owner}:", "    pass", *(f"    {line}" for line in lines)]
            else:
                text += lines
        path.with_suffix(".py").write_text("\n".join(text))
    return folder / engine.package


def environment(folder: Path, engine: Engine, version: str, *, without: str = "") -> str:
    """Make what passes for an environment with an engine in it; return its Python."""
    packages = folder / "packages"
    write(engine, packages, without=without)
    facts = packages / f"{engine.distribution.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {engine.distribution}\nVersion: {version}\n"
    )
    (packages / engine.package / "__init__.py").write_text("raise SystemExit('imported')")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)
