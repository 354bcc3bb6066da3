"""Screen of a metrics page: one block of lines, and the reason if they are stale."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.screen import Screen

from inferscope.metrics_page import PageView
from inferscope.text import TRIANGLE, Line, Scene, fit_line
from inferscope.text.page import page_lines
from inferscope.text.plots import plain
from inferscope.tui.canvas import Canvas

_KEYS = " q quit   w window   t theme   ? help   from /metrics, once a second"


class PageScreen(Screen[None]):
    """Screen that shows the newest view of a page."""

    DEFAULT_CSS = "PageScreen Canvas { height: 1fr; width: 1fr; }"

    def __init__(self, url: str, *, is_ascii: bool) -> None:
        super().__init__()
        self._url = url
        self._is_ascii = is_ascii
        self._view: PageView | None = None
        self._failure = ""

    def compose(self) -> ComposeResult:
        """Yield the one canvas."""
        yield Canvas(self._draw, is_ascii=self._is_ascii)

    def show(self, view: PageView | None, failure: str) -> None:
        """Show a view (None keeps the previous one), and the reason for a missing newer one."""
        self._view = view or self._view
        self._failure = failure
        self.query_one(Canvas).show(Scene())

    def _draw(self, _: Scene, width: int, height: int) -> list[Line]:
        lines: list[Line] = [((f"reading {plain(self._url)}", "dim"),)]
        if self._view is not None:
            lines = page_lines(self._view, width)
        lines = lines[: height - 1] + [()] * (height - 1 - len(lines))
        last: Line = ((_KEYS, "dim"),)
        if self._failure:
            last = ((f" {TRIANGLE} {plain(self._failure)}", "alarm"),)
        return [*lines, fit_line(last, width)]
