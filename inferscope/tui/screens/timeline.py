"""Timeline screen: recent steps as lanes over time, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from inferscope.fold import EngineView, StepView
from inferscope.text import Line, Scene, frame
from inferscope.text.bodies import SPAN_NS
from inferscope.text.panels import (
    SORTS,
    SPANS_NS,
    Sight,
    client_names,
    decomposition,
    lanes,
    newest_ns,
    order_steps,
    slice_table,
    step_named,
    step_table,
)
from inferscope.tui.canvas import Canvas, Draw
from inferscope.tui.keys import TIMELINE_HELP, TIMELINE_KEYS, TIMELINE_METHODS, Key
from inferscope.tui.screens.scene_screen import SceneScreen, Tab

_FIRST_SPAN = SPANS_NS.index(SPAN_NS)
_PANS = 8
"""Number of pans across the time on display."""
_FRAMED = 100
_ASK_KEYS: tuple[Key, ...] = (("Enter", "go to it"), ("Esc", "back"))


class TimelineScreen(SceneScreen):
    """Layout and keys of the timeline.

    The newest step is selected, and the lanes follow it, until a key selects another one.
    """

    AUTO_FOCUS = ""
    TABS = (Tab("3", "Timeline", "Time"),)
    KEYS = TIMELINE_KEYS
    HELP_SECTIONS = TIMELINE_HELP
    METHODS = TIMELINE_METHODS
    NEEDS_STEPS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "pan(-1)", "earlier", show=False),
        Binding("right,l", "pan(1)", "later", show=False),
        Binding("plus,equals_sign", "span(-1)", "zoom in", show=False),
        Binding("minus", "span(1)", "zoom out", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("home", "first", "first", show=False),
        Binding("g", "ask", "go to step", show=False),
        Binding("s", "sort", "sort", show=False),
        Binding("z", "zoom", "zoom", show=False),
        Binding("enter", "open", "requests", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, tabs: tuple[Tab, ...], *, is_ascii: bool) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self._span = _FIRST_SPAN
        self._until_ns: int | None = None
        """Right edge of the lanes; None follows the newest step."""
        self._key: tuple[int, int] | None = None
        """Replica and number of the selected step; None selects the first of the table."""
        self._top = 0
        """First row of the table on display."""
        self._sort = "time"
        self._listed: StepView | None = None
        """Step whose requests are listed in place of the steps."""
        self._slice = 0
        """Position of the selected request in that list."""
        self._wanted: tuple[str, int] | None = None
        """Request and time of a step to select, once a scene with steps is here."""
        self._names: tuple[EngineView | None, Mapping[str, str]] = (None, {})

    def blocks(self) -> Iterable[Widget]:
        """Yield the lanes, the table, and the line of the selected step."""
        yield self.canvas(self._lanes, "lanes", classes="block")
        yield self.added(_Rows(self, self._table, is_ascii=self.is_ascii))
        yield self.remark_line()
        box = Input(id="wanted", classes="entry", placeholder="step or request: 88230, rag-01")
        box.cursor_blink = False
        yield box

    # --- what is on display ---------------------------------------------------------------------

    @property
    def selected(self) -> StepView | None:
        """Return the selected step."""
        if self._listed is not None:
            return self._listed
        view = self.scene.view
        if view is None or not view.steps:
            return None
        if self._key is not None:
            for step in reversed(view.steps):
                if (step.dp_rank, step.step) == self._key:
                    return step
        first = order_steps(view.steps, self._sort, 1)
        return first[0] if first else None

    def look_for(self, request_id: str, at_ns: int) -> None:
        """Select the last step of a request that ended by a time, in the next scene with steps."""
        self._wanted = (request_id, at_ns)
        self._listed, self._sort = None, "time"

    def footer_keys(self) -> tuple[Key, ...]:
        """Return the keys of the footer, those of the input while it is open."""
        return _ASK_KEYS if self._box.display else super().footer_keys()

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the selected step's time as a sum."""
        step = self.selected
        if step is None:
            return ()
        return ((f" {decomposition(step, self._names_of(scene.view), width - 2)}", "body"),)

    @property
    def _sight(self) -> Sight:
        view = self.scene.view
        until_ns = self._until_ns
        if until_ns is None:
            until_ns = newest_ns(view) if view is not None else 0
        return Sight(until_ns - SPANS_NS[self._span], until_ns)

    def _lanes(self, scene: Scene, width: int, height: int) -> list[Line]:
        view = scene.view
        if view is None:
            return frame("Step timeline", [(("waiting for an engine", "dim"),)], width, height)
        if not view.steps and scene.is_frozen:
            why = "this snapshot was taken without steps: End shows the present"
            return frame("Step timeline", [((why, "dim"),)], width, height)
        names = self._names_of(view)
        return lanes(view, width, height, sight=self._sight, selected=self.selected, names=names)

    def _table(self, scene: Scene, width: int, height: int) -> list[Line]:
        view = scene.view
        if view is None:
            return []
        names = self._names_of(view)
        num = self.num_rows
        if self._listed is not None:
            order = self._slices[self._top : self._top + num]
            return slice_table(
                self._listed, width, height,
                order=order, cursor=self._slice - self._top, names=names,
            )  # fmt: skip
        ordered = order_steps(view.steps, self._sort, self._top + num)
        return step_table(
            view, width, height,
            shown=ordered[self._top :], selected=self.selected, sort=self._sort, names=names,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Return the number of rows that the table has room for."""
        size = self.query_one("#steps").size
        return max(size.height - (3 if size.width >= _FRAMED else 2), 1)

    @property
    def _slices(self) -> list[int]:
        """Return the slices of the listed step, largest shares first."""
        step = self._listed
        if step is None:
            return []
        spent = [sum(of[at] for of in step.shares_ns) for at in range(len(step.request_ids))]
        return sorted(range(len(spent)), key=lambda at: -spent[at])

    def _names_of(self, view: EngineView | None) -> Mapping[str, str]:
        """Return the clients' names of requests, where they gave one."""
        if view is not self._names[0]:
            self._names = (view, client_names(view) if view is not None else {})
        return self._names[1]

    # --- keys -----------------------------------------------------------------------------------

    def action_pan(self, step: int) -> None:
        """Show an earlier or later time; the display freezes first."""
        view = self.scene.view
        if view is None or not view.steps:
            return
        self._freeze()
        sight = self._sight
        until_ns = sight.until_ns + step * sight.span_ns // _PANS
        earliest_ns = view.steps[0].start_ns + sight.span_ns // _PANS
        self._until_ns = min(max(until_ns, earliest_ns), newest_ns(view))
        self._draw()

    def action_span(self, step: int) -> None:
        """Show a shorter or longer time, around the selected step if it is in sight."""
        before = self._sight
        self._span = min(max(self._span + step, 0), len(SPANS_NS) - 1)
        chosen = self.selected
        if self._until_ns is not None or self._key is not None:
            at_ns = before.until_ns - before.span_ns // 2
            if chosen is not None and before.since_ns <= chosen.start_ns < before.until_ns:
                at_ns = (chosen.start_ns + chosen.end_ns) // 2
            view = self.scene.view
            last_ns = newest_ns(view) if view is not None else at_ns
            self._until_ns = min(at_ns + SPANS_NS[self._span] // 2, last_ns)
        self._draw()

    def action_move(self, by: int) -> None:
        """Select another row of the table."""
        if self._listed is not None:
            self._slice = min(max(self._slice + by, 0), len(self._slices) - 1)
            self._keep_in_sight(self._slice)
            self._draw()
            return
        view = self.scene.view
        if view is None or not view.steps:
            return
        self._freeze()
        ordered = order_steps(view.steps, self._sort, len(view.steps))
        chosen = self.selected
        at = next((i for i, step in enumerate(ordered) if step is chosen), 0)
        at = min(max(at + by, 0), len(ordered) - 1)
        self._keep_in_sight(at)
        self._select(ordered[at])

    def action_page(self, by: int) -> None:
        """Move by a page."""
        self.action_move(by * max(self.num_rows - 1, 1))

    def action_first(self) -> None:
        """Select the first row, and follow the newest step again."""
        self._key = self._until_ns = None
        self._top = self._slice = 0
        self._draw()

    def action_ask(self) -> None:
        """Open the input of a step's number or a request's name."""
        self._box.value = ""
        self._box.display = True
        self._box.focus()
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Select the step; a wrong one is reported and stays open."""
        text = event.value.strip()
        if not text or self._go_to(text):
            self._close_box()

    def action_sort(self) -> None:
        """Order the table by the next number."""
        if self.selected is None:
            return
        orders = list(SORTS)
        self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        self._key, self._top = None, 0
        view = self.scene.view
        if self._sort != "time" and view is not None and view.steps:
            self._freeze()
            chosen = self.selected
            if chosen is not None:
                self._select(chosen)
        self._draw()

    def action_zoom(self) -> None:
        """Show the lanes at full height, or with the table again."""
        self.toggle_class("-lanes")
        self.call_after_refresh(self._draw)

    def action_open(self) -> None:
        """List the requests of the selected step; then open the selected one of them."""
        step = self.selected
        if step is None:
            return
        if self._listed is None:
            if not step.request_ids:
                self._reply(f"the requests of step {step.step} are not known")
                return
            self._freeze()
            self.remove_class("-lanes")
            self._key = (step.dp_rank, step.step)
            self._listed, self._slice, self._top = step, 0, 0
            self.call_after_refresh(self._draw)
            return
        self._open_request(step.request_ids[self._slices[self._slice]])

    def action_back(self) -> None:
        """Close what was opened last: the input, a step, the zoom, the selection, the screen."""
        if self._box.display:
            self._close_box()
        elif self._listed is not None:
            self._listed, self._top = None, 0
            chosen = self.selected
            if chosen is not None:
                self._show_row_of(chosen)
        elif self.has_class("-lanes"):
            self.remove_class("-lanes")
        else:
            self.action_leave()
            return
        self.call_after_refresh(self._draw)

    def choose(self, row: int, *, opens: bool) -> None:
        """Select a row on display; open it if it is selected already."""
        view = self.scene.view
        if view is None or not 0 <= row < self.num_rows:
            return
        at = self._top + row
        if self._listed is not None:
            if at < len(self._slices):
                is_same, self._slice = at == self._slice, at
                self._draw()
                if opens and is_same:
                    self.action_open()
            return
        ordered = order_steps(view.steps, self._sort, at + 1)
        if at < len(ordered):
            is_same = ordered[at] is self.selected and self._key is not None
            self._freeze()
            self._select(ordered[at])
            if opens and is_same:
                self.action_open()

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _box(self) -> Input:
        return self.query_one("#wanted", Input)

    def _close_box(self) -> None:
        self._box.display = False
        self.set_focus(None)
        self.call_after_refresh(self._draw)

    def _go_to(self, text: str) -> bool:
        """Select a step by its number, or the newest one of a request; return whether it is here.

        Replicas number their steps alike: the one of the selected step's replica comes first.
        """
        view = self.scene.view
        if view is None or not view.steps:
            self._reply("no recent step is kept here")
            return False
        chosen = self.selected
        rank = chosen.dp_rank if chosen is not None else 0
        found = step_named(view, text, self._names_of(view), rank=rank)
        if found is None:
            numbers = [step.step for step in view.steps]
            self._reply(f"no step {text} here: {min(numbers)} to {max(numbers)} are kept")
            return False
        self._freeze()
        self._listed = None
        self._select(found)
        self._reply("")
        return True

    def _select(self, step: StepView) -> None:
        self._key = (step.dp_rank, step.step)
        sight = self._sight
        if not (sight.since_ns <= step.start_ns and step.end_ns <= sight.until_ns):
            view = self.scene.view
            last_ns = newest_ns(view) if view is not None else step.end_ns
            middle_ns = (step.start_ns + step.end_ns) // 2
            self._until_ns = min(middle_ns + sight.span_ns // 2, last_ns)
        else:
            self._until_ns = sight.until_ns
        self._show_row_of(step)
        self._draw()

    def _find(self, request_id: str, at_ns: int) -> None:
        self._wanted = None
        steps = self.scene.view.steps if self.scene.view is not None else ()
        self._freeze()
        for step in reversed(steps):
            if step.end_ns <= at_ns and request_id in step.request_ids:
                self._select(step)
                return
        self._reply("the step of that gap is not kept any more")

    def _show_row_of(self, chosen: StepView) -> None:
        view = self.scene.view
        if view is None:
            return
        ordered = order_steps(view.steps, self._sort, len(view.steps))
        at = next((i for i, step in enumerate(ordered) if step is chosen), None)
        if at is not None:
            self._keep_in_sight(at)

    def _keep_in_sight(self, row: int) -> None:
        num = self.num_rows
        self._top = min(max(self._top, row - num + 1), row)

    def _open_request(self, request_id: str) -> None:
        view = self.scene.view
        for row in view.requests if view is not None else ():
            if row.request_id == request_id:
                self.app.open_request(row)  # type: ignore[attr-defined]  # InferScopeApp imports us
                return
        self._reply(f"{request_id} is not among the requests of this window: w shows a longer one")

    def _freeze(self) -> None:
        if not self.scene.is_frozen:
            self.app.action_freeze()  # type: ignore[attr-defined]  # as above
            if not self.scene.is_frozen:
                return
            self._until_ns = self._until_ns or self._sight.until_ns

    def _reply(self, text: str) -> None:
        self.app.show_message(text)  # type: ignore[attr-defined]  # as above

    def _draw(self) -> None:
        self.show(self.scene)

    def show(self, scene: Scene) -> None:
        """Draw a scene; a live one follows the newest step again."""
        if self.scene.is_frozen and not scene.is_frozen:
            self._key = self._until_ns = self._listed = None
            self._top, self._sort = 0, "time"
        super().show(scene)
        if self._wanted is not None and scene.view is not None and scene.view.steps:
            self._find(*self._wanted)


class _Rows(Canvas):
    """Rows that a click selects."""

    def __init__(self, screen: TimelineScreen, draw: Draw, *, is_ascii: bool) -> None:
        super().__init__(draw, is_ascii=is_ascii, id="steps", classes="block")
        self._timeline = screen

    def on_click(self, event: events.Click) -> None:
        """Select the row under the pointer; a second click opens it."""
        self._timeline.choose(event.y - 2, opens=event.chain > 1)
