"""Fleet screen: all engines of the source, one line each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from inferscope.text import TRIANGLE, Line, Scene, frame
from inferscope.text.bodies import fleet_body
from inferscope.text.panels import outlier_sentence
from inferscope.text.plots import plain
from inferscope.tui.keys import FLEET_HELP, FLEET_KEYS, FLEET_METHODS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class FleetScreen(SceneScreen):
    """Layout and keys of the fleet; the selected engine is the one that the other screens show."""

    TABS = (Tab("0", "Fleet", "Fleet"),)
    KEYS = FLEET_KEYS
    HELP_SECTIONS = FLEET_HELP
    METHODS = FLEET_METHODS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "open", "open engine", show=False),
    ]

    def blocks(self) -> Iterable[Widget]:
        """Yield the body."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the engine that stands out most."""
        text = "" if scene.snapshot is None else outlier_sentence(scene.snapshot)
        return ((f" {TRIANGLE} ", "alarm"), (plain(text), "body")) if text else ()

    def action_move(self, step: int) -> None:
        """Select another engine."""
        if self.scene.num_engines:
            index = self._cursor + step
            self.app.select_engine(max(0, min(index, self.scene.num_engines - 1)))  # type: ignore[attr-defined]  # as below

    def action_open(self) -> None:
        """Show the overview of the selected engine."""
        self.app.action_tab("1")  # type: ignore[attr-defined]  # InferScopeApp imports us

    @property
    def _cursor(self) -> int:
        return self.scene.engine_idx % max(self.scene.num_engines, 1)

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.snapshot is None:
            return frame("Fleet", [(("waiting for an engine", "dim"),)], width, height)
        return fleet_body(scene.snapshot, width, height, cursor=self._cursor)
