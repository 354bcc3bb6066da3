"""Roofline screen: steps by kind against the device's ceilings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from inferscope.fold import EngineView
from inferscope.text import Line, Scene, frame
from inferscope.text.bodies import roofline_brief, roofline_kinds
from inferscope.text.panels import Roof, provenance, roof_of, roofline_chart
from inferscope.tui.keys import ROOFLINE_HELP, ROOFLINE_KEYS, ROOFLINE_METHODS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab

_SECOND_NS = 1_000_000_000


class RooflineScreen(SceneScreen):
    """Layout and keys of the roofline."""

    TABS = (Tab("4", "Roofline", "Roof"),)
    KEYS = ROOFLINE_KEYS
    HELP_SECTIONS = ROOFLINE_HELP
    METHODS = ROOFLINE_METHODS
    NEEDS_STEPS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "clear", "clear trail", show=False),
        Binding("z", "zoom", "chart", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self._cleared_ns = 0
        """Time before which the trail is left out."""
        self._drawn: tuple[object, Roof | None] = (None, None)

    def blocks(self) -> Iterable[Widget]:
        """Yield the chart and the panels of the kinds."""
        yield Horizontal(
            self.canvas(self._chart, "chart"), self.canvas(self._kinds, "kinds"), id="roof"
        )
        yield self.canvas(self._brief, "brief")
        yield self.remark_line()

    def remark(self, scene: Scene, width: int) -> Line:
        """Return how the numbers are made."""
        if scene.view is None or not scene.view.kinds:
            return ()
        return ((f" {provenance(scene.view, self._roof(scene.view))}", "dim"),)

    def action_clear(self) -> None:
        """Begin the trail anew."""
        view = self.scene.view
        self._cleared_ns = view.folded_ns if view is not None else 0
        self._drawn = (None, None)
        self.show(self.scene)

    def action_zoom(self) -> None:
        """Show the chart alone, or with the panels again."""
        self.toggle_class("-chart")
        self.call_after_refresh(lambda: self.show(self.scene))

    def action_back(self) -> None:
        """Close the zoom, else the screen."""
        if self.has_class("-chart"):
            self.action_zoom()
        else:
            self.action_leave()

    def _roof(self, view: EngineView) -> Roof:
        """Return the points of a view, computed once for all blocks."""
        before, roof = self._drawn
        if before is not view or roof is None:
            roof = roof_of(view)
            num = max((view.folded_ns - self._cleared_ns) // _SECOND_NS, 0)
            if self._cleared_ns:
                trails = {kind: trail[-num:] if num else [] for kind, trail in roof.trails.items()}
                roof = replace(roof, trails=trails)
            self._drawn = (view, roof)
        return roof

    def _chart(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return frame("Roofline", [(("waiting for an engine", "dim"),)], width, height)
        roof = self._roof(scene.view)
        return roofline_chart(roof, width, height, window_ns=scene.view.window_ns)

    def _kinds(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return []
        return roofline_kinds(self._roof(scene.view), width, height)

    def _brief(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return []
        return roofline_brief(self._roof(scene.view), width, height)
