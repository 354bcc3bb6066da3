"""Body of the timeline screen as it opens: the newest steps as lanes, and as a table."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line
from inferscope.text.panels.lanes import Sight, lanes, newest_ns
from inferscope.text.panels.steps import client_names, order_steps, step_table

SPAN_NS = 500_000_000
"""Time of the lanes at first."""
_FRAMED = 100
_LANES, _FEW_LANES = 22, 13


def timeline_body(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the lanes up to the newest step, which is selected, above the newest steps."""
    names, until_ns = client_names(view), newest_ns(view)
    upper = _LANES if width >= _FRAMED else _FEW_LANES
    shown = order_steps(view.steps, "time", height - upper)
    selected = shown[0] if shown else None
    sight = Sight(until_ns - SPAN_NS, until_ns)
    return [
        *lanes(view, width, upper, sight=sight, selected=selected, names=names),
        *step_table(
            view, width, height - upper, shown=shown, selected=selected, sort="time", names=names
        ),
    ]
