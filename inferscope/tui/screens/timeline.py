"""Timeline screen: what the device did, over time."""

from __future__ import annotations

from collections.abc import Iterable

from textual.widget import Widget

from inferscope.text import Line, Scene, frame
from inferscope.text.panels import lanes
from inferscope.tui.keys import TIMELINE_HELP, TIMELINE_KEYS
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


class TimelineScreen(SceneScreen):
    """Layout and keys of the timeline."""

    TABS = (Tab("3", "Timeline", "Time"),)
    KEYS = TIMELINE_KEYS
    HELP_SECTIONS = TIMELINE_HELP

    def blocks(self) -> Iterable[Widget]:
        """Yield the lanes."""
        yield self.canvas(_lanes, "lanes")
        yield self.remark_line()


def _lanes(scene: Scene, width: int, height: int) -> list[Line]:
    if scene.view is None:
        return frame("Timeline", [(("waiting for an engine", "dim"),)], width, height)
    return lanes(scene.view, width, height)
