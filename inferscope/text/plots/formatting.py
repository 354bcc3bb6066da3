"""Formatting of numbers on the screen: fixed precision, so that columns do not move.

Unknown is `-`, never 0. Nanoseconds become milliseconds here and nowhere earlier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

UNKNOWN = "-"
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


def milliseconds(value_ns: float | None, *, width: int = 9) -> str:
    """Return milliseconds with one decimal, or none if that would not fit `width`."""
    if value_ns is None:
        return UNKNOWN
    text = f"{value_ns / _NS_PER_MS:.1f}"
    return text if len(text) <= width else f"{value_ns / _NS_PER_MS:.0f}"


def seconds(value_ns: float | None) -> str:
    """Return seconds with two decimals below 10 s, then one."""
    if value_ns is None:
        return UNKNOWN
    value_s = value_ns / _NS_PER_S
    return f"{value_s:.2f}" if abs(value_s) < 9.995 else f"{value_s:.1f}"


def duration(value_ns: float | None) -> str:
    """Return a duration with a fitting unit: `850 µs`, `38.2 ms`, `2.9 s`, `3m12s`, `2h05m`."""
    if value_ns is None:
        return UNKNOWN
    if value_ns < 999_500:
        return f"{value_ns / 1000:.0f} µs"
    if value_ns < 999_950_000:
        return f"{value_ns / _NS_PER_MS:.1f} ms"
    value_s = value_ns / _NS_PER_S
    if value_s < 59.95:
        return f"{value_s:.1f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes}m{rest_s:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"


def count(value: float | None) -> str:
    """Return a count in at most five characters: `99999`, `512k`, `1.21M`."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if abs(value) < 99_999.5 else _scaled(value)


def per_second(value: float | None) -> str:
    """Return a rate in three digits: `0.31`, `10.1`, `512`, `3.37k`, `14.2k`, `1.21M`."""
    if value is None:
        return UNKNOWN
    if abs(value) < 9.995:
        return f"{value:.2f}"
    if abs(value) < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if abs(value) < 999.5 else _scaled(value)


def share(value: float | None) -> str:
    """Return a share (0..1) as percent with one decimal."""
    return UNKNOWN if value is None else f"{100 * value:.1f}%"


def clock(real_ns: int) -> str:
    """Return a wall time as local `14:02:07`; 0 is unknown."""
    if real_ns <= 0:
        return UNKNOWN
    return time.strftime("%H:%M:%S", time.localtime(real_ns // _NS_PER_S))


def moment(real_ns: int) -> str:
    """Return a wall time as `clock` does, with its date if it is not today's."""
    if real_ns <= 0:
        return UNKNOWN
    day = time.localtime(real_ns // _NS_PER_S)
    is_today = day[:3] == time.localtime()[:3]
    return clock(real_ns) if is_today else time.strftime("%Y-%m-%d %H:%M:%S", day)


def closed(values: Sequence[float], total: int) -> list[int]:
    """Round values in proportion to integers that sum to `total` (largest remainder).

    To make printed rows add up to the printed sum, pass the sum in units of the last digit.
    """
    whole = sum(values)
    if whole <= 0:
        return [0] * len(values)
    exact = [value * total / whole for value in values]
    floors = [int(value) for value in exact]
    missing = total - sum(floors)
    order = sorted(range(len(values)), key=lambda i: floors[i] - exact[i])
    for i in order[:missing]:
        floors[i] += 1
    return floors


def _scaled(value: float) -> str:
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = value / factor
        if abs(scaled) < 999.5 or unit == "G":
            break
    if abs(scaled) < 9.995:
        return f"{scaled:.2f}{unit}"
    return f"{scaled:.1f}{unit}" if abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
