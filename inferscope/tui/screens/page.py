"""Screen of a metrics page: one block of lines, and the reason if they are stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.screen import Screen

from inferscope.insight.findings import Finding
from inferscope.metrics_page import PageView
from inferscope.text import TRIANGLE, Line, Scene, fit_line
from inferscope.text.page import Trends, page_lines
from inferscope.text.plots import plain
from inferscope.tui.canvas import Canvas
from inferscope.tui.keys import PAGE_KEYS, footer


@dataclass(frozen=True)
class PageScene:
    """What the screen shows of one reading.

    Attributes:
        view: the page's values.
        findings: problems that its totals show.
        trends: gauges and rates of the readings in the window.
        place: position of a frozen reading; empty for the newest.
    """

    view: PageView
    findings: Sequence[Finding] = ()
    trends: Trends | None = None
    place: str = ""


class PageScreen(Screen[None]):
    """Screen that shows one reading of a page."""

    DEFAULT_CSS = "PageScreen Canvas { height: 1fr; width: 1fr; }"

    def __init__(self, url: str, *, is_ascii: bool) -> None:
        super().__init__()
        self._url = url
        self._is_ascii = is_ascii
        self._scene: PageScene | None = None
        self._failure = self._message = ""

    def compose(self) -> ComposeResult:
        """Yield the one canvas."""
        yield Canvas(self._draw, is_ascii=self._is_ascii)

    def show(self, scene: PageScene) -> None:
        """Show a reading."""
        self._scene, self._failure = scene, ""
        self._repaint()

    def fail(self, reason: str) -> None:
        """Keep the last reading, and show why there is no newer one."""
        self._failure = reason
        self._repaint()

    def say(self, text: str) -> None:
        """Show a short message in reply to a key; an empty text clears it."""
        self._message = text
        self._repaint()

    def _repaint(self) -> None:
        self.query_one(Canvas).show(Scene())

    def _draw(self, _: Scene, width: int, height: int) -> list[Line]:
        lines: list[Line] = [((f"reading {plain(self._url)}", "dim"),)]
        scene = self._scene
        if scene is not None:
            lines = page_lines(scene.view, width, findings=scene.findings, trends=scene.trends)
            if scene.place:
                lines.insert(
                    1, ((f"{TRIANGLE} {scene.place}; End returns to the newest", "alarm"),)
                )
        lines = lines[: height - 1] + [()] * (height - 1 - len(lines))
        if self._failure:
            return [*lines, fit_line(((f" {TRIANGLE} {plain(self._failure)}", "alarm"),), width)]
        if self._message:
            return [*lines, fit_line(((f" {plain(self._message)}", "body"),), width)]
        return [*lines, footer(PAGE_KEYS, width)]
