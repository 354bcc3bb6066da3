"""Counting of many durations at once."""

from __future__ import annotations

from operator import mul

import numpy as np

from inferscope.log_histogram import BINS_PER_E, EDGE_NS, LOWEST_NS, LogHistogram

_FEW = 32
"""Number of durations up to which adding them to bins one by one is faster."""


def add_durations(histogram: LogHistogram, durations_ns: list[int], nums: list[int]) -> None:
    """Count durations, each as often as `nums` says."""
    if not nums:
        return
    above = np.maximum(np.array(durations_ns, dtype=np.float64), LOWEST_NS) / EDGE_NS
    numbers = np.floor(np.log(above) * BINS_PER_E).astype(np.int64)
    bins = histogram.bins
    if len(nums) > _FEW:
        first = int(numbers.min())
        counts = np.bincount(numbers - first, weights=nums)
        numbers = counts.nonzero()[0]
        for number, count in zip(numbers.tolist(), counts[numbers].tolist(), strict=True):
            bins[first + number] += int(count)
    else:
        for number, num in zip(numbers.tolist(), nums, strict=True):
            bins[number] += num
    histogram.num += sum(nums)
    histogram.sum_ns += sum(map(mul, durations_ns, nums))
    histogram.longest_ns = max(histogram.longest_ns, *durations_ns)
