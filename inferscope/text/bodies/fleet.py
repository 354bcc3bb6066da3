"""Body of the fleet screen: all engines, and ranks and latency causes of the selected one."""

from __future__ import annotations

from inferscope.fold import Snapshot
from inferscope.text.lines import Line, join_columns
from inferscope.text.panels.causes import causes
from inferscope.text.panels.fleet import fleet
from inferscope.text.panels.ranks import ranks

_TWO_COLUMNS = 100
_FEWEST_ROWS = 5


def fleet_body(snapshot: Snapshot, width: int, height: int, *, cursor: int) -> list[Line]:
    """Return the table, and below it the selected engine in more detail where there is room."""
    views = snapshot.engines
    least = height - (14 if width >= _TWO_COLUMNS else 9)
    table = min(max(len(views) + 3, min(2 * len(views) + 3, least)), height)
    low = height - table
    if low < _FEWEST_ROWS or not views:
        return fleet(snapshot, width, height, cursor=cursor)
    view = views[min(cursor, len(views) - 1)]
    lines = fleet(snapshot, width, table, cursor=cursor)
    if width < _TWO_COLUMNS:
        return lines + ranks(view, width, low)
    half = width // 2
    return lines + join_columns([ranks(view, half, low), causes(view, width - half, low)])
