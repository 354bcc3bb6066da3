"""Time between tokens of one request: one column per gap, or per longest of several."""

from __future__ import annotations

from inferscope.fold import RequestRow
from inferscope.text.lines import Line
from inferscope.text.plots import columns, fit, milliseconds

LEAST_ROWS = 4
"""Minimum number of rows, one of which is the axis."""
_SCALE = 9


def gap_lines(row: RequestRow, width: int, height: int) -> list[Line]:
    """Return the chart: its scale at the left, the number of tokens below."""
    chart = max(width - _SCALE, 1)
    cells = longest_of(row.gaps_ns, chart)
    rows = max(height - 1, 1)
    top_ns = max(cells, default=0)
    scale = [fit(milliseconds(top_ns, width=_SCALE - 2), _SCALE - 2, align="right")]
    scale += [""] * rows
    lines: list[Line] = [
        ((f"{label:<{_SCALE}}", "dim"), (drawn, "decode"))
        for label, drawn in zip(scale, columns(cells, chart, rows), strict=False)
    ]
    last = str(row.output_tokens)
    axis = fit("token 2", max(chart - len(last), 0)) + last
    lines.append(((f"{'':<{_SCALE}}{axis}", "dim"),))
    return lines


def gaps_note(row: RequestRow) -> str:
    """Return the meaning of a column, and the longest gap."""
    each = f"longest of {row.gaps_per_cell} gaps each, " if row.gaps_per_cell > 1 else ""
    return f"{each}ms, longest {milliseconds(max(row.gaps_ns))}"


def longest_of(gaps_ns: tuple[int, ...], width: int) -> list[float]:
    """Spread gaps over columns: few are stretched, of many the longest in a column shows."""
    num = len(gaps_ns)
    if num == 0:
        return []
    return [
        float(max(gaps_ns[at * num // width : max((at + 1) * num // width, at * num // width + 1)]))
        for at in range(width)
    ]
