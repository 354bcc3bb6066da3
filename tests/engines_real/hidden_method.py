"""A module for a `sitecustomize` to import: it hides one method of a class from our hooks.

HIDE names it, `module:Class.method`. Objects find it still: the engine works as before, and an
adapter finds what it would in a version without the method.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def hide(module: ModuleType, owner_name: str, name: str) -> None:
    """Hide a method: in its class and in those that it inherits from."""
    owner = getattr(module, owner_name)
    original = getattr(owner, name)
    for kind in owner.__mro__:
        if name in vars(kind):
            delattr(kind, name)
    before = getattr(owner, "__getattr__", None)

    def __getattr__(self: Any, wanted: str) -> Any:
        if wanted == name:
            return functools.partial(original, self)
        if before is None:
            raise AttributeError(wanted)
        return before(self, wanted)

    owner.__getattr__ = __getattr__


class Hiding(MetaPathFinder):
    """A finder that hides the method as soon as its module is executed, before any observer."""

    def __init__(self, where: str) -> None:
        self._module, _, self._method = where.partition(":")
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self._is_asking:
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
            owner, _, name = self._method.partition(".")
            hide(module, owner, name)

        loader.exec_module = exec_module
        return spec


if "HIDE" in os.environ and __name__ == "hidden_method":
    sys.meta_path.insert(0, Hiding(os.environ["HIDE"]))
