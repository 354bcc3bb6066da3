"""Distribution of a latency in bins of 1, 2, 5, 10 and so on, with the place of its target."""

from __future__ import annotations

from typing import Literal

from inferscope.fold import BIN_EDGES_NS, EngineView
from inferscope.text.labels import format_window
from inferscope.text.lines import Line, Role, frame
from inferscope.text.plots import bar, count, fit

Latency = Literal["ttft", "tbt", "e2e"]

_TITLES: dict[Latency, str] = {
    "ttft": "Time to first token",
    "tbt": "Time between tokens",
    "e2e": "End to end",
}
_UNITS: dict[Latency, str] = {"ttft": "requests", "tbt": "gaps", "e2e": "requests"}


def distribution(view: EngineView, metric: Latency, width: int, height: int) -> list[Line]:
    """Return one row per bin; the bins beyond the target are alarms."""
    title = _TITLES[metric]
    levels = view.levels
    bins = levels.bins.get(metric, ()) if levels is not None else ()
    if not any(bins):
        what = "no request finished in this window"
        return frame(title, [((what, "dim"),)], width, height)
    limit_ns = min(
        (
            each.objective.threshold_ns
            for each in (levels.objectives if levels is not None else ())
            if each.objective.metric == metric and each.objective.threshold_ns is not None
        ),
        default=None,
    )
    lines = _rows(bins, limit_ns, width - 4, height - 2)
    note = f"{count(sum(bins))} {_UNITS[metric]}, {format_window(view.window_ns)}"
    return frame(title, lines, width, height, note=note)


def shown_bins(bins: tuple[int, ...], num_rows: int) -> list[tuple[int | None, int | None, int]]:
    """Return lower edge, upper edge and number of the bins with a value, and those between.

    The lowest bins merge if there are more than `num_rows`; None is an open edge.
    """
    filled = [at for at, num in enumerate(bins) if num]
    first, last = filled[0], filled[-1]
    start = max(first, last - num_rows + 1)
    rows: list[tuple[int | None, int | None, int]] = []
    for at in range(start, last + 1):
        lower = BIN_EDGES_NS[at - 1] if at else None
        upper = BIN_EDGES_NS[at] if at < len(BIN_EDGES_NS) else None
        rows.append((lower, upper, bins[at]))
    if start > first:
        rows[0] = (None, rows[0][1], sum(bins[: start + 1]))
    return rows


def _rows(bins: tuple[int, ...], limit_ns: int | None, width: int, height: int) -> list[Line]:
    rows = shown_bins(bins, height - (limit_ns is not None))
    largest = max(num for _, _, num in rows)
    lines: list[Line] = []
    for lower, upper, num in rows:
        is_late = limit_ns is not None and lower is not None and lower >= limit_ns
        role: Role = "alarm" if is_late else "bar"
        lines.append(
            (
                (f"{_label(lower, upper):>12}", "body"),
                (f"{count(num):>7} ", "strong" if num else "dim"),
                (bar(num / largest, max(width - 20, 0)), role),
            )
        )
    if limit_ns is None:
        return lines
    below = sum(1 for lower, _, _ in rows if lower is None or lower < limit_ns)
    is_edge = limit_ns in BIN_EDGES_NS
    beyond = ""
    if is_edge:
        num = sum(num for at, num in enumerate(bins) if at and BIN_EDGES_NS[at - 1] >= limit_ns)
        beyond = f", {count(num)} beyond"
    text = f" target {_edge(limit_ns)}{beyond} "
    mark = "─" * 11 + text
    lines.insert(below, ((fit(mark + "─" * max(width - len(mark), 0), width), "alarm"),))
    return lines


def _label(lower: int | None, upper: int | None) -> str:
    if upper is None:
        return f"> {_edge(lower or 0)}"
    if lower is None:
        return f"≤ {_edge(upper)}"
    low, high = _edge(lower), _edge(upper)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return f"{low}–{high}"


def _edge(value_ns: int) -> str:
    value_ms = value_ns / 1e6
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"
