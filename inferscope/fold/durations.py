"""Counting of many durations at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.log_histogram import BINS_PER_E, EDGE_NS, LOWEST_NS, LogHistogram


def add_durations(histogram: LogHistogram, durations_ns: NDArray[np.int64]) -> None:
    """Count durations."""
    if not len(durations_ns):
        return
    above = np.maximum(durations_ns, LOWEST_NS) / EDGE_NS
    numbers = np.floor(np.log(above) * BINS_PER_E).astype(np.int64)
    first = int(numbers.min())  # below 0 for durations that are shorter than the edge
    counts = np.bincount(numbers - first)
    found = counts.nonzero()[0]
    for number, count in zip(found.tolist(), counts[found].tolist(), strict=True):
        histogram.bins[first + number] += count
    histogram.num += len(durations_ns)
    histogram.sum_ns += int(durations_ns.sum())
    histogram.longest_ns = max(histogram.longest_ns, int(durations_ns.max()))
