"""Stacked chart: several series over time, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from inferscope.text.plots.charts import LEVELS, resample

EMPTY = -1
"""Index of a run of cells above all series."""

Run = tuple[str, int]
"""Cells of one row, and the index of their series."""


def stacked(
    series: Sequence[Sequence[float | None]],
    width: int,
    height: int,
    *,
    top: float,
    fills: Sequence[str],
) -> list[list[Run]]:
    """Return rows of runs, from the top row down.

    A cell that two series share shows the one with the larger part. Unknown values count as 0.

    Args:
        series: values over time, the lowest series first.
        width: number of columns.
        height: number of rows.
        top: value at the upper edge.
        fills: character of a full cell, for each series.
    """
    columns = [resample(values, width) for values in series]
    edges: list[list[int]] = []
    for at in range(width):
        total, of_column = 0.0, []
        for values in columns:
            total += max(values[at] or 0.0, 0.0)
            of_column.append(min(height * 8, round(total / top * height * 8)) if top > 0 else 0)
        edges.append(of_column)
    rows = []
    for row in range(height - 1, -1, -1):
        cells = [_cell(of_column, row * 8, fills) for of_column in edges]
        rows.append(
            [("".join(c for c, _ in run), kind) for kind, run in groupby(cells, key=lambda c: c[1])]
        )
    return rows


def _cell(edges: Sequence[int], low: int, fills: Sequence[str]) -> tuple[str, int]:
    """Return the character of a cell from `low` on, in eighths, and the index of its series."""
    filled = min(max(edges[-1] - low, 0), 8) if edges else 0
    if not filled:
        return " ", EMPTY
    parts, below = [], low
    for edge in edges:
        parts.append(max(min(edge, low + 8) - max(below, low), 0))
        below = max(below, edge)
    kind = max(range(len(parts)), key=parts.__getitem__)
    return (fills[kind] if filled == 8 else LEVELS[filled]), kind
