"""A finder that calls a function on a module as soon as it is executed, in an engine's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Finds the modules that it has a function for, as the other finders do.

    First in `sys.meta_path` its function is called before those of any observer of imports.
    """

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """Take the functions by name of their module."""
        self._functions = functions
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._functions or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._functions[fullname](module)

        loader.exec_module = exec_module
        return spec
