"""Laws of the rooms: each is entered by a package that lists what it gives, never past it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "inferscope").rglob("*.py")) + sorted((ROOT / "exporters").rglob("*.py"))
_ENTRY = ROOT / "inferscope" / "__main__.py"
"""Entry point of the command line, whose package imports nothing: most commands need little."""


def room_of(path: Path) -> str:
    """Return the folder of `inferscope/` or `exporters/` that a source file belongs to."""
    return path.relative_to(ROOT).parts[1]


def imports(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.lineno, node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []


def names_of(package: Path) -> list[str]:
    """Return `__all__` of a package, read without an import."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        target, value = None, None
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        if isinstance(target, ast.Name) and target.id == "__all__" and value is not None:
            names: list[str] = ast.literal_eval(value)
            return names
    raise AssertionError(f"{package} has no __all__")


def place_of(module: str) -> Path:
    top = "inferscope" if module.partition(".")[0] == "inferscope" else "exporters"
    base = ROOT if top == "inferscope" else ROOT / top
    return base.joinpath(*module.split("."))


_PUBLIC = {"inferscope", "inferscope.probe", "inferscope.records", "inferscope.engine"}
"""Packages whose names are for programs of others as well."""
PACKAGES = sorted({path.parent for path in SOURCES if path.name == "__init__.py"})


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_package_lists_its_names_in_order(package: Path) -> None:
    names = names_of(package)
    assert len(set(names)) == len(names)


@pytest.mark.thorough
def test_other_rooms_are_entered_by_their_packages_alone() -> None:
    past = []
    for path in SOURCES:
        for line, module, names in imports(path):
            if module.partition(".")[0] != "inferscope" or module == "inferscope":
                continue
            place = place_of(module)
            room = ROOT / "inferscope" / module.split(".")[1]
            if not room.is_dir() or path == _ENTRY:
                continue
            if room_of(path) == room.name and path.is_relative_to(ROOT / "inferscope"):
                continue
            is_door = (place / "__init__.py").is_file() and set(names) <= set(names_of(place))
            if not is_door:
                past.append(f"{path.relative_to(ROOT)}:{line}: {module} {names}")
    assert not past, "\n".join(past)


@pytest.mark.thorough
def test_every_name_of_a_door_is_used_outside_or_public() -> None:
    used: dict[str, set[str]] = {}
    everywhere = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    everywhere += sorted((ROOT / "benchmarks").rglob("*.py"))
    for path in everywhere:
        if path.name == "__init__.py" and path.is_relative_to(ROOT / "inferscope"):
            continue
        for _, module, names in imports(path):
            if module.partition(".")[0] == "inferscope":
                used.setdefault(module, set()).update(names)
    entry_points = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    unused = [
        f"{name} of {module}"
        for package in PACKAGES
        if package.is_relative_to(ROOT / "inferscope")
        for module in [".".join(package.relative_to(ROOT).parts)]
        if module not in _PUBLIC
        for name in names_of(package)
        if name not in used.get(module, set()) and f'"{module}:{name}"' not in entry_points
    ]
    assert not unused, "\n".join(unused)


def test_commands_of_the_base_install_load_no_extra() -> None:
    commands = ("switch", "run.command", "doctor.command", "sampler", "help", "version")
    program = "\n".join(
        [
            "import sys",
            *(f"import inferscope.cli.{name}" for name in commands),
            "print(*{'numpy', 'yaml', 'textual', 'torch', 'prometheus_client'} & {*sys.modules})",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
