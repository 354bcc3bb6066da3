"""Tokens per second over time, prefill and decode separately: their mean has no meaning."""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.fold import EngineView
from inferscope.text.lines import DIAMOND, DOT, Line, Role, Span, frame
from inferscope.text.plots import columns, fit, per_second

_NOTES = 14


def tokens_per_second(view: EngineView, width: int, height: int) -> list[Line]:
    """Return two charts over a common time axis, each on its own scale, with rate and peak."""
    inner = width - 4
    chart = inner - _NOTES
    rows = max((height - 3) // 2, 1)
    lines = [
        *_chart(
            f"{DIAMOND} prefill", "prefill", view.series.prefill_tok_s, chart, rows
        ),
        *_chart(
            f"{DOT} decode", "decode", view.series.decode_tok_s, chart, rows
        ),
        ((time_axis(len(view.series.decode_tok_s), chart), "dim"),),
    ]  # fmt: skip
    return frame("Tokens / s", lines, width, height, note="each on its own scale")


def rate_now(values: Sequence[float]) -> float | None:
    """Return the rate of the last whole second."""
    return values[-1] if values else None


def _chart(
    name: str,
    role: Role,
    values: Sequence[float],
    width: int,
    height: int,
) -> list[Line]:
    peak = max(values, default=None)
    notes: list[Span] = [
        (name, role),
        (f"{per_second(rate_now(values)):>6} /s", "strong"),
        (f"peak {per_second(peak)}", "dim"),
    ]
    notes += [("", "dim")] * height
    lines: list[Line] = []
    for cells, (text, text_role) in zip(columns(values, width, height), notes, strict=False):
        lines.append(((cells, role), ("  ", "body"), (fit(text, _NOTES - 2), text_role)))
    return lines


def time_axis(num_seconds: int, width: int) -> str:
    """Return the axis of a chart that ends now."""
    if num_seconds == 0:
        return ""
    left, middle, right = f"-{num_seconds}s", f"-{num_seconds // 2}s", "now"
    if width < len(left) + len(middle) + len(right) + 4:
        return fit(left, width - 3) + right
    half = width // 2
    return (
        fit(left, half - len(middle) // 2)
        + fit(middle, width - half + len(middle) // 2 - len(right))
        + right
    )
