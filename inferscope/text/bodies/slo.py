"""Body of the SLO screen: objectives, distributions, causes of misses, worst requests."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line, join_columns
from inferscope.text.panels.breaches import breach_causes, worst_requests
from inferscope.text.panels.distribution import distribution
from inferscope.text.panels.objectives import objectives

_TWO_COLUMNS, _THREE_COLUMNS = 100, 150
_FEWEST_BINS = 6


def slo_body(view: EngineView, width: int, height: int, *, cursor: int = 0) -> list[Line]:
    """Return the panels in two columns, or below each other on a narrow terminal."""
    num = len(view.levels.trial or view.levels.objectives) if view.levels is not None else 1
    table = min(num + 5, max(height // 3, 5))
    if width < _TWO_COLUMNS:
        return _narrow(view, width, height, min(num + 3, height // 2), cursor)
    rest = height - table
    bins = min(max(rest * 55 // 100, _FEWEST_BINS), rest)
    half, causes = width // 2, width * 36 // 100
    if width >= _THREE_COLUMNS:
        third = width // 3
        middle = [
            distribution(view, "ttft", third, bins),
            distribution(view, "tbt", third, bins),
            distribution(view, "e2e", width - 2 * third, bins),
        ]
    else:
        middle = [
            distribution(view, "ttft", half, bins),
            distribution(view, "tbt", width - half, bins),
        ]
    low = rest - bins
    bottom = (
        [
            breach_causes(view, causes, low),
            worst_requests(view, width - causes, low, cursor=cursor),
        ]
        if low >= 3
        else []
    )
    lines = [*objectives(view, width, table), *join_columns(middle)]
    return lines + (join_columns(bottom) if bottom else [])


def _narrow(view: EngineView, width: int, height: int, table: int, cursor: int) -> list[Line]:
    rest = height - table
    bins = rest // 2
    half = width // 2
    middle = join_columns(
        [distribution(view, "ttft", half, bins), distribution(view, "tbt", width - half, bins)]
    )
    return [
        *objectives(view, width, table),
        *middle,
        *worst_requests(view, width, rest - bins, cursor=cursor),
    ]
