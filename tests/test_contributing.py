"""What the pages for contributors name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. `([\w.]+)` in `([\w/.]+)`", ARCHITECTURE, re.MULTILINE)


def names(path: Path) -> set[str]:
    """Return the functions of a module, and Class.method of its classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


def test_both_walks_are_read() -> None:
    assert len(STEPS) == len(re.findall(r"^\d+\. ", ARCHITECTURE, re.MULTILINE)) > 20


@pytest.mark.parametrize(("name", "path"), STEPS)
def test_each_function_of_the_walks_is_in_its_file(name: str, path: str) -> None:
    assert name in names(ROOT / path)


def test_every_room_has_its_sentence() -> None:
    rooms = {path.parent.name for path in (ROOT / "inferscope").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)) == rooms


def test_the_architecture_takes_five_minutes_to_read() -> None:
    assert len(ARCHITECTURE.split()) <= 900


def test_each_file_that_contributors_are_sent_to_exists() -> None:
    paths = re.findall(r"`([\w.]+/[\w./]*)`", CONTRIBUTING + ARCHITECTURE)
    assert len(set(paths)) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", CONTRIBUTING)) - {"and"} <= targets
