"""Distribution of any number of durations in bounded memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_BINS_PER_E = 100
_LOWEST_NS = 1_000
_NUM_BINS = 2_100
"""Number of bins, up to 1,300 s; longer durations count there, but exactly in sum and maximum."""


class Durations:
    """Histogram with logarithmic 1 % bins: quantiles are off by at most 0.5 %.

    Attributes:
        num: number of durations.
        sum_ns: exact sum.
        longest_ns: exact maximum.
    """

    def __init__(self) -> None:
        self._bins = np.zeros(_NUM_BINS, dtype=np.int64)
        self.num = 0
        self.sum_ns = 0
        self.longest_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        at = math.log(max(duration_ns, _LOWEST_NS) / _LOWEST_NS) * _BINS_PER_E
        self._bins[min(int(at), _NUM_BINS - 1)] += 1
        self.num += 1
        self.sum_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)

    def add_all(self, durations_ns: Ints) -> None:
        """Count an array of durations."""
        if not len(durations_ns):
            return
        at = np.log(np.maximum(durations_ns, _LOWEST_NS) / _LOWEST_NS) * _BINS_PER_E
        bins = np.minimum(at.astype(np.int64), _NUM_BINS - 1)
        self._bins += np.bincount(bins, minlength=_NUM_BINS)
        self.num += len(durations_ns)
        self.sum_ns += int(durations_ns.sum())
        self.longest_ns = max(self.longest_ns, int(durations_ns.max()))

    @property
    def mean_ns(self) -> float | None:
        """Return the mean; None without durations."""
        return self.sum_ns / self.num if self.num else None

    def quantile_ns(self, share: float) -> float | None:
        """Return the duration that this share of all does not exceed; None without durations."""
        if not self.num:
            return None
        reached = np.cumsum(self._bins)
        at = int(np.searchsorted(reached, max(1, math.ceil(share * self.num))))
        middle_ns = _LOWEST_NS * math.exp((at + 0.5) / _BINS_PER_E)
        return min(float(self.longest_ns), middle_ns)
