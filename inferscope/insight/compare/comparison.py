"""Rows of a comparison: a measure of both sides, their difference, its interval and a verdict.

    runs of A:  a1  a2  a3 …      value of a side = mean over its runs
    runs of B:  b1  b2  b3 …      difference      = mean of b1 - a1, b2 - a2, …

Run i of both sides served the same requests. A row differs if its interval excludes zero. The rows
of the verdict have wider intervals: over all of them at most 5 % of comparisons of equal sides find
a difference (Bonferroni). The other rows explain; of twenty of them one may differ by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

import msgspec

from inferscope.fold import FinalRequest
from inferscope.insight.compare.intervals import fewest_pairs, paired_interval
from inferscope.insight.compare.measures import (
    HEADLINES,
    Limits,
    Measure,
    common_limits,
    complete,
    measures,
)

_LEVEL = 0.95
HEADLINE_LEVEL = 1 - (1 - _LEVEL) / len(HEADLINES)
"""Level of the intervals of the rows that the verdict is about."""
Verdict = Literal["lower", "higher", "no difference shown"]
NO_DIFFERENCE: Verdict = "no difference shown"


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of both sides."""

    name: str
    """Name of the measure: a latency with its percentile, a rate, a phase, or a ledger's cause."""
    unit: str
    """Unit of all numbers of the row: ns, requests/s, tok/s, or share."""
    group: str
    """latency, load, phase (device time per request) or ledger (time per request, by cause)."""
    is_headline: bool
    """Whether the verdict is about this row; its interval is then wider."""
    a: float
    """Mean over the runs of A."""
    b: float
    """Mean over the runs of B."""
    difference: float
    """B minus A."""
    low: float
    """Lower end of the difference's interval."""
    high: float
    """Upper end of the difference's interval."""
    level: float
    """Share of such intervals that hold the true difference."""
    num_pairs: int
    """Number of pairs of runs in which both sides have the measure."""
    verdict: Verdict
    """B compared with A: lower or higher if the interval excludes zero."""

    @property
    def share(self) -> float | None:
        """Return the difference as a share of A; None if A is zero."""
        return self.difference / self.a if self.a else None


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
    finished = [request for run in (*kept_a, *kept_b) for request in run]
    if not finished:
        raise ValueError("no request has finished")
    limits = common_limits(finished)
    rows = (_row(measure, kept_a, kept_b) for measure in measures(limits))
    num_a = sum(map(len, kept_a))
    return Comparison(
        rows=tuple(row for row in rows if row is not None and (row.a or row.b)),
        limits=limits,
        num_a=num_a,
        num_b=len(finished) - num_a,
        num_left_out=sum(map(len, runs_a)) + sum(map(len, runs_b)) - len(finished),
    )


def _complete(runs: Sequence[Sequence[FinalRequest]]) -> list[list[FinalRequest]]:
    return [[request for request in run if complete(request)] for run in runs]


def _row(
    measure: Measure,
    runs_a: Sequence[Sequence[FinalRequest]],
    runs_b: Sequence[Sequence[FinalRequest]],
) -> ComparisonRow | None:
    """Return a measure's row; None if too few pairs of runs have it."""
    values = [(measure.of(a), measure.of(b)) for a, b in zip(runs_a, runs_b, strict=True)]
    pairs = [(a, b) for a, b in values if a is not None and b is not None]
    is_headline = measure.name in HEADLINES
    level = HEADLINE_LEVEL if is_headline else _LEVEL
    if len(pairs) < fewest_pairs(level):
        return None
    low, high = paired_interval([b - a for a, b in pairs], level=level)
    verdict: Verdict = "lower" if high < 0 else "higher" if low > 0 else NO_DIFFERENCE
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
        verdict=verdict,
    )
