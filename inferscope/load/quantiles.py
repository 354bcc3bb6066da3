"""Percentiles of durations in bounded memory, however long a load runs."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

_BINS_PER_E = 100
_LOWEST_NS = 1_000


class Quantiles(msgspec.Struct, frozen=True):
    """Some percentiles, in milliseconds; None where there was nothing to measure."""

    num: int
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


class Durations:
    """Durations in logarithmic bins of 1 %.

    Percentiles are off by 0.5 % at most; the maximum is exact, and none is above it. What is
    shorter than a microsecond counts as one.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._bins: Counter[int] = Counter()
        self.num = 0
        self.max_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        self._bins[round(math.log(max(duration_ns, _LOWEST_NS)) * _BINS_PER_E)] += 1
        self.num += 1
        self.max_ns = max(self.max_ns, duration_ns)

    def at(self, share: float) -> float | None:
        """Return the duration, in nanoseconds, that this share of all does not exceed."""
        if not self.num:
            return None
        rank = math.ceil(share * self.num)
        for bin_idx in sorted(self._bins):
            rank -= self._bins[bin_idx]
            if rank <= 0:
                break
        return min(math.exp(bin_idx / _BINS_PER_E), float(self.max_ns))

    def quantiles(self) -> Quantiles:
        """Return what is printed of them."""
        return Quantiles(
            self.num,
            _ms(self.at(0.50)),
            _ms(self.at(0.95)),
            _ms(self.at(0.99)),
            _ms(self.max_ns if self.num else None),
        )


def _ms(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / 1e6, 3)
