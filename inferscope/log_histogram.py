"""Histogram of durations with logarithmic bins of 1 %: bounded memory, any number of durations.

    bin = floor(100 · ln(duration / 10 µs))

Counts of several histograms add up; quantiles come from the counts and never from other quantiles.
"""

from __future__ import annotations

import math
from collections import defaultdict

BINS_PER_E = 100
EDGE_NS = 1e4
"""Lower edge of bin 0 in ns."""
LOWEST_NS = 1_000
"""Duration in ns as which shorter ones count."""


class LogHistogram:
    """Distribution of durations: quantiles are off by at most 0.5 %.

    Attributes:
        bins: number of durations by bin.
        num: number of durations.
        sum_ns: exact sum.
        longest_ns: exact maximum; no quantile is above it.
    """

    __slots__ = ("bins", "longest_ns", "num", "sum_ns")

    def __init__(self) -> None:
        """Start empty."""
        self.bins: defaultdict[int, int] = defaultdict(int)
        self.num = 0
        self.sum_ns = 0
        self.longest_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        above = max(duration_ns, LOWEST_NS) / EDGE_NS
        self.bins[math.floor(math.log(above) * BINS_PER_E)] += 1
        self.num += 1
        self.sum_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)

    def merge(self, other: LogHistogram) -> None:
        """Add the counts of another histogram."""
        for number, num in other.bins.items():
            self.bins[number] += num
        self.num += other.num
        self.sum_ns += other.sum_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)

    @property
    def mean_ns(self) -> float | None:
        """Return the mean; None without durations."""
        return self.sum_ns / self.num if self.num else None

    def quantile_ns(self, share: float) -> int | None:
        """Return the duration that this share of all does not exceed; None without durations."""
        rank, reached = share * self.num, 0
        for number in sorted(self.bins):
            reached += self.bins[number]
            if reached >= rank:
                middle_ns = EDGE_NS * math.exp((number + 0.5) / BINS_PER_E)
                return min(self.longest_ns, round(middle_ns))
        return None

    def percentiles_ns(self) -> tuple[int | None, int | None, int | None]:
        """Return median, 95th and 99th percentile; None without durations."""
        return self.quantile_ns(0.50), self.quantile_ns(0.95), self.quantile_ns(0.99)
