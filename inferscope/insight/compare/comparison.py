"""Rows of a comparison: a measure of both sides, their difference, its interval and a verdict.

    runs of A:  a1  a2  a3 …      value of a side = mean over its runs
    runs of B:  b1  b2  b3 …      difference      = mean of b1 - a1, b2 - a2, …

Run i of both sides served the same requests. A row differs if its interval excludes zero. The rows
of the verdict have wider intervals: over all of them at most 5 % of comparisons of equal sides find
a difference (Bonferroni). The other rows explain; of twenty of them one may differ by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from statistics import fmean
from typing import Literal

import msgspec

from inferscope.fold import FinalRequest
from inferscope.insight.compare.columns import Columns, columns_of, complete
from inferscope.insight.compare.estimates import Resamples, estimates, unweighted
from inferscope.insight.compare.intervals import fewest_pairs, paired_interval
from inferscope.insight.compare.measures import Group, Limits, Measure, common_limits, of_runs

HEADLINES = ("ttft_p50", "tbt_p50", "tbt_p99", "e2e_p50", "goodput")
"""Measures that the verdict is about."""
_LEVEL = 0.95
HEADLINE_LEVEL = 1 - (1 - _LEVEL) / len(HEADLINES)
"""Level of the intervals of the rows that the verdict is about."""
_Run = tuple[Columns, Resamples]
Verdict = Literal["lower", "higher", "no difference shown"]
NO_DIFFERENCE: Verdict = "no difference shown"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of both sides, with the interval of its difference."""

    name: str
    """Name of the measure: a latency with its percentile, a rate, a phase, or a ledger's cause."""
    unit: str
    """Unit of all numbers of the row: ns, requests/s, tok/s, tokens or share."""
    group: Group
    """latency, load, workload, phase (device time per request), or a ledger: time by cause, per
    request (ledger), up to its first token (ttft_ledger), per gap between tokens (tbt_ledger), or
    of each request's longest gap (longest_gap).
    """
    is_headline: bool
    """Whether the verdict is about this row; its interval is then wider."""
    a: float
    """Value of A; of several runs, their mean."""
    b: float
    """Value of B; of several runs, their mean."""
    difference: float
    """B minus A."""
    low: float
    """Lower end of the difference's interval."""
    high: float
    """Upper end of the difference's interval."""
    level: float
    """Share of such intervals that hold the true difference."""
    verdict: Verdict
    """B compared with A: lower or higher if the interval excludes zero."""

    @property
    def share(self) -> float | None:
        """Return the difference as a share of A; None if A is zero."""
        return self.difference / self.a if self.a else None


class ComparisonRow(Difference, frozen=True, kw_only=True):
    """One measure of both sides, over pairs of runs."""

    num_pairs: int
    """Number of pairs of runs in which both sides have the measure."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of two groups of runs."""

    rows: tuple[ComparisonRow, ...]
    """Measures that are not zero on both sides."""
    limits: Limits
    """Limits of the goodput."""
    num_a: int
    """Finished requests of A, over all runs."""
    num_b: int
    """Finished requests of B, over all runs."""
    num_left_out: int
    """Requests of both sides that failed or were not observed as a whole; no row counts them."""

    @property
    def headlines(self) -> tuple[ComparisonRow, ...]:
        """Return the rows that the verdict is about."""
        return tuple(row for row in self.rows if row.is_headline)


def compare(
    runs_a: Sequence[Sequence[FinalRequest]], runs_b: Sequence[Sequence[FinalRequest]]
) -> Comparison:
    """Compare two groups of runs; run i of both served the same load.

    Raises:
        ValueError: the groups differ in their number of runs, or no request has finished.
    """
    if len(runs_a) != len(runs_b):
        raise ValueError(f"{len(runs_a)} runs cannot be paired with {len(runs_b)}")
    kept_a, kept_b = _complete(runs_a), _complete(runs_b)
    num_a, num_b = (sum(map(len, runs)) for runs in (kept_a, kept_b))
    if not num_a + num_b:
        raise ValueError("no request has finished")
    sides = [[columns_of(run) for run in runs] for runs in (kept_a, kept_b)]
    limits = common_limits(*(of for side in sides for of in side))
    all_a, all_b = ([(of, unweighted(of)) for of in side] for side in sides)
    rows = (_row(measure, all_a, all_b) for measure in of_runs(limits))
    return Comparison(
        rows=tuple(row for row in rows if row is not None and (row.a or row.b)),
        limits=limits,
        num_a=num_a,
        num_b=num_b,
        num_left_out=sum(map(len, runs_a)) + sum(map(len, runs_b)) - num_a - num_b,
    )


def verdict_of(low: float, high: float) -> Verdict:
    """Return the verdict on an interval of B minus A."""
    return "lower" if high < 0 else "higher" if low > 0 else NO_DIFFERENCE


def _complete(runs: Sequence[Sequence[FinalRequest]]) -> list[list[FinalRequest]]:
    return [[request for request in run if complete(request)] for run in runs]


def _row(measure: Measure, runs_a: Sequence[_Run], runs_b: Sequence[_Run]) -> ComparisonRow | None:
    """Return a measure's row; None if too few pairs of runs have it."""
    values = [
        (estimates(measure, *a).item(0), estimates(measure, *b).item(0))
        for a, b in zip(runs_a, runs_b, strict=True)
    ]
    pairs = [pair for pair in values if not any(map(isnan, pair))]
    is_headline = measure.name in HEADLINES
    level = HEADLINE_LEVEL if is_headline else _LEVEL
    if len(pairs) < fewest_pairs(level):
        return None
    low, high = paired_interval([b - a for a, b in pairs], level=level)
    a, b = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
    return ComparisonRow(
        name=measure.name,
        unit=measure.unit,
        group=measure.group,
        is_headline=is_headline,
        a=a,
        b=b,
        difference=b - a,
        low=low,
        high=high,
        level=level,
        num_pairs=len(pairs),
        verdict=verdict_of(low, high),
    )
