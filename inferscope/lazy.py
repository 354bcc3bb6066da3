"""Names of a package that are imported on first use, where most users need a part of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports the module that a name is defined in.

    Args:
        package: the package's `__name__`.
        names: names by the module that defines them, relative to the package.
    """
    module_by_name = {name: module for module, its_names in names.items() for name in its_names}

    def get(name: str) -> object:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_by_name[name]}"), name)

    return get
