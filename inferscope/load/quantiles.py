"""Percentiles of durations in bounded memory, for any length of load."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

_BINS_PER_E = 100
_LOWEST_NS = 1_000
_PERCENTILES = (0.50, 0.95, 0.99)


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """Percentiles of a duration; None without measurements."""

    num: int
    """Number of durations."""
    p50_ns: int | None = None
    """Median."""
    p95_ns: int | None = None
    """95th percentile."""
    p99_ns: int | None = None
    """99th percentile."""
    max_ns: int | None = None
    """Longest duration."""


class LatencySamples:
    """Histogram of durations in logarithmic bins of 1 %.

    Percentiles are off by at most 0.5 %; the maximum is exact, and none is above it. Durations
    below a microsecond count as one.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._bins: Counter[int] = Counter()
        self.num = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        self._bins[round(math.log(max(duration_ns, _LOWEST_NS)) * _BINS_PER_E)] += 1
        self.num += 1
        self.max_ns = max(self.max_ns, duration_ns)

    def at(self, share: float) -> float | None:
        """Return the duration in ns that this share of all does not exceed."""
        if not self.num:
            return None
        rank = math.ceil(share * self.num)
        for bin_idx in sorted(self._bins):
            rank -= self._bins[bin_idx]
            if rank <= 0:
                break
        return min(math.exp(bin_idx / _BINS_PER_E), float(self.max_ns))

    def quantiles(self) -> LatencyQuantiles:
        """Return the printed percentiles."""
        p50_ns, p95_ns, p99_ns = (
            None if (found_ns := self.at(share)) is None else round(found_ns)
            for share in _PERCENTILES
        )
        return LatencyQuantiles(self.num, p50_ns, p95_ns, p99_ns, self.max_ns if self.num else None)
