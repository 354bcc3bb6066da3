"""Pacing of a load that must not exceed its server: slower while requests queue, then faster.

A measured rate is too high as soon as something else runs on the machine; an open loop would then
only show a queue. The demo slows its schedule down instead. `inferscope load` does not: its
measurements must not depend on the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from inferscope.load.workload import PlannedRequest

INTERVAL_S = 1.0
"""Seconds between two calls of `observe`."""
_LEAST = 0.05
_SMOOTHING = 0.4
_LONG, _SHORT = 3.0, 1.0
"""Smoothed numbers of waiting requests: above the first the pace falls, below the second it rises.
"""
_FULL = 12
"""Number of waiting requests at which the pace falls further at once."""
_SLOWER, _MUCH_SLOWER, _FASTER = 0.8, 0.5, 1.08
_LATE_S = 1.0
"""Lateness in seconds that only a pause of the process explains."""


class Pacing:
    """Factor of a load's rate, controlled by the number of waiting requests.

    Attributes:
        pace: seconds of the schedule per second, at most 1.
    """

    def __init__(self, pace: float = 1.0) -> None:
        """Start at a pace."""
        self.pace = min(1.0, max(_LEAST, pace))
        self._waiting = 0.0

    def observe(self, num_waiting: int) -> None:
        """Update the pace by the number of waiting requests; call it every `INTERVAL_S`."""
        before = self._waiting
        self._waiting += _SMOOTHING * (num_waiting - self._waiting)
        if num_waiting >= _FULL and self._waiting >= before:
            self.pace *= _MUCH_SLOWER
        elif self._waiting > _LONG and num_waiting >= before:
            self.pace *= _SLOWER
        elif self._waiting < _SHORT:
            self.pace *= _FASTER
        self.pace = min(1.0, max(_LEAST, self.pace))


def from_now_on(
    asks: Iterable[PlannedRequest], *, clock_s: Callable[[], float] = time.monotonic
) -> Iterator[PlannedRequest]:
    """Yield requests with times shifted past any pause of the process.

    Without it all requests of a pause (a laptop that slept, a stopped process) would be sent at
    once.
    """
    began_s, shift_s = clock_s(), 0.0
    for ask in asks:
        late_s = clock_s() - began_s - ask.at_s - shift_s
        if late_s > _LATE_S:
            shift_s += late_s
        yield replace(ask, at_s=ask.at_s + shift_s)
