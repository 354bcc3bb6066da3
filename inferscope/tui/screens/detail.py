"""Detail screen of one request: its ledger as a waterfall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from inferscope.fold import RequestRow
from inferscope.text import Line, Scene
from inferscope.text.panels import blamed, breadcrumb, request_detail
from inferscope.text.plots import milliseconds, plain
from inferscope.tui.keys import DETAIL_KEYS, HELP
from inferscope.tui.request_table import RequestList
from inferscope.tui.screens.scene_screen import SceneScreen, Tab


def _with_gaps(row: RequestRow, before: RequestRow) -> RequestRow:
    """Return the row with gaps and blame last seen: a request out of focus, or past, has none."""
    if not row.blame and before.blame:
        row = replace(row, blame=before.blame)
    if row.gaps_ns or not before.gaps_ns or row.output_tokens < before.output_tokens:
        return row
    return replace(
        row,
        gaps_ns=before.gaps_ns,
        gaps_per_cell=before.gaps_per_cell,
        gap_ends_ns=before.gap_ends_ns,
    )


def _why_no_gaps(row: RequestRow) -> str:
    if row.output_tokens < 2:
        return f"no gap between tokens to draw: {row.output_tokens} tokens so far"
    return "no gap between tokens to draw: the times of its tokens are not known"


class DetailScreen(SceneScreen):
    """Layout and keys of the detail. The request stays on screen after it has left the list."""

    KEYS = DETAIL_KEYS
    HELP_SECTIONS = HELP

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", show=False),
        Binding("enter", "gap_step", "step of a gap", show=False),
        Binding("full_stop", "gap(1)", "next longest gap", show=False),
        Binding("comma", "gap(-1)", "longer gap", show=False),
        Binding("left,h,k,up", "step(-1)", "previous request", show=False),
        Binding("right,l,j,down", "step(1)", "next request", show=False),
        Binding("z", "zoom", "gaps", show=False),
        Binding("y", "copy", "copy row", show=False),
        Binding("tab", "blame(1)", "next blamed request", show=False),
        Binding("shift+tab", "blame(-1)", "previous blamed request", show=False),
        Binding("b", "jump", "blamed request", show=False),
        Binding("x", "mark", "compare", show=False),
    ]

    def __init__(
        self, row: RequestRow, table: RequestList, tabs: tuple[Tab, ...], *, is_ascii: bool
    ) -> None:
        super().__init__(tabs, is_ascii=is_ascii)
        self.row = row
        self._table = table
        self._is_gone = False
        self._chart: bool | None = None
        """Whether the gaps are drawn; None draws them if they fit."""
        self._has_chart = False
        self._blame_idx = 0
        """Index of the selected one of the requests that this one waited for."""
        self._gap = 0
        """Rank of the selected gap, from the longest."""

    def blocks(self) -> Iterable[Widget]:
        """Yield breadcrumb, body and message."""
        yield self.canvas(self._breadcrumb, "breadcrumb")
        yield self.canvas(self._body, "body")
        yield self.remark_line()

    @property
    def tab(self) -> str:
        """Return the key of the requests' tab."""
        return "2"

    @property
    def focus_id(self) -> str | None:
        """Return the request on screen."""
        return self.row.request_id

    def show(self, scene: Scene) -> None:
        """Draw a scene, with the request's row in it."""
        rows = scene.view.requests if scene.view is not None else ()
        for row in rows:
            if row.request_id == self.row.request_id:
                self.row, self._is_gone = _with_gaps(row, self.row), False
                break
        else:
            self._is_gone = True
        super().show(scene)

    def action_step(self, step: int) -> None:
        """Go to the previous or next request, in the list's order."""
        row = self._table.neighbour(self.row.request_id, step)
        if row is not None:
            self.row, self._blame_idx, self._gap = row, 0, 0
            self.app.attend(self)  # type: ignore[attr-defined]  # as below

    def action_zoom(self) -> None:
        """Draw the gaps between tokens, or give their space to the ledgers."""
        if not self.row.gaps_ns:
            self.app.show_message(_why_no_gaps(self.row))  # type: ignore[attr-defined]  # as below
            return
        self._chart = not self._has_chart
        self.show(self.scene)

    def action_blame(self, step: int) -> None:
        """Select another request that this one waited for."""
        known = [each for each in blamed(self.row) if each.request_id is not None]
        self._blame_idx = max(0, min(self._blame_idx + step, len(known) - 1))
        self.show(self.scene)

    def action_jump(self) -> None:
        """Open the selected request that this one waited for; Esc returns here."""
        found = [each for each in blamed(self.row) if each.request_id is not None]
        rows = self.scene.view.requests if self.scene.view is not None else ()
        if not found:
            self.app.show_message("it waited for no request that is known by name")  # type: ignore[attr-defined]
            return
        wanted = found[min(self._blame_idx, len(found) - 1)].request_id
        for row in rows:
            if row.request_id == wanted:
                self.app.open_request(row)  # type: ignore[attr-defined]  # as below
                return
        self.app.show_message(f"{wanted} has left the list: inferscope why {wanted}")  # type: ignore[attr-defined]

    def action_mark(self) -> None:
        """Mark this request, or compare it with the marked one."""
        self.app.mark(self.row)  # type: ignore[attr-defined]  # as below

    def action_gap(self, step: int) -> None:
        """Select a gap between tokens, in the order of their lengths."""
        if not self.row.gap_ends_ns:
            self.app.show_message(_why_no_gaps(self.row))  # type: ignore[attr-defined]  # as below
            return
        self._gap = (self._gap + step) % len(self.row.gap_ends_ns)
        self.show(self.scene)

    def action_gap_step(self) -> None:
        """Show the step behind the selected gap on the timeline."""
        chosen = self._chosen_gap()
        if chosen is None:
            self.app.show_message(_why_no_gaps(self.row))  # type: ignore[attr-defined]  # as below
            return
        self.app.open_step_before(  # type: ignore[attr-defined]  # as below
            self.row.request_id, self.row.gap_ends_ns[chosen]
        )

    def _chosen_gap(self) -> int | None:
        """Return the index of the selected gap; None without gaps."""
        gaps_ns = self.row.gaps_ns
        if not self.row.gap_ends_ns:
            return None
        longest = sorted(range(len(gaps_ns)), key=lambda at: -gaps_ns[at])
        return longest[min(self._gap, len(longest) - 1)]

    def action_copy(self) -> None:
        """Copy the request as JSON."""
        self.app.copy_request(self.row)  # type: ignore[attr-defined]  # InferScopeApp imports us

    def _breadcrumb(self, scene: Scene, width: int, height: int) -> list[Line]:
        arrived_ns = scene.arrived_real_ns(self.row)
        return [breadcrumb(self.row, width, arrived_real_ns=arrived_ns, is_gone=self._is_gone)]

    def _body(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view is None:
            return []
        lines = request_detail(
            self.row, scene.view, width, height, chart=self._chart, blame_idx=self._blame_idx
        )
        self._has_chart = any("Time between tokens" in text for line in lines for text, _ in line)
        return lines

    def remark(self, scene: Scene, width: int) -> Line:
        """Return the selected gap, else the command that explains this request."""
        chosen = self._chosen_gap()
        if chosen is not None:
            gaps_ns = self.row.gaps_ns
            rank = f"gap {self._gap + 1} of {len(gaps_ns)} by length"
            text = f" {rank}: {milliseconds(gaps_ns[chosen])} ms. Enter: its step; , . another."
            return ((text, "body"),)
        name = plain(self.row.external_id or self.row.request_id)
        return ((f" in words, with names: inferscope why {name}", "dim"),)
