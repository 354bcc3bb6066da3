"""Statistics of paired benchmarks: stretches with and without a feature, measured alternately.

Other load affects both halves of a pair alike, so the results are ratios instead of differences,
with an interval from resampled pairs (bootstrap).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_NUM_RESAMPLES = 2000
_PAIRS_PER_TAIL = 10


class Pair(NamedTuple):
    """Nanoseconds of steps with the feature, and of as many without."""

    on: list[int]
    off: list[int]


def p99(values: list[int]) -> float:
    """Return the 99th percentile."""
    return float(sorted(values)[min(len(values) - 1, int(0.99 * len(values)))])


def mean_ratio(pairs: list[Pair]) -> float:
    """Return the median over pairs of the mean step on ÷ off."""
    return statistics.median(sum(pair.on) / sum(pair.off) for pair in pairs)


def p99_ratio(pairs: list[Pair]) -> float:
    """Return the 99th percentile of all steps on ÷ that of all steps off."""
    on = [ns for pair in pairs for ns in pair.on]
    off = [ns for pair in pairs for ns in pair.off]
    return p99(on) / p99(off)


def grouped(pairs: list[Pair]) -> list[Pair]:
    """Join consecutive pairs: enough steps for a tail, few enough for equal conditions."""
    joined = []
    for first in range(0, len(pairs) - _PAIRS_PER_TAIL + 1, _PAIRS_PER_TAIL):
        group = pairs[first : first + _PAIRS_PER_TAIL]
        on = [ns for pair in group for ns in pair.on]
        off = [ns for pair in group for ns in pair.off]
        joined.append(Pair(on, off))
    return joined


def tail_ratio(groups: list[Pair]) -> float:
    """Return the median over groups of the 99th percentile on ÷ off."""
    return statistics.median(p99(group.on) / p99(group.off) for group in groups)


def interval(measured: list[T], ratio: Callable[[list[T]], float]) -> list[float]:
    """Return a ratio minus one, and the ends of its 95 % bootstrap interval."""
    draw = random.Random(0)
    drawn = sorted(ratio(draw.choices(measured, k=len(measured))) for _ in range(_NUM_RESAMPLES))
    ends = drawn[int(0.025 * _NUM_RESAMPLES)], drawn[int(0.975 * _NUM_RESAMPLES)]
    return [ratio(measured) - 1, ends[0] - 1, ends[1] - 1]
