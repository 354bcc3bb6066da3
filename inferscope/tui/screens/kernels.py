"""Screen of a profile: the engine's kernels by phase."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from inferscope.insight import ProfileDocument
from inferscope.text import Line, Scene
from inferscope.text.panels import kernels
from inferscope.tui.keys import PAIR_KEYS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class KernelScreen(SceneScreen):
    """Layout of the profile; it stands still."""

    KEYS = PAIR_KEYS

    def __init__(self, profile: ProfileDocument, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self._profile = profile

    def blocks(self) -> Iterable[Widget]:
        """Yield the body."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        return kernels(self._profile, width, height)
