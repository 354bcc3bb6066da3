"""Simultaneous readings of the wall clock, by which CUPTI stamps, and the monotonic clock."""

from __future__ import annotations

from typing import NamedTuple

from inferscope.probe import Clock

_READINGS = 3
"""Number of attempts; the shortest is used, because a thread can be interrupted in any of them."""


class Reading(NamedTuple):
    """One simultaneous reading of both clocks."""

    host_ns: int
    real_ns: int
    error_ns: int
    """Largest possible distance between the two readings, in nanoseconds."""


def read_both(clock: Clock) -> Reading:
    """Read the wall clock between two monotonic readings and return the closest of three tries."""
    readings = []
    for _ in range(_READINGS):
        before_ns = clock.monotonic_ns()
        real_ns = clock.real_ns()
        readings.append((clock.monotonic_ns() - before_ns, before_ns, real_ns))
    lasted_ns, before_ns, real_ns = min(readings)
    return Reading(before_ns + lasted_ns // 2, real_ns, (lasted_ns + 1) // 2)
