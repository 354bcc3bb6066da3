"""Engine screen: KV pool, queue and batch, reuse, configuration, devices, probe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from inferscope.text import Line, Scene, frame
from inferscope.text.bodies import engine_body
from inferscope.tui.keys import ENGINE_HELP, ENGINE_KEYS, ENGINE_METHODS
from inferscope.tui.screens.overview import why_line
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class EngineScreen(SceneScreen):
    """Layout and keys of the engine."""

    TABS = (Tab("6", "Engine", "Eng"),)
    KEYS = ENGINE_KEYS
    HELP_SECTIONS = ENGINE_HELP
    METHODS = ENGINE_METHODS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "facts", "device and configuration", show=False),
    ]

    _shows_facts = False
    """Whether a narrow screen shows the facts in place of the charts."""

    def blocks(self) -> Iterable[Widget]:
        """Yield the body."""
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the largest problem."""
        return why_line(scene, width)

    def action_facts(self) -> None:
        """Show the facts, or the charts again."""
        self._shows_facts = not self._shows_facts
        self.show(self.scene)

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return frame("Engine", [(("waiting for an engine", "dim"),)], width, height)
        return engine_body(scene.view, width, height, shows_facts=self._shows_facts)
