"""Rules of all findings over one engine's run; a healthy run yields none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inferscope.insight.findings.bad_latency import bad_latency
from inferscope.insight.findings.cache_misses import (
    cache_too_small,
    documents_reordered,
    duplicates_in_flight,
    namespace_splits,
    prefix_below_block,
    prompt_changes_early,
)
from inferscope.insight.findings.disaggregation import Disaggregation, disaggregation
from inferscope.insight.findings.experts import expert_imbalance
from inferscope.insight.findings.finding import Finding, NotJudged
from inferscope.insight.findings.latency import (
    large_batch_for_nothing,
    late_first_tokens,
    late_later_tokens,
    small_batch_with_queue,
    starved_decodes,
)
from inferscope.insight.findings.memory import short_of_kv
from inferscope.insight.findings.overhead import (
    cold_starts,
    costly_speculation,
    host_bound_decode,
    mostly_reasoning,
)
from inferscope.insight.findings.ranks import slow_rank
from inferscope.insight.findings.run_summary import RunSummarizer, RunSummary
from inferscope.insight.findings.slo_findings import SloFindings, SloOutcome
from inferscope.insight.findings.slow_steps import slow_steps
from inferscope.slo import ObjectiveCount

Rule = Callable[[RunSummary], "Finding | None"]

RULES: tuple[Rule, ...] = (
    late_first_tokens,
    late_later_tokens,
    short_of_kv,
    starved_decodes,
    small_batch_with_queue,
    large_batch_for_nothing,
    mostly_reasoning,
    host_bound_decode,
    cold_starts,
    prompt_changes_early,
    cache_too_small,
    prefix_below_block,
    namespace_splits,
    duplicates_in_flight,
    documents_reordered,
    costly_speculation,
    slow_rank,
    expert_imbalance,
    slow_steps,
)

FEWEST_REQUESTS = 20
"""Minimum number of finished requests to analyze a run."""


class EngineFindings(msgspec.Struct, frozen=True):
    """Findings of one engine."""

    engine_id: str
    model: str
    num_requests: int
    """Number of requests observed from their beginning."""
    num_joined_late: int
    findings: tuple[Finding, ...] | None
    """Findings, None with too few requests.

    Missed objectives come first, the fastest burn first; then problems, the largest loss of time
    first.
    """
    disaggregation: Disaggregation | None
    """Latencies without interference; None likewise, or if no response had several tokens."""
    is_synthetic: bool = False
    """Whether the records are marked as synthetic."""
    objectives: tuple[ObjectiveCount, ...] | None = None
    """Counts by objective of its model; None without objectives."""
    not_judged: tuple[NotJudged, ...] = ()
    """Rules that the source cannot decide; none for records."""


def findings(
    summarizer: RunSummarizer, slo_findings: SloFindings | None = None
) -> tuple[EngineFindings, ...]:
    """Return the findings of each engine, also against its objectives."""
    return tuple(_of(run, slo_findings) for run in summarizer.runs.values())


def _of(run: RunSummary, slo_findings: SloFindings | None) -> EngineFindings:
    outcome = None if slo_findings is None else slo_findings.outcome(run.engine_id)
    found: tuple[Finding, ...] | None = None
    if run.requests.num >= FEWEST_REQUESTS:
        found = findings_of(run, outcome)
    model = (run.info.served_name or run.info.model) if run.info is not None else ""
    return EngineFindings(
        run.engine_id,
        model,
        run.requests.num,
        run.requests.num_joined_late,
        found,
        disaggregation(run) if found is not None else None,
        run.is_synthetic,
        None if outcome is None else outcome.counts,
    )


def findings_of(run: RunSummary, outcome: SloOutcome | None = None) -> tuple[Finding, ...]:
    """Return a run's findings for any number of requests: missed objectives, then problems."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    missed = () if outcome is None else outcome.missed
    judged = {} if outcome is None else outcome.judged
    found += bad_latency(run, [*found, *missed], judged)
    return missed + tuple(sorted(found, key=lambda finding: (-finding.lost_share, finding.id)))
