"""Finding on the KV cache: it is too small for the admitted requests."""

from __future__ import annotations

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent
from inferscope.insight.findings.requests import LOST_TO_PREEMPTION, QUEUED
from inferscope.insight.findings.run_summary import RunSummary

_PREEMPTED = 0.02
"""Minimum share of all responses' time spent preempted or recomputing."""
_QUEUED_FOR_BLOCKS = 0.1


def short_of_kv(run: RunSummary) -> Finding | None:
    """Find whether the KV cache is too small: requests are preempted, or wait for blocks."""
    requests, plans = run.requests, run.plans
    lost = requests.share_of_life(*LOST_TO_PREEMPTION)
    queued = requests.share_of_life("queue") * plans.bound_share("blocks")
    if lost < _PREEMPTED and queued < _QUEUED_FOR_BLOCKS:
        return None
    sentences = []
    if requests.num_preemptions:
        plural = "" if requests.num_preemptions == 1 else "s"
        sentences.append(
            f"{percent(lost)} of the time is spent preempted or recomputing lost tokens: "
            f"{requests.num_preempted} of {requests.num} requests lost their blocks "
            f"({requests.num_preemptions} preemption{plural})."
        )
    if queued >= _QUEUED_FOR_BLOCKS:
        sentences.append(
            f"{percent(requests.share_of_life('queue'))} of the time is queueing, and "
            f"{percent(plans.bound_share('blocks'))} of the plans that left requests waiting were "
            "short of KV blocks."
        )
    peak = plans.peak_blocks_share
    evidence = [
        Number("preempted_and_recompute_share", lost, "modelled"),
        Number("preempted_requests", requests.num_preempted, "measured"),
        Number("preemptions", requests.num_preemptions, "measured"),
        Number("plans_bound_by_blocks_share", plans.bound_share("blocks"), "measured"),
        Number("queue_share", requests.share_of_life("queue"), "measured"),
    ]
    if peak is not None:
        evidence.append(Number("peak_kv_blocks_share", peak, "measured"))
    without = requests.e2e_unpreempted if lost >= _PREEMPTED else requests.e2e_unqueued
    actual_ns, without_ns = requests.e2e.quantile_ns(0.95), without.quantile_ns(0.95)
    counterfactual = None
    if actual_ns is not None and without_ns is not None:
        what = "preemption and recomputation" if lost >= _PREEMPTED else "any queue"
        counterfactual = Counterfactual(
            f"Without {what}, E2E p95 would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}, with the steps unchanged.",
            "e2e_p95",
            round(actual_ns),
            round(without_ns),
        )
    return Finding(
        id="short_of_kv",
        title="The KV cache is too small for the admitted requests",
        lost_share=lost + queued,
        causes=(*LOST_TO_PREEMPTION, *QUEUED),
        sentences=tuple(sentences),
        evidence=tuple(evidence),
        advice=(
            "Give the KV cache more memory (gpu_memory_utilization, fewer or quantised weights, "
            "FP8 KV), shorten the longest contexts, or admit fewer requests at once."
        ),
        counterfactual=counterfactual,
    )
