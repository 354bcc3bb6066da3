"""An engine's source, read without importing it: which classes have which methods and fields.

A class has what it and its bases define, wherever in the engine's package those are; names that a
module imports from another of the package are followed there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Member(NamedTuple):
    """What a class or a module has by a name; `function` is None for anything but a `def`."""

    function: Function | None = None
    is_static: bool = False


class _Module(NamedTuple):
    name: str
    names: dict[str, ast.stmt | tuple[str, str]]
    """What is defined at its top, or by which module and name it is imported."""


class Source:
    """One package's modules, each parsed when it is first asked for."""

    def __init__(self, package: str, folder: Path) -> None:
        """Take the package's name and its folder."""
        self._package = package
        self._folder = folder
        self._modules: dict[str, _Module | None] = {}

    def members(self, target: str) -> dict[str, Member] | None:
        """Return what `module:Class` or a module has by name; None where it does not exist."""
        module_name, _, class_name = target.partition(":")
        module = self._module(module_name)
        if module is None:
            return None
        if not class_name:
            return {name: _member(found) for name, found in module.names.items()}
        found = self._class(module, class_name)
        return None if found is None else self._of_class(*found, seen=set())

    def _of_class(
        self, module: _Module, node: ast.ClassDef, *, seen: set[int]
    ) -> dict[str, Member]:
        seen.add(id(node))
        members: dict[str, Member] = {}
        for base in reversed(node.bases):
            found = self._base(module, base)
            if found is not None and id(found[1]) not in seen:
                members |= self._of_class(*found, seen=seen)
        return members | dict(_own(node))

    def _base(self, module: _Module, base: ast.expr) -> tuple[_Module, ast.ClassDef] | None:
        """Find a base class; None for one outside of the package."""
        if isinstance(base, ast.Subscript):  # Generic[T]
            base = base.value
        if isinstance(base, ast.Name):
            return self._class(module, base.id)
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            imported = module.names.get(base.value.id)
            if isinstance(imported, tuple):
                owner = self._module(".".join(filter(None, imported)))
                return None if owner is None else self._class(owner, base.attr)
        return None

    def _class(self, module: _Module, name: str) -> tuple[_Module, ast.ClassDef] | None:
        """Find a class by its name in a module, also where the module only imports it."""
        seen = set()
        while (module.name, name) not in seen:
            seen.add((module.name, name))
            found = module.names.get(name)
            if isinstance(found, ast.ClassDef):
                return module, found
            if not isinstance(found, tuple):
                return None
            source, name = found
            other = self._module(source)
            if other is None:
                return None
            module = other
        return None

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> _Module | None:
        package, *parts = name.split(".")
        if package != self._package:
            return None
        path = self._folder.joinpath(*parts)
        is_package = path.is_dir()
        path = path / "__init__.py" if is_package else path.with_name(f"{path.name}.py")
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # absent, or for another version of Python
            return None
        return _Module(
            name, dict(_names(tree.body, name if is_package else name.rpartition(".")[0]))
        )


def _names(body: list[ast.stmt], package: str) -> Iterator[tuple[str, ast.stmt | tuple[str, str]]]:
    """Yield what statements define, those under `if` and `try` too."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*above, node.module or ""]).strip(".") if node.level else node.module
            for alias in node.names:
                yield alias.asname or alias.name, (source or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, (alias.name, "")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.If):
            yield from _names([*node.orelse, *node.body], package)
        elif isinstance(node, ast.Try):
            handlers = [line for handler in node.handlers for line in handler.body]
            yield from _names([*handlers, *node.body, *node.orelse], package)


def _member(found: ast.stmt | tuple[str, str]) -> Member:
    return Member(found, is_static=True) if isinstance(found, Function) else Member()


def _own(node: ast.ClassDef) -> Iterator[tuple[str, Member]]:
    """Yield what a class itself defines, and what its methods assign to `self`."""
    for line in node.body:
        if isinstance(line, Function):
            for part in ast.walk(line):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    yield part.attr, Member()
    for name, found in _names(node.body, ""):
        if not isinstance(found, tuple):
            is_static = isinstance(found, Function) and any(
                isinstance(mark, ast.Name) and mark.id == "staticmethod"
                for mark in found.decorator_list
            )
            function = found if isinstance(found, Function) else None
            yield name, Member(function, is_static)
