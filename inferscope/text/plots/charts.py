"""Charts of a series over time: one column of cells per column of time."""

from __future__ import annotations

from collections.abc import Sequence

LEVELS = " ▁▂▃▄▅▆▇█"


def resample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Resample a series to `width` columns, each the mean of its time span.

    Columns weigh values by overlap: the area under the chart is preserved, and a new value moves
    every column a little instead of making bucket edges flicker. Unknown values have no weight; a
    column of only unknown values is unknown.
    """
    num = len(values)
    if num == 0 or width <= 0:
        return [None] * max(width, 0)
    if num == width:
        return list(values)
    out: list[float | None] = []
    for column in range(width):
        left, right = column * num / width, (column + 1) * num / width
        weight = total = 0.0
        for i in range(int(left), min(num, int(right) + 1)):
            value = values[i]
            overlap = min(right, i + 1) - max(left, i)
            if value is not None and overlap > 1e-9:
                weight += overlap
                total += value * overlap
        out.append(total / weight if weight else None)
    return out


def sparkline(values: Sequence[float | None], width: int, *, top: float | None = None) -> str:
    """Return a series in one row. `top` is the value of a full cell, else the largest."""
    return columns(values, width, 1, top=top)[0]


def columns(
    values: Sequence[float | None], width: int, height: int, *, top: float | None = None
) -> list[str]:
    """Return a series as a filled chart of `height` rows, from the top row down.

    Values above 0 show at least the lowest level; unknown columns are empty.
    """
    cells = resample(values, width)
    if top is None:
        top = max((value for value in cells if value is not None), default=0.0)
    steps = height * 8
    heights = [
        0
        if value is None or value <= 0 or top <= 0
        else max(1, min(steps, round(value / top * steps)))
        for value in cells
    ]
    return [
        "".join(LEVELS[min(8, max(0, h - row * 8))] for h in heights)
        for row in range(height - 1, -1, -1)
    ]
