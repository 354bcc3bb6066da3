"""Service levels: latency percentiles, each from one merged histogram."""

from __future__ import annotations

from inferscope.fold import EngineView, Quantiles
from inferscope.text.labels import format_window
from inferscope.text.lines import Line, frame
from inferscope.text.plots import fit, milliseconds, seconds, sparkline

LEVELS: tuple[tuple[str, str, str], ...] = (
    ("TTFT", "ms", "ttft"),
    ("TBT", "ms", "tbt"),
    ("E2E", "s", "e2e"),
    ("queue", "ms", "queue"),
)
"""Name, unit and field of the view."""


def level_cells(quantiles: Quantiles, unit: str, *, width: int) -> tuple[str, str, str]:
    """Return p50, p95 and p99 in a unit."""
    values = (quantiles.p50_ns, quantiles.p95_ns, quantiles.p99_ns)
    if unit == "s":
        p50, p95, p99 = (seconds(value) for value in values)
    else:
        p50, p95, p99 = (milliseconds(value, width=width) for value in values)
    return p50, p95, p99


def level_lines(view: EngineView, width: int) -> list[Line]:
    """Return the table of percentiles."""
    cell = min(max((width - 9) // 3, 6), 12)
    lines: list[Line] = [
        (
            (" " * 9, "dim"),
            *[(fit(name, cell, align="right"), "dim") for name in ("p50", "p95", "p99")],
        )
    ]
    for name, unit, field in LEVELS:
        quantiles: Quantiles = getattr(view, field)
        cells = level_cells(quantiles, unit, width=cell - 1)
        lines.append(
            (
                (f"{name:6}", "strong"),
                (f"{unit:<3}", "dim"),
                *[(fit(text, cell, align="right"), "body") for text in cells],
            )
        )
    return lines


def service_levels(view: EngineView, width: int, height: int) -> list[Line]:
    """Return percentiles of TTFT, TBT, E2E and queue, and two of them over time."""
    inner = width - 4
    lines = level_lines(view, inner)
    for label, values in (
        ("TTFT p95 ", view.series.ttft_p95_ns),
        ("TBT  p99 ", view.series.tbt_p99_ns),
    ):
        lines.append(((label, "dim"), (sparkline(values, inner - len(label)), "bar")))
    note = f"{format_window(view.window_ns)}, n={view.ttft.num}"
    return frame("Service levels", lines, width, height, note=note)
