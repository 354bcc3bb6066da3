"""Request list: thousands of rows, of which only the visible ones cost time.

A frame sorts the visible rows (and a margin) by heap, once a second all of them; it formats the
visible rows and repaints those whose text changed. The cursor stays on its request, not on its
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from inferscope.fold import RequestRow
from inferscope.text import (
    Column,
    Line,
    Scene,
    column_at,
    columns_for,
    fit_line,
    format_listed,
    frame,
    heading_line,
    order_rows,
    row_line,
    rule,
)
from inferscope.text.panels import Unit
from inferscope.tui.canvas import Painter, styles_of
from inferscope.tui.filters import EVERYTHING, Filter

_MARGIN = 20
_PIN = "•"
_FULL_SORT_NS = 1_000_000_000
_FRAMED = 100
"""Minimum width in cells of a list with a frame."""


class RequestList(ScrollView, can_focus=True, inherit_bindings=False):
    """Widget over a tuple of rows and an order of their indices."""

    DEFAULT_CSS = "RequestList { height: 1fr; width: 1fr; scrollbar-size: 0 0; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("home,g", "edge(-1)", "first", show=False),
        Binding("G", "edge(1)", "last", show=False),
        Binding("enter", "open", "detail", show=False),
    ]

    class Opened(Message):
        """Message that asks to open one request."""

        def __init__(self, row: RequestRow) -> None:
            """Keep the request."""
            super().__init__()
            self.row = row

    def __init__(self, *, is_ascii: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self._is_ascii = is_ascii
        self._painter = Painter()
        self._scene = Scene()
        self._rows: tuple[RequestRow, ...] = ()
        self._order: list[int] = []
        self._num_sorted = 0
        self._sorted_at_ns: int | None = None
        self._cursor = 0
        self._cursor_id: str | None = None
        self.filter: Filter = EVERYTHING
        self._pinned: dict[str, RequestRow] = {}
        """Last rows of the requests at the top, by ID, in the order of pinning."""
        self.sort_name = "p99"
        self.is_reversed = True

    # --- content
    # -----------------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns that fit this width."""
        return columns_for(self.size.width)

    @property
    def cursor_row(self) -> RequestRow | None:
        """Return the request under the cursor."""
        if not self._order:
            return None
        return self._rows[self._order[min(self._cursor, len(self._order) - 1)]]

    @property
    def ids_in_sight(self) -> list[str]:
        """Return the requests on screen, from the top."""
        top = self.scroll_offset.y
        seen = self._order[top : top + self._num_visible]
        return [self._rows[i].request_id for i in seen]

    def neighbour(self, request_id: str, step: int) -> RequestRow | None:
        """Return the request `step` lines from another one and move the cursor there."""
        self._sort_first(len(self._order))
        for i, index in enumerate(self._order):
            if self._rows[index].request_id == request_id:
                self._move_to(i + step)
                return self.cursor_row
        return self.cursor_row

    def show(self, scene: Scene) -> None:
        """Show the rows of a scene."""
        view = scene.view
        mono_ns = scene.snapshot.mono_ns if scene.snapshot else 0
        is_due = self._sorted_at_ns is None or not 0 <= mono_ns - self._sorted_at_ns < _FULL_SORT_NS
        self._scene = scene
        self._rows = self._with_pinned(view.requests if view is not None else ())
        was_in_sight = self._is_in_sight(self._cursor)
        self._reorder(is_full=is_due)
        self._follow(keep_in_sight=was_in_sight)
        self._paint()

    def toggle_pin(self) -> None:
        """Pin the request under the cursor to the top, even after its end; or unpin it."""
        row = self.cursor_row
        if row is None:
            return
        if self._pinned.pop(row.request_id, None) is None:
            self._pinned[row.request_id] = row
        self._cursor_id = row.request_id
        self.show(self._scene)

    def set_filter(self, wanted: Filter) -> None:
        """Show only the requests that match."""
        self.filter = wanted
        self._reorder(is_full=True)
        self._follow(keep_in_sight=True)
        self._paint()

    def sort_by(self, name: str, *, is_reversed: bool) -> None:
        """Order by a column."""
        self.sort_name, self.is_reversed = name, is_reversed
        self._reorder(is_full=True)
        self._follow(keep_in_sight=True)
        self._paint()

    def sort_next(self) -> None:
        """Order by the next column: numbers from the largest, text from the first."""
        names = [column.name for column in self.columns]
        i = names.index(self.sort_name) if self.sort_name in names else -1
        column = self.columns[(i + 1) % len(names)]
        self.sort_by(column.name, is_reversed=not column.is_text)

    # --- actions --------------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        """Move the cursor by lines."""
        self._move_to(self._cursor + step)

    def action_page(self, step: int) -> None:
        """Move the cursor by a page."""
        self._move_to(self._cursor + step * max(self._num_visible - 1, 1))

    def action_edge(self, end: int) -> None:
        """Move the cursor to the first or the last line."""
        self._move_to(0 if end < 0 else len(self._order) - 1)

    def action_open(self) -> None:
        """Post a request to open the row under the cursor."""
        row = self.cursor_row
        if row is not None:
            self.post_message(self.Opened(row))

    def on_click(self, event: events.Click) -> None:
        """Sort by a clicked heading or select a row; a second click opens it."""
        left, top, _ = self._chrome
        line = event.y - top
        if line == -1:
            column = column_at(self.columns, self.size.width - 2 * left, event.x - left)
            if column is not None:
                same = column.name == self.sort_name
                self.sort_by(
                    column.name,
                    is_reversed=not self.is_reversed if same else not column.is_text,
                )
        elif 0 <= line < self._num_visible:
            target = line + self.scroll_offset.y
            if target == self._cursor and event.chain > 1:
                self.action_open()
            elif target < len(self._order):
                self._move_to(target)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._paint()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Draw the rows that became visible."""
        super().watch_scroll_y(old_value, new_value)
        self._paint()

    def notify_style_update(self) -> None:
        """Draw with the new theme."""
        super().notify_style_update()
        self._paint()

    def render_line(self, y: int) -> Strip:
        """Return one line of the last drawing."""
        return self._painter.strip(y, self.size.width, styles_of(self.app)["body"])

    # --- order ----------------------------------------------------------------------------------

    def _with_pinned(self, rows: tuple[RequestRow, ...]) -> tuple[RequestRow, ...]:
        """Return the rows, with those of pinned requests that have left the list."""
        if not self._pinned:
            return rows
        listed = {row.request_id: row for row in rows}
        for request_id, before in self._pinned.items():
            self._pinned[request_id] = listed.get(request_id, before)
        return rows + tuple(
            row for request_id, row in self._pinned.items() if request_id not in listed
        )

    def _pinned_first(self, order: list[int]) -> list[int]:
        if not self._pinned:
            return order
        first = [i for i in order if self._rows[i].request_id in self._pinned]
        return first + [i for i in order if self._rows[i].request_id not in self._pinned]

    @property
    def _sort_column(self) -> Column:
        for column in (*self.columns, *columns_for(200)):
            if column.name == self.sort_name:
                return column
        return self.columns[0]

    def _reorder(self, *, is_full: bool) -> None:
        if self.filter.predicates:
            matches, pinned = self.filter.matches, self._pinned
            self._order = [
                i for i, row in enumerate(self._rows) if row.request_id in pinned or matches(row)
            ]
        else:
            self._order = list(range(len(self._rows)))
        self._num_sorted = 0
        height = len(self._order) + sum(self._chrome[1:])
        if self.virtual_size.height != height:
            self.virtual_size = Size(self.size.width, height)
        if is_full:
            self._sort_first(len(self._order))
            self._sorted_at_ns = self._scene.snapshot.mono_ns if self._scene.snapshot else None
        else:
            self._sort_first(self.scroll_offset.y + self._num_visible + _MARGIN)

    def _sort_first(self, num: int) -> None:
        num = min(num, len(self._order))
        if num <= self._num_sorted:
            return
        first = order_rows(
            self._rows, self._order, self._sort_column,
            is_reversed=self.is_reversed, num_first=num,
        )  # fmt: skip
        if num < len(self._order):
            chosen = set(first)
            first += [i for i in self._order if i not in chosen]
        self._order, self._num_sorted = self._pinned_first(first), num

    # --- cursor and scrolling -------------------------------------------------------------------

    @property
    def _chrome(self) -> tuple[int, int, int]:
        """Return the cells at either side, lines above the rows, lines below them."""
        return (2, 2, 1) if self.size.width >= _FRAMED else (1, 2, 0)

    @property
    def _num_visible(self) -> int:
        return max(self.size.height - sum(self._chrome[1:]), 0)

    def _is_in_sight(self, i: int) -> bool:
        return 0 <= i - self.scroll_offset.y < self._num_visible

    def _follow(self, *, keep_in_sight: bool) -> None:
        """Move the cursor back to its request; one that was never moved stays at the top."""
        if self._cursor_id is not None:
            for i, index in enumerate(self._order):
                if self._rows[index].request_id == self._cursor_id:
                    if i >= self._num_sorted:
                        self._sort_first(len(self._order))
                        self._follow(keep_in_sight=keep_in_sight)
                        return
                    self._cursor = i
                    break
            else:
                self._cursor = max(min(self._cursor, len(self._order) - 1), 0)
                row = self.cursor_row
                self._cursor_id = row.request_id if row is not None else None
        if keep_in_sight:
            self._bring_in_sight()

    def _move_to(self, i: int) -> None:
        if not self._order:
            return
        self._cursor = max(min(i, len(self._order) - 1), 0)
        self._sort_first(self._cursor + self._num_visible + _MARGIN)
        row = self.cursor_row
        self._cursor_id = row.request_id if row is not None and self._cursor else None
        self._bring_in_sight()
        self._paint()

    def _bring_in_sight(self) -> None:
        top = self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + self._num_visible > top:
            self.scroll_to(y=self._cursor - self._num_visible + 1, animate=False)

    # --- drawing --------------------------------------------------------------------------------

    def _paint(self) -> None:
        width, height = self.size
        if not (width and height and self.is_mounted):
            return
        self._sort_first(self.scroll_offset.y + self._num_visible)
        lines = self._draw(width, height)
        styles = styles_of(self.app, has_focus=self.has_focus)
        changed = self._painter.paint(lines, width, styles, is_ascii=self._is_ascii)
        if changed:
            self.refresh(*[Region(0, y, width, 1) for y in changed])

    def _draw(self, width: int, height: int) -> list[Line]:
        left, _, _ = self._chrome
        inner = width - 2 * left
        top = self.scroll_offset.y
        seen = self._order[top : top + self._num_visible]
        columns = self.columns
        unit: Unit = "%" if self._scene.unit == "ms" else "ms"
        body = [
            heading_line(
                columns, inner, unit=unit, sort=self.sort_name, is_reversed=self.is_reversed
            ),
            *[self._row_line(self._rows[i], columns, inner, unit) for i in seen],
        ]
        if not seen:
            body.append(((self._nothing(), "dim"),))
        title, note, foot = self._title(), self._note(), self._position(top, len(seen))
        if left == 2:
            lines = frame(title, body, width, height, note=note, foot=foot)
        else:
            lines = [
                rule(title, width, note=note),
                *[fit_line(((" ", "body"), *line), width) for line in body],
            ]
        cursor = self._cursor - top
        if seen and 0 <= cursor < len(seen):
            lines[2 + cursor] = _marked(lines[2 + cursor])
        return lines[:height]

    def _row_line(self, row: RequestRow, columns: Sequence[Column], width: int, unit: Unit) -> Line:
        line = row_line(row, columns, width, unit=unit)
        if row.request_id not in self._pinned:
            return line
        (name, _), *rest = line
        return ((f"{_PIN} {name[:-2]}", "strong"), *rest)

    def _title(self) -> str:
        view = self._scene.view
        return f"Requests: {format_listed(view)}" if view is not None else "Requests"

    def _note(self) -> str:
        if self.filter.text and self.size.width < _FRAMED:
            return f"filter: {self.filter.text}"  # its heading marks the sorted column
        heading = self._sort_column.heading.replace(" {unit}", "")
        arrow = "▼" if self.is_reversed else "▲"
        wanted = self.filter.text or "-"
        return f"sort: {heading} {arrow}  filter: {wanted}"

    def _position(self, top: int, num_seen: int) -> str:
        num = len(self._order)
        return f"{top + 1}-{top + num_seen} of {num}" if num > num_seen else ""

    def _nothing(self) -> str:
        if self.filter.predicates and self._rows:
            return f"No request matches {self.filter.text}  (/ then Esc shows all)"
        view = self._scene.view
        if view is None:
            status = self._scene.status or "waiting for an engine"
            return f"{status[0].upper()}{status[1:]}."
        if view.num_finished:
            return "No request now, nor in this window  (w shows a longer one)"
        return "No request yet: send one to the engine and it appears here."


def _marked(line: Line) -> Line:
    """Mark a line as the one under the cursor, by a sign and by its background."""
    text, role = line[0]
    return (("", "cursor"), (text[:-1] + "▸", role), *line[1:])
