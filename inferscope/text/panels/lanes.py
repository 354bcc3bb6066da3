"""Lanes over time: the device's phases, the scheduler and the KV cache, by second."""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.fold import EngineView
from inferscope.text.labels import format_window
from inferscope.text.lines import Line, Role, frame
from inferscope.text.plots import columns, count, fit, share

_NAME = 14
_VALUE = 9


def lanes(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the lanes of the window; shares are of the device's time in each second."""
    series = view.series
    idle = [
        max(0.0, 1 - prefill - decode)
        for prefill, decode in zip(series.prefill_share, series.decode_share, strict=True)
    ]
    chosen: list[tuple[str, Role, Sequence[float], float | None, str]] = [
        ("◆ prefill", "prefill", series.prefill_share, 1.0, _last(series.prefill_share)),
        ("● decode", "decode", series.decode_share, 1.0, _last(series.decode_share)),
        ("  neither", "bar", idle, 1.0, _last(idle)),
        ("  running", "bar", series.running, None, count(view.num_running)),
        ("  waiting", "bar", series.waiting, None, count(view.num_waiting)),
        ("  KV used", "bar", series.kv_share, 1.0, _last(series.kv_share)),
    ]
    room = max(width - 4 - _NAME - _VALUE, 1)
    rows = max((height - 3) // len(chosen), 1)
    lines: list[Line] = []
    for name, role, values, top, last in chosen:
        drawn = columns(values, room, max(rows - 1, 1), top=top)
        for at, text in enumerate(drawn):
            label = fit(name, _NAME) if at == len(drawn) - 1 else " " * _NAME
            value = fit(last, _VALUE, align="right") if at == len(drawn) - 1 else " " * _VALUE
            lines.append(((label, "body"), (text, role), (value, "strong")))
        if rows > 1:
            lines.append(())
    return frame("Timeline", lines, width, height, note=f"{format_window(view.window_ns)} to now")


def _last(values: Sequence[float]) -> str:
    return share(values[-1] if values else None)
