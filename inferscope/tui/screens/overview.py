"""Overview screen: five panels, the list of requests, one sentence on the largest problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from inferscope.errors import BadInput
from inferscope.fold import EngineView
from inferscope.text import TRIANGLE, Line, Scene, fit_line, frame, header, status_line
from inferscope.text.panels import (
    brief,
    causes,
    device_time,
    engine_and_kv,
    largest_problem,
    service_levels,
    tokens_per_second,
)
from inferscope.text.plots import plain
from inferscope.tui.canvas import Canvas, Draw
from inferscope.tui.filters import EVERYTHING, parse_filter
from inferscope.tui.keys import FROZEN_KEYS, OVERVIEW_KEYS, ZOOM_KEYS, footer
from inferscope.tui.request_table import RequestList

_PANELS_WIDTH, _PANELS_HEIGHT = 100, 32
"""Cells of the smallest terminal that shows the panels and the list."""


def why_line(scene: Scene, width: int) -> Line:
    """Return the reply to the last key, else the largest problem, else nothing."""
    if scene.message:
        return fit_line(((f" {plain(scene.message)}", "strong"),), width)
    if scene.failure:
        return fit_line(((f" {TRIANGLE} {plain(scene.failure)}", "alarm"),), width)
    if scene.view is not None:
        problem = largest_problem(scene.view)
        if problem:
            hint = " Enter: ledger." if scene.view.is_alive and scene.view.requests else ""
            fits = len(problem) + len(hint) + 3 <= width
            sentence = plain(problem + (hint if fits else ""))
            return fit_line(((f" {TRIANGLE} ", "alarm"), (sentence, "body")), width)
    if scene.snapshot is not None and scene.snapshot.notes:
        return fit_line(((f" {plain(scene.snapshot.notes[0])}", "dim"),), width)
    return fit_line((), width)


def _of_view(title: str, panel: Callable[[EngineView, int, int], list[Line]]) -> Draw:
    def draw(scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return frame(title, [(("waiting for an engine", "dim"),)], width, height)
        return panel(scene.view, width, height)

    return draw


def _device(scene: Scene, width: int, height: int) -> list[Line]:
    draw = _of_view("Device time", lambda v, w, h: device_time(v, w, h, unit=scene.unit))
    return draw(scene, width, height)


def _causes(scene: Scene, width: int, height: int) -> list[Line]:
    draw = _of_view("Where latency went", lambda v, w, h: causes(v, w, h, unit=scene.unit))
    return draw(scene, width, height)


def _brief(scene: Scene, width: int, height: int) -> list[Line]:
    if scene.view is None:
        return [fit_line(((" waiting for an engine", "dim"),), width)]
    return brief(scene.view, width, height, unit=scene.unit)


def _header(scene: Scene, width: int, height: int) -> list[Line]:
    return [status_line(scene, width) if width < 60 else header(scene, width)]


def _why(scene: Scene, width: int, height: int) -> list[Line]:
    return [why_line(scene, width)]


class OverviewScreen(Screen[None]):
    """Layout and keys of the overview."""

    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - Textual declares it so
        (0, "-tiny"),
        (60, "-narrow"),
        (_PANELS_WIDTH, "-normal"),
        (140, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012 - likewise
        (0, "-flat"),
        (16, "-low"),
        (_PANELS_HEIGHT, "-high"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", show=False),
        Binding("s", "sort", "sort", show=False),
        Binding("S", "reverse", "reverse", show=False),
        Binding("z", "zoom", "zoom", show=False),
        Binding("tab", "panel(1)", "next panel", show=False),
        Binding("shift+tab", "panel(-1)", "previous panel", show=False),
        Binding("y", "copy", "copy row", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, *, is_ascii: bool) -> None:
        super().__init__()
        self._is_ascii = is_ascii
        self._canvases: list[Canvas] = []
        self._scene = Scene()
        self._filter_before = EVERYTHING
        self.table = RequestList(is_ascii=is_ascii, id="requests")
        self.table.add_class("block")

    def compose(self) -> ComposeResult:
        """Yield the panels; the style sheet decides which are shown."""
        yield self._canvas(_header, "header")
        with Horizontal(id="top", classes="block"):
            yield self._panel(_device, "device")
            yield self._panel(_of_view("Service levels", service_levels), "levels")
            yield self._panel(_causes, "causes")
        with Horizontal(id="middle", classes="block"):
            yield self._panel(_of_view("Tokens / s", tokens_per_second), "tokens")
            yield self._panel(_of_view("Engine / KV", engine_and_kv), "engine")
        yield self._canvas(_brief, "brief", classes="block")
        yield self.table
        yield self._canvas(_why, "why")
        box = Input(id="filter", placeholder="state:decode p99>30 id:rag* ttft>200 out>=10")
        box.cursor_blink = False
        yield box
        yield self._canvas(self._footer, "footer")

    def on_mount(self) -> None:
        """Focus the list."""
        self.table.focus()

    def show(self, scene: Scene) -> None:
        """Draw a scene."""
        self._scene = scene
        for canvas in self._canvases:
            if canvas.display:
                canvas.show(scene)
        self.table.show(scene)

    # --- keys -----------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Open the filter input."""
        box = self.query_one("#filter", Input)
        self._filter_before = self.table.filter
        box.value = self.table.filter.text
        box.display = True
        box.focus()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.table.sort_next()

    def action_reverse(self) -> None:
        """Reverse the sort order."""
        self.table.sort_by(self.table.sort_name, is_reversed=not self.table.is_reversed)

    def action_zoom(self) -> None:
        """Zoom the focused panel, or show all again."""
        if self.has_class("-zoomed"):
            self._unzoom()
            return
        self.add_class("-zoomed")
        self._zoom(self.focused or self.table)

    def action_panel(self, step: int) -> None:
        """Focus the next panel; while zoomed, include those that the terminal has no room for."""
        panels = [*self.query(".panel"), self.table]
        if self.focused not in panels or not self.has_class("-zoomed"):
            (self.focus_next if step > 0 else self.focus_previous)()
            return
        self._zoom(panels[(panels.index(self.focused) + step) % len(panels)])

    def action_copy(self) -> None:
        """Copy the request under the cursor as JSON."""
        row = self.table.cursor_row
        if row is not None:
            self.app.copy_request(row)  # type: ignore[attr-defined]  # InferScopeApp imports us

    def action_back(self) -> None:
        """Close what was opened last: the filter input, a zoom, a filter."""
        box = self.query_one("#filter", Input)
        if box.display:
            self._close_filter(keep=False)
        elif self.has_class("-zoomed"):
            self._unzoom()
        elif self.table.filter.text:
            self.table.set_filter(EVERYTHING)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing; show the error of an invalid filter."""
        if not event.input.display:
            return
        try:
            wanted = parse_filter(event.value)
        except BadInput as error:
            self.app.show_message(str(error))  # type: ignore[attr-defined]
            self.table.set_filter(self._filter_before)
            return
        self.app.show_message("")  # type: ignore[attr-defined]
        self.table.set_filter(wanted)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and return to the list; an invalid one stays open."""
        with contextlib.suppress(BadInput):
            parse_filter(event.value)
            self._close_filter(keep=True)

    def on_request_list_opened(self, event: RequestList.Opened) -> None:
        """Open a request."""
        self.app.open_request(event.row)  # type: ignore[attr-defined]

    # --- inside ---------------------------------------------------------------------------------

    def _close_filter(self, *, keep: bool) -> None:
        box = self.query_one("#filter", Input)
        box.display = False
        if not keep:
            self.app.show_message("")  # type: ignore[attr-defined]
            self.table.set_filter(EVERYTHING)
        self.table.focus()

    def _footer(self, scene: Scene, width: int, height: int) -> list[Line]:
        keys = FROZEN_KEYS if scene.is_frozen else OVERVIEW_KEYS
        return [footer(ZOOM_KEYS if self.has_class("-zoomed") else keys, width)]

    def _zoom(self, panel: Widget) -> None:
        self.query(".-zoom").remove_class("-zoom")
        for widget in (panel, panel.parent):
            if isinstance(widget, Widget) and widget.has_class("block"):
                widget.add_class("-zoom")
        panel.focus()
        self._draw_again()

    def _unzoom(self) -> None:
        self.remove_class("-zoomed")
        self.query(".-zoom").remove_class("-zoom")
        if self.app.size.width < _PANELS_WIDTH or self.app.size.height < _PANELS_HEIGHT:
            self.table.focus()  # the zoomed panel is hidden again
        self._draw_again()

    def _draw_again(self) -> None:
        """Draw the panels that became visible: hidden ones get no scenes."""
        self.call_after_refresh(lambda: self.show(self._scene))

    def _canvas(self, draw: Draw, name: str, *, classes: str = "") -> Canvas:
        canvas = Canvas(draw, is_ascii=self._is_ascii, id=name, classes=classes)
        self._canvases.append(canvas)
        return canvas

    def _panel(self, draw: Draw, name: str) -> Canvas:
        canvas = Canvas(
            draw, is_ascii=self._is_ascii, id=name, classes="panel block", can_focus=True
        )
        self._canvases.append(canvas)
        return canvas
