"""Comparison of two recordings at the same workload.

    requests ──> common workload ──> weights ─┐
             └─> blocks of time ──> resamples ┴─> standard error ──> interval of B - A

The headlines decide the verdict. Their intervals are wide enough for all of them together
(Bonferroni): if the sides are equal, any headline differs in at most 1 - level of comparisons. The
limits of a gate are another such family. All other rows explain, each at the level itself, and
causes are named only for a headline that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isnan

import msgspec
import numpy as np

from inferscope.errors import BadInput
from inferscope.insight.compare.blocks import (
    FEWEST_BLOCKS,
    fewest_ns,
    num_blocks,
    resamples,
    span_ns,
)
from inferscope.insight.compare.change_limits import (
    ChangeLimit,
    LimitOutcome,
    known_measures,
    outcome_of,
)
from inferscope.insight.compare.columns import Columns
from inferscope.insight.compare.comparison import NO_DIFFERENCE, Difference, verdict_of
from inferscope.insight.compare.estimates import Resamples, estimates, split_value
from inferscope.insight.compare.intervals import Draws, recording_interval
from inferscope.insight.compare.measures import (
    Limits,
    Measure,
    common_limits,
    latencies,
    of_recordings,
)
from inferscope.insight.compare.workload import common_workload
from inferscope.records import cause_named

RECORDING_HEADLINES = (
    *("ttft_mean", "ttft_p90", "tbt_p50", "tbt_p99", "e2e_mean"),
    *("prefill", "decode", "failed"),
)
"""Measures that the verdict on two recordings is about: of few requests, a mean is known better
than a median, and the ledger sums to it."""
FEWEST_REQUESTS = 30
"""Requests that each side needs at least."""
_FEWEST_BEYOND = 5
"""Values that lie beyond a percentile at least; with fewer, a few requests would decide it."""
_LEAST_OVERLAP = 0.5
"""Share of the workload that both sides have at least."""
_MOST_OFF = 0.25
"""Largest difference of mean lengths that is left at the common workload."""
_MODEL_ERROR = 0.014
"""Standard error of a cause that a cost model divides from others, as a share of the time divided:
each recording fits a model of its own. Of 40 equal pairs of 15 s, the causes' differences had 0.1
to 2.6 % more spread than their blocks show (benchmarks/diff_truth.py); this is 2 % for a pair."""
_LEAST_CAUSE = 0.1
"""Difference of the least cause that is named, as a share of the largest."""
_LEDGER_OF = {
    "ttft_mean": "ttft_ledger",
    "ttft_p90": "ttft_ledger",
    "tbt_p50": "tbt_ledger",
    "tbt_p99": "longest_gap",
    "e2e_mean": "ledger",
}
"""Rows that explain each headline: those of a tail do not move with means over all gaps."""


class Explanation(msgspec.Struct, frozen=True):
    """Causes of a headline that differs."""

    headline: str
    """Name of the headline's row."""
    causes: tuple[str, ...]
    """Rows of its ledger that differ in the same direction, the largest difference first."""


class RecordingComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of two recordings."""

    rows: tuple[Difference, ...]
    """Measures that are not zero on both sides."""
    explanations: tuple[Explanation, ...]
    """Causes of each headline that differs."""
    too_few: tuple[str, ...]
    """Headlines without a row: fewer than 5 values lie beyond the percentile on a side."""
    outcomes: tuple[LimitOutcome, ...]
    """Outcomes of the limits, in the order of the command line."""
    limits: Limits
    """Limits of the goodput."""
    overlap_share: float
    """Share of the workload that both sides have: of requests by name, else by length."""
    num_paired: int
    """Requests that both sides have by name; 0 if they are matched by length."""
    is_comparable: bool
    """Whether the workloads are near enough for a verdict."""
    level: float
    """Share of comparisons of equal sides in which no headline differs, at least."""
    seed: int
    """Seed of the resamples."""

    @property
    def headlines(self) -> tuple[Difference, ...]:
        """Return the rows that the verdict is about."""
        return tuple(row for row in self.rows if row.is_headline)


class RecordingPair:
    """Two recordings at their common workload, and their resamples.

    Attributes:
        common: common workload.
    """

    def __init__(self, a: Columns, b: Columns, *, seed: int) -> None:
        """Resample both sides, which `check_enough` has accepted."""
        self.common = common = common_workload(a, b)
        blocks = [num_blocks(a), num_blocks(b)]
        if common.num_paired:
            blocks = [min(blocks)] * 2
        self._sides = [
            (of, resamples(of, placing, common.share, num_blocks=num, seed=seed), num)
            for of, placing, num in zip((a, b), (common.a, common.b), blocks, strict=True)
        ]

    def row(self, measure: Measure, *, level: float) -> Difference | None:
        """Return a measure's row; None if a side does not have it, or has too little of it."""
        a, b = (_draws(measure, *side) for side in self._sides)
        if a is None or b is None:
            return None
        low, high = recording_interval(a, b, level=level, is_paired=bool(self.common.num_paired))
        return Difference(
            name=measure.name,
            unit=measure.unit,
            group=measure.group,
            is_headline=measure.name in RECORDING_HEADLINES,
            a=a.value,
            b=b.value,
            difference=b.value - a.value,
            low=low,
            high=high,
            level=level,
            verdict=verdict_of(low, high),
        )


def check_enough(of: Columns, name: str) -> None:
    """Check that a recording is long enough to be compared.

    Raises:
        BadInput: it has too few requests, or is too short for its requests.
    """
    num = int(of.is_complete.sum())
    if num < FEWEST_REQUESTS:
        raise BadInput(
            f"{name} has {num} finished requests that were observed as a whole. A comparison needs "
            f"at least {FEWEST_REQUESTS} on each side: record longer."
        )
    if num_blocks(of) < FEWEST_BLOCKS:
        raise BadInput(
            f"{name} covers {span_ns(of) / 1e9:.1f} s of arrivals. A comparison needs at least "
            f"{ceil(fewest_ns(of) / 1e8) / 10:.1f} s: {FEWEST_BLOCKS} blocks of time, each twice "
            "as long as a request takes. Record longer."
        )


def compare_recordings(
    a: Columns,
    b: Columns,
    *,
    level: float,
    seed: int,
    change_limits: Sequence[ChangeLimit] = (),
) -> RecordingComparison:
    """Compare two recordings.

    Args:
        a: requests of A, which `check_enough` has accepted.
        b: requests of B, likewise.
        level: share of comparisons of equal sides in which no headline differs, at least.
        seed: seed of the resamples.
        change_limits: changes that B must not exceed.

    Raises:
        BadInput: a limit is about a measure of which a side has too few values.
    """
    pair = RecordingPair(a, b, seed=seed)
    limits = common_limits(a, b)
    rows = _rows(pair, of_recordings(limits), level=level)
    found = {row.name for row in rows}
    had = {measure.name: measure for measure in latencies()}
    return RecordingComparison(
        rows=tuple(rows),
        explanations=tuple(_explanations(rows)),
        too_few=tuple(name for name in RECORDING_HEADLINES if name in had and name not in found),
        outcomes=tuple(
            _outcome(pair, limit, limits, level=1 - (1 - level) / len(change_limits))
            for limit in change_limits
        ),
        limits=limits,
        overlap_share=pair.common.overlap,
        num_paired=pair.common.num_paired,
        is_comparable=pair.common.overlap >= _LEAST_OVERLAP and not any(map(_is_off, rows)),
        level=level,
        seed=seed,
    )


def _rows(pair: RecordingPair, wanted: Sequence[Measure], *, level: float) -> list[Difference]:
    """Return the rows of all measures that are not zero on both sides."""
    rows = []
    for measure in wanted:
        num = len(RECORDING_HEADLINES) if measure.name in RECORDING_HEADLINES else 1
        row = pair.row(measure, level=1 - (1 - level) / num)
        if row is not None and (row.a or row.b):
            rows.append(row)
    return rows


def _explanations(rows: Sequence[Difference]) -> list[Explanation]:
    explanations = []
    for head in rows:
        ledger = _ledger_of(head, rows)
        if not head.is_headline or head.verdict == NO_DIFFERENCE or not ledger:
            continue
        moved = sorted(
            (row for row in ledger if row.verdict == head.verdict),
            key=lambda row: -abs(row.difference),
        )
        named = [
            row.name
            for row in moved
            if abs(row.difference) >= _LEAST_CAUSE * abs(moved[0].difference)
        ]
        explanations.append(Explanation(head.name, tuple(named)))
    return explanations


def _ledger_of(head: Difference, rows: Sequence[Difference]) -> list[Difference]:
    """Return the causes of a headline: of a phase, those that belong to it."""
    if head.group == "phase":
        return [
            row
            for row in rows
            if row.group == "ledger" and cause_named(row.name).phase == head.name
        ]
    group = _LEDGER_OF.get(head.name)
    found = [row for row in rows if row.group == group]
    if group == "longest_gap" and not found:  # no step of the recording is known
        found = [row for row in rows if row.group == "tbt_ledger"]
    return found


def _outcome(
    pair: RecordingPair, limit: ChangeLimit, limits: Limits, *, level: float
) -> LimitOutcome:
    (measure,) = (each for each in known_measures(limits) if each.name == limit.measure)
    row = pair.row(measure, level=level)
    if row is None:
        raise BadInput(f"--fail-on {limit.text}: {_why_unknown(measure)}")
    return outcome_of(limit, row)


def _why_unknown(measure: Measure) -> str:
    if measure.metric is None:
        return f"a side has no {measure.name}."
    fewest = ceil(_FEWEST_BEYOND / (1 - measure.percent / 100))
    values = "gaps between tokens" if measure.metric == "tbt" else "requests"
    return f"{measure.name} needs at least {fewest} {values} on each side. Record longer."


def _is_off(row: Difference) -> bool:
    """Return whether the lengths of a row still differ too much at the common workload."""
    return (
        row.unit == "tokens"
        and row.verdict != NO_DIFFERENCE
        and abs(row.difference) > _MOST_OFF * max(row.a, row.b)
    )


def _draws(measure: Measure, of: Columns, drawn: Resamples, blocks: int) -> Draws | None:
    if measure.metric is not None:
        num = len(of.latencies[measure.metric].ns)
        if num * (1 - measure.percent / 100) < _FEWEST_BEYOND:
            return None
    value, *resampled = estimates(measure, of, drawn).tolist()
    num_known = sum(not isnan(each) for each in resampled)
    if isnan(value) or num_known < len(resampled) / 2:
        return None
    model_error = _MODEL_ERROR * split_value(measure, of, drawn)
    return Draws(value, np.array(resampled), blocks, model_error)
