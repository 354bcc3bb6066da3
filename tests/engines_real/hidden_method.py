"""A module for a `sitecustomize` to import: it hides one method of a class from our hooks.

HIDE names it, `module:Class.method`. Objects find it still: the engine works as before, and an
adapter finds what it would in a version without the method.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any


def hide(module: ModuleType) -> None:
    """Hide the method: in its class and in those that it inherits from."""
    owner_name, _, name = os.environ["HIDE"].partition(":")[2].partition(".")
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


if "HIDE" in os.environ and __name__ == "hidden_method":
    from after_import import AfterImport  # copied beside this file

    sys.meta_path.insert(0, AfterImport({os.environ["HIDE"].partition(":")[0]: hide}))
