"""Body of the engine screen: KV pool, queue, reuse, configuration, devices, probe."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line, join_columns
from inferscope.text.panels.machine import configuration, devices, probe_health
from inferscope.text.panels.pool import kv_pool
from inferscope.text.panels.queue import queue_and_batch
from inferscope.text.panels.reuse import reuse

_TWO_COLUMNS = 100
_REUSE = 8
_CONFIGURATION = 13
_PROBE = 7


def engine_body(
    view: EngineView, width: int, height: int, *, shows_facts: bool = False
) -> list[Line]:
    """Return charts at the left and facts at the right, or one of both where it is narrow."""
    if width < _TWO_COLUMNS and shows_facts:
        half = width // 2
        low = min(_PROBE, height // 2)
        return [
            *join_columns(
                [
                    configuration(view, half, height - low),
                    devices(view, width - half, height - low),
                ]
            ),
            *probe_health(view, width, low),
        ]
    if width < _TWO_COLUMNS:
        low = min(_REUSE, max(height // 3, 3))
        upper = (height - low + 1) // 2
        return [
            *kv_pool(view, width, upper),
            *queue_and_batch(view, width, height - low - upper),
            *reuse(view, width, low),
        ]
    left = width * 62 // 100
    right = width - left
    low = min(_REUSE, max(height // 4, 3))
    upper = (height - low) // 2
    first = min(_CONFIGURATION, height // 3 + 1)
    second = (height - first) // 2
    return join_columns(
        [
            [
                *kv_pool(view, left, upper),
                *queue_and_batch(view, left, height - low - upper),
                *reuse(view, left, low),
            ],
            [
                *configuration(view, right, first),
                *devices(view, right, second),
                *probe_health(view, right, height - first - second),
            ],
        ]
    )
