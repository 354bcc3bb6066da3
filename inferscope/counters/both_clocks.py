"""The two clocks side by side: the wall's, that CUPTI stamps by, between two readings of ours."""

from __future__ import annotations

from typing import NamedTuple

from inferscope.probe.clock import Clock

_READINGS = 3
"""The best counts, for a thread may be interrupted in any."""


class Reading(NamedTuple):
    """Both clocks at one moment."""

    host_ns: int
    real_ns: int
    error_ns: int
    """How far apart the two may have been read."""


def read_both(clock: Clock) -> Reading:
    """Read the wall clock between two readings of ours, those that were closest together."""
    readings = []
    for _ in range(_READINGS):
        before_ns = clock.monotonic_ns()
        real_ns = clock.real_ns()
        readings.append((clock.monotonic_ns() - before_ns, before_ns, real_ns))
    lasted_ns, before_ns, real_ns = min(readings)
    return Reading(before_ns + lasted_ns // 2, real_ns, (lasted_ns + 1) // 2)
