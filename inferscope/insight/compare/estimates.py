"""Values of a measure over weighted resamples of requests.

Requests fall into groups, and all requests of a group count with the same weight. A resample is a
weight for each group, so that its values need the sums of the groups only:

    value of a resample = weights · sums of the numerator / weights · sums of the denominator

Percentiles come in the same way from a histogram of each group. Its bins are the values themselves,
or, of many values, some of them: more and more densely towards the largest, since those are rare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import Metric
from inferscope.insight.compare.columns import Columns, Floats, Values
from inferscope.insight.compare.measures import Measure

_MOST_BINS = 2048
"""Number of bins of a histogram; at the 99th percentile, a bin then has 0.01 % of the values."""


@dataclass(frozen=True)
class Resamples:
    """Weights of the requests of one side, by resample; the first is the side itself.

    Attributes:
        group: [requests], group of each request.
        drawn: [resamples, groups], how often the requests of a group count.
        matched: [resamples, groups], the same, weighted to the workload of both sides.
        span_ns: [resamples], time that the requests arrived in.
    """

    group: NDArray[np.int64]
    drawn: Floats
    matched: Floats
    span_ns: Floats
    _histograms: dict[Metric, _Histogram] = field(default_factory=dict)

    def histogram(self, metric: Metric, of: Columns) -> _Histogram:
        """Return the histograms of a latency, which all its percentiles share."""
        if metric not in self._histograms:
            self._histograms[metric] = _Histogram(of.latencies[metric], self.group, self.matched)
        return self._histograms[metric]


def unweighted(of: Columns) -> Resamples:
    """Return the one resample that holds each request once."""
    arrived_ns, delivered_ns = of.facts["arrived_ns"], of.facts["delivered_ns"]
    span_ns = delivered_ns.max() - arrived_ns.min() if len(arrived_ns) else 0.0
    one = np.ones((1, 1))
    return Resamples(np.zeros(len(arrived_ns), dtype=np.int64), one, one, np.array([span_ns]))


def estimates(measure: Measure, of: Columns, resamples: Resamples) -> Floats:
    """Return the value of a measure by resample; NaN where it is unknown."""
    if measure.metric is not None:
        return resamples.histogram(measure.metric, of).percentiles(measure.percent / 100)
    assert measure.total is not None
    return _ratio(measure.total, measure, of, resamples)


def split_value(measure: Measure, of: Columns, resamples: Resamples) -> float:
    """Return the time that the cost model divided into a measure and others; 0 for others."""
    if measure.split is None:
        return 0.0
    return _ratio(measure.split, measure, of, resamples).item(0)


def _ratio(
    numerator: Callable[[Columns], Floats], measure: Measure, of: Columns, resamples: Resamples
) -> Floats:
    weights = resamples.matched if measure.is_matched else resamples.drawn
    total = weights @ _sums(numerator(of), resamples.group, weights.shape[1])
    if measure.per is None:
        below = resamples.span_ns / 1e9
    else:
        below = weights @ _sums(measure.per(of), resamples.group, weights.shape[1])
    return np.divide(total, below, out=np.full_like(total, np.nan), where=below > 0)


def _sums(values: Floats, group: NDArray[np.int64], num_groups: int) -> Floats:
    return np.bincount(group, weights=values, minlength=num_groups).astype(np.float64)


class _Histogram:
    """Histograms of the values of a latency, one for each resample."""

    def __init__(self, values: Values, group: NDArray[np.int64], weights: Floats) -> None:
        self._bins, bin_idx = _bins(values.ns)
        num_bins = len(self._bins)
        cell = group[values.owner] * num_bins + bin_idx
        counts = np.bincount(cell, minlength=weights.shape[1] * num_bins)
        self._mass = weights @ counts.reshape(weights.shape[1], num_bins).astype(np.float64)

    def percentiles(self, share: float) -> Floats:
        """Return the value below which a share of the weight lies, by resample."""
        # A value stands in the middle of its own weight.
        middle = self._mass.cumsum(axis=1) - self._mass / 2
        whole = self._mass.sum(axis=1)
        found = np.full(len(whole), np.nan)
        for idx in np.flatnonzero(whole > 0):
            has = self._mass[idx] > 0
            found[idx] = np.interp(share * whole[idx], middle[idx, has], self._bins[has])
        return found


def _bins(ns: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the values of the bins, and the index of each value's bin."""
    bins, bin_idx = np.unique(ns, return_inverse=True)
    if len(bins) <= _MOST_BINS:
        return bins, bin_idx
    ordered = np.sort(ns)
    above = np.linspace(1, 0, _MOST_BINS) ** 2  # share of the values that are larger
    bins = np.unique(ordered[((1 - above) * (len(ordered) - 1)).round().astype(np.int64)])
    return bins, np.minimum(np.searchsorted(bins, ns), len(bins) - 1)
