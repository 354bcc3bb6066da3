"""The live screen: a view of snapshots, with widgets and keys.

Names are imported on first use: a source of snapshots needs no textual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.lazy import lazy_names

if TYPE_CHECKING:
    from inferscope.tui.app import InferScopeApp
    from inferscope.tui.page_app import PageApp
    from inferscope.tui.screenshot import save_picture
    from inferscope.tui.source import SnapshotSource

__all__ = ["InferScopeApp", "PageApp", "SnapshotSource", "save_picture"]

__getattr__ = lazy_names(
    __name__,
    {
        "app": ["InferScopeApp"],
        "page_app": ["PageApp"],
        "screenshot": ["save_picture"],
        "source": ["SnapshotSource"],
    },
)
