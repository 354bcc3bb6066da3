"""Body of the roofline screen: the chart, what each kind of step reaches, what would move it."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line, fit_line, join_columns
from inferscope.text.panels.roofline import (
    Roof,
    brief_moves,
    kind_panel,
    kind_table,
    moves_panel,
    roof_of,
    roofline_chart,
)

_TWO_COLUMNS = 100
_KINDS_WIDTH = 40
_BRIEF_HEIGHT = 11
_KIND_ROWS = (("prefill", 10), ("decode", 10), ("mixed", 7))
"""Kinds and the lines of their panels; the rest is for what would move them."""


def roofline_body(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the chart beside the panels of the kinds, or above their table where it is narrow."""
    roof = roof_of(view)
    if width < _TWO_COLUMNS:
        chart = roofline_chart(roof, width, height - _BRIEF_HEIGHT, window_ns=view.window_ns)
        return [*chart, *roofline_brief(roof, width, _BRIEF_HEIGHT)]
    left = width - _KINDS_WIDTH
    return join_columns(
        [
            roofline_chart(roof, left, height, window_ns=view.window_ns),
            roofline_kinds(roof, _KINDS_WIDTH, height),
        ]
    )


def roofline_kinds(roof: Roof, width: int, height: int) -> list[Line]:
    """Return the panels of the kinds below each other, and what would move them."""
    lines: list[Line] = []
    for kind, rows in _KIND_ROWS:
        lines += kind_panel(roof, kind, width, rows)
    return [*lines, *moves_panel(roof, width, max(height - len(lines), 3))]


def roofline_brief(roof: Roof, width: int, height: int) -> list[Line]:
    """Return the kinds as a table, and what would move them."""
    table = kind_table(roof, width)
    lines = [*table, *brief_moves(roof, width, height - len(table))]
    return [*lines, *[fit_line((), width)] * (height - len(lines))]
