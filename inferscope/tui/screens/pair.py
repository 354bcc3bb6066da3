"""Screen of two requests beside each other."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from inferscope.fold import RequestRow
from inferscope.text import Line, Scene
from inferscope.text.panels import pair
from inferscope.tui.keys import HELP, PAIR_KEYS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class PairScreen(SceneScreen):
    """Layout of the comparison; requests that still run grow on it."""

    KEYS = PAIR_KEYS
    HELP_SECTIONS = HELP

    def __init__(
        self, one: RequestRow, other: RequestRow, tabs: tuple[Tab, ...], *, is_ascii: bool
    ) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self._rows = [one, other]

    def blocks(self) -> Iterable[Widget]:
        """Yield the body."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    @property
    def tab(self) -> str:
        """Return the key of the requests' tab."""
        return "2"

    def show(self, scene: Scene) -> None:
        """Draw a scene, with the newest rows of both requests."""
        newest = {row.request_id: row for row in (scene.view.requests if scene.view else ())}
        self._rows = [newest.get(row.request_id, row) for row in self._rows]
        super().show(scene)

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        return pair(self._rows[0], self._rows[1], width, height)
