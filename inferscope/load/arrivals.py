"""Arrival times: independent random arrivals, and bursts on top.

Times are seconds after the start of the load, ordered, unlimited, and known before anything is
sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random


def poisson(random: Random, rate_s: float) -> Iterator[float]:
    """Yield times with independent exponential gaps, `rate_s` of them a second."""
    at_s = 0.0
    while True:
        at_s += random.expovariate(rate_s)
        yield at_s


def bursts(num: int, every_s: float) -> Iterator[float]:
    """Yield the same time `num` times, once in every period, in the middle of it.

    In the middle, a run of three periods has three whole bursts.
    """
    for period in itertools.count():
        yield from itertools.repeat((period + 0.5) * every_s, num)
