"""The live screen: a view of snapshots, with widgets and keys.

Names are imported on first use: a source of snapshots needs no textual.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferscope.tui.app import InferScopeApp
    from inferscope.tui.page_app import PageApp
    from inferscope.tui.screenshot import save_picture
    from inferscope.tui.source import SnapshotSource

__all__ = ["InferScopeApp", "PageApp", "SnapshotSource", "save_picture"]

_MODULES = {
    "InferScopeApp": "app",
    "PageApp": "page_app",
    "SnapshotSource": "source",
    "save_picture": "screenshot",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
