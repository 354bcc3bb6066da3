"""Horizontal bars with eighth blocks."""

from __future__ import annotations

from collections.abc import Sequence

EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(value_share: float | None, width: int) -> str:
    """Return a bar that fills `value_share` (0..1) of `width`; any value above 0 shows."""
    if value_share is None or width <= 0:
        return " " * max(width, 0)
    eighths = _eighths(value_share, width)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def offset_bar(start_share: float, end_share: float, width: int) -> str:
    """Return the part of a bar from `start_share` to `end_share`: one step of a waterfall.

    The left edge is on a whole cell, since blocks are filled from the left.
    """
    if width <= 0:
        return ""
    start = min(int(max(start_share, 0.0) * width + 1e-9), width - 1)
    end_eighths = round(min(max(end_share, 0.0), 1.0) * width * 8)
    eighths = max(end_eighths - start * 8, 1) if end_share > start_share else 0
    full, rest = divmod(min(eighths, (width - start) * 8), 8)
    return (" " * start + "█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def split_bar(shares: Sequence[float], width: int) -> list[str]:
    """Return a bar of `width` in whole-cell parts, one per share; together they fill their sum.

    For stacked bars: each part has its own colour, and the cells add up.
    """
    parts: list[str] = []
    done = 0
    total = 0.0
    for value in shares:
        total += max(value, 0.0)
        end = max(done, round(min(total, 1.0) * width))
        parts.append("█" * (end - done))
        done = end
    return parts


def _eighths(value_share: float, width: int) -> int:
    eighths = round(min(max(value_share, 0.0), 1.0) * width * 8)
    return max(eighths, 1) if value_share > 0 else eighths
