"""Common workload of two recordings: the same requests, or else the same lengths.

If both sides have requests of the same names, as two runs of a load with one seed and one run name
have, then these are compared, each with itself: what differs between requests cancels out.

Otherwise both sides are weighted to the same shares of prompt and output lengths:

    output  ▲ ┌────┬────┬────┐      strata: lengths of both sides, cut at common quantiles
            │ │    │    │    │
            │ ├────┼────┼────┤      weight of a stratum: 1 / (1 / share of A + 1 / share of B)
            │ │    │    │    │
            └─┴────┴────┴────┴──► prompt

The harmonic form gives little weight to a stratum that is rare on one side, which knows little of
it (F. Li, K. L. Morgan, A. M. Zaslavsky, "Balancing Covariates via Propensity Score Weighting",
JASA 113, 2018).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferscope.insight.compare.columns import Columns, Floats

Ints = NDArray[np.int64]

_REQUESTS_PER_STRATUM = 12
_MOST_CUTS = 5
_LEAST_PAIRED = 0.9
"""Share of each side's requests that both sides have by name, if they are to be paired."""


@dataclass(frozen=True)
class Placing:
    """Requests of one side in the common workload.

    Attributes:
        stratum: [requests], stratum of each request.
        position: [requests], arrival within the recording, 0 to 1.
    """

    stratum: Ints
    position: Floats


@dataclass(frozen=True)
class CommonWorkload:
    """Common workload of two sides.

    Attributes:
        a: requests of A; `b` likewise.
        share: [strata], common share of each; 0 where a side has no request of it.
        overlap: sum of the lesser shares of both sides; 1 for equal workloads.
        num_paired: number of requests that both sides have by name; 0 if they are not paired.
    """

    a: Placing
    b: Placing
    share: Floats
    overlap: float
    num_paired: int = 0


def common_workload(a: Columns, b: Columns) -> CommonWorkload:
    """Return the common workload of two sides that both have complete requests."""
    return _paired(a, b) or _stratified(a, b)


def _paired(a: Columns, b: Columns) -> CommonWorkload | None:
    """Pair requests by name; return None if too few have one that both sides have once."""
    place_a, place_b = _place_by_name(a), _place_by_name(b)
    names = sorted(place_a.keys() & place_b.keys())
    num = max(int(each.is_complete.sum()) for each in (a, b))
    if len(names) < _LEAST_PAIRED * num:
        return None
    at_a, at_b = (np.array([place[name] for name in names]) for place in (place_a, place_b))
    lengths_a, lengths_b = a.facts["prompt_tokens"][at_a], b.facts["prompt_tokens"][at_b]
    if (lengths_a == lengths_b).mean() < _LEAST_PAIRED:
        return None
    position_a, position_b = _position(a), _position(b)
    position_a[at_a] = position_b[at_b] = (position_a[at_a] + position_b[at_b]) / 2
    # All pairs are one stratum, of the whole weight; the other requests are another, of none.
    stratum_a, stratum_b = (np.ones(len(each.names), dtype=np.int64) for each in (a, b))
    stratum_a[at_a] = stratum_b[at_b] = 0
    return CommonWorkload(
        Placing(stratum_a, position_a),
        Placing(stratum_b, position_b),
        np.array([1.0, 0.0]),
        len(names) / num,
        len(names),
    )


def _place_by_name(of: Columns) -> dict[str, int]:
    """Return the index of each complete request whose name no other one has."""
    times = Counter(of.names)
    return {
        name: idx
        for idx, name in enumerate(of.names)
        if name and of.is_complete[idx] and times[name] == 1
    }


def _position(of: Columns) -> Floats:
    at_ns = of.facts["arrived_ns"] - of.facts["arrived_ns"].min()
    position: Floats = at_ns / max(float(at_ns.max()), 1.0)
    return position


def _stratified(a: Columns, b: Columns) -> CommonWorkload:
    """Return strata of length; the more requests, the finer."""
    fewest = min(int(each.is_complete.sum()) for each in (a, b))
    num = min(_MOST_CUTS, max(1, int((fewest / _REQUESTS_PER_STRATUM) ** 0.5)))
    stratum_a, stratum_b = (np.zeros(len(each.names), dtype=np.int64) for each in (a, b))
    for name in ("prompt_tokens", "output_tokens"):
        cuts = _cuts(a, b, name, num)
        stratum_a = stratum_a * num + np.searchsorted(cuts, a.facts[name])
        stratum_b = stratum_b * num + np.searchsorted(cuts, b.facts[name])
    share_a, share_b = (
        _shares(of, stratum, num * num) for of, stratum in ((a, stratum_a), (b, stratum_b))
    )
    both = share_a * share_b
    common = np.divide(both, share_a + share_b, out=np.zeros_like(both), where=both > 0)
    if common.any():
        common /= common.sum()
    return CommonWorkload(
        Placing(stratum_a, _position(a)),
        Placing(stratum_b, _position(b)),
        common,
        float(np.minimum(share_a, share_b).sum()),
    )


def _cuts(a: Columns, b: Columns, name: str, num: int) -> Floats:
    """Return the lengths that divide both sides together, each counted as a whole, evenly."""
    lengths = [each.facts[name][each.is_complete > 0] for each in (a, b)]
    values = np.concatenate(lengths)
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in lengths])
    order = np.argsort(values, kind="stable")
    reached = weights[order].cumsum() / 2
    at = np.searchsorted(reached, np.arange(1, num) / num - 1e-9)
    cuts: Floats = values[order][at]
    return cuts


def _shares(of: Columns, stratum: Ints, num: int) -> Floats:
    counts = np.bincount(stratum, weights=of.is_complete, minlength=num).astype(np.float64)
    return counts / float(counts.sum())
