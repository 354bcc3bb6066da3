"""Overview screen: five panels, the list of requests, one sentence on the largest problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input

from inferscope.errors import BadInput
from inferscope.fold import EngineView
from inferscope.text import TRIANGLE, Line, Scene, fit_line, frame
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
from inferscope.tui.canvas import Draw
from inferscope.tui.filters import EVERYTHING, parse_filter
from inferscope.tui.keys import HELP, OVERVIEW_KEYS, ZOOM_KEYS, Key
from inferscope.tui.request_table import RequestList
from inferscope.tui.screens.groups import GroupScreen
from inferscope.tui.screens.scene_screen import PANELS_HEIGHT, PANELS_WIDTH, SceneScreen, Tab


def why_line(scene: Scene, width: int) -> Line:
    """Return the largest problem, else a note on the source, else nothing."""
    if scene.view is not None:
        problem = largest_problem(scene.view)
        if problem:
            hint = " Enter: ledger." if scene.view.is_alive and scene.view.requests else ""
            fits = len(problem) + len(hint) + 3 <= width
            sentence = plain(problem + (hint if fits else ""))
            return ((f" {TRIANGLE} ", "alarm"), (sentence, "body"))
    if scene.snapshot is not None and scene.snapshot.notes:
        return ((f" {plain(scene.snapshot.notes[0])}", "dim"),)
    return ()


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


class OverviewScreen(SceneScreen):
    """Layout and keys of the overview, and of the list of requests at full height."""

    TABS = (Tab("1", "Overview", "Over"), Tab("2", "Requests", "Req"))
    KEYS = OVERVIEW_KEYS
    HELP_SECTIONS = HELP
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", show=False),
        Binding("s", "sort", "sort", show=False),
        Binding("S", "reverse", "reverse", show=False),
        Binding("z", "zoom", "zoom", show=False),
        Binding("tab", "panel(1)", "next panel", show=False),
        Binding("shift+tab", "panel(-1)", "previous panel", show=False),
        Binding("y", "copy", "copy row", show=False),
        Binding("x", "mark", "compare", show=False),
        Binding("b", "group", "group", show=False),
        Binding("f", "pin", "pin", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self._filter_before = EVERYTHING
        self.table = RequestList(is_ascii=is_ascii, id="requests")
        self.table.add_class("block")

    def blocks(self) -> Iterable[Widget]:
        """Yield the panels; the style sheet decides which are shown."""
        yield Horizontal(
            self.panel(_device, "device"),
            self.panel(_of_view("Service levels", service_levels), "levels"),
            self.panel(_causes, "causes"),
            id="top",
            classes="block",
        )
        yield Horizontal(
            self.panel(_of_view("Tokens / s", tokens_per_second), "tokens"),
            self.panel(_of_view("Engine / KV", engine_and_kv), "engine"),
            id="middle",
            classes="block",
        )
        yield self.canvas(_brief, "brief", classes="block")
        yield self.table
        yield self.remark_line()
        box = Input(id="filter", placeholder="state:decode p99>30 id:rag* ttft>200 out>=10")
        box.cursor_blink = False
        yield box

    def on_mount(self) -> None:
        """Focus the list."""
        self.table.focus()

    def show(self, scene: Scene) -> None:
        """Draw a scene."""
        super().show(scene)
        self.table.show(scene)

    @property
    def tab(self) -> str:
        """Return the key of the tab: the list alone is a tab of its own."""
        return "2" if self.has_class("-listed") else "1"

    def open_tab(self, key: str) -> None:
        """Show all panels, or the list alone."""
        if self.has_class("-zoomed"):
            self._unzoom()
        self.set_class(key == "2", "-listed")
        self.table.focus()
        self._draw_again()

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the largest problem."""
        return why_line(scene, width)

    def footer_keys(self) -> tuple[Key, ...]:
        """Return the keys of the footer, those of a zoom while there is one."""
        return ZOOM_KEYS if self.has_class("-zoomed") else super().footer_keys()

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

    def action_group(self) -> None:
        """Show the requests by tenant, adapter, finish or model."""
        self.app.push_screen(GroupScreen(self._show_only, self._tabs, is_ascii=self.is_ascii))

    def action_pin(self) -> None:
        """Pin the request under the cursor to the top of the list, or unpin it."""
        self.table.toggle_pin()

    def _show_only(self, term: str) -> None:
        self.table.set_filter(parse_filter(term))

    def action_mark(self) -> None:
        """Mark the request under the cursor, or compare it with the marked one."""
        row = self.table.cursor_row
        if row is not None:
            self.app.mark(row)  # type: ignore[attr-defined]  # as above

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
        if self.app.size.width < PANELS_WIDTH or self.app.size.height < PANELS_HEIGHT:
            self.table.focus()  # the zoomed panel is hidden again
        self._draw_again()

    def _draw_again(self) -> None:
        """Draw the panels that became visible: hidden ones get no scenes."""
        self.call_after_refresh(lambda: self.show(self.scene))
