"""Findings that name the latency metric to work on: TTFT or TBT, queue or batch."""

from __future__ import annotations

from collections import Counter

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent, times
from inferscope.insight.findings.requests import QUEUED
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.insight.findings.steps import StepStats

_COMPUTING = frozenset(
    {
        "prefill_own",
        "prefill_co_batched",
        "decode_own",
        "decode_co_batched",
        "encode",
        "draft",
        "slowdown",
    }
)
"""Causes that are computation itself, however slow. All others are waiting."""
_MOSTLY_WAITING = 0.5
_FAR_MORE = 3.0
"""Minimum ratio of the waiting on one side to that on the other; below it neither dominates."""
_MIN_TIME_SHARE = 0.15
"""Minimum share of all responses' time."""
_ON_ADMISSION = (
    "Work on admission, not on decoding: more slots or KV blocks, a larger token budget, another "
    "replica."
)
_ON_THE_CAUSE = "Reduce the cause named above, before the first token."

_STARVED = 0.2
"""Minimum share of the time between tokens.

A batch that is half prefill by time costs each decode this much.
"""
_STARVED_TAIL = 1.5

_BOUND = 0.5
"""Minimum share of the plans that left requests waiting."""
_LONG_QUEUE = 0.2
_SHORT_QUEUE = 0.05
_PAYS = 1.3
"""Minimum ratio of sequential to batched decode time from which a larger batch adds throughput."""
_MIN_THROUGHPUT_SHARE = 0.9
"""Minimum throughput share of half the batch for which the other half only adds latency."""
_LARGE_BATCH = 8
_MAX_BLOCKS_SHARE = 0.9
"""Maximum share of KV blocks in use at which more requests fit."""


def late_first_tokens(run: RunSummary) -> Finding | None:
    """Find whether TTFT dominates latency and TBT does not."""
    before, after = _waiting(run.requests.before_ns), _waiting(run.requests.after_ns)
    return _one_sided(run, before, after, is_first=True)


def late_later_tokens(run: RunSummary) -> Finding | None:
    """Find whether TBT dominates latency and TTFT does not."""
    before, after = _waiting(run.requests.before_ns), _waiting(run.requests.after_ns)
    return _one_sided(run, after, before, is_first=False)


def _waiting(by_cause: Counter[str]) -> Counter[str]:
    return Counter({cause: ns for cause, ns in by_cause.items() if cause not in _COMPUTING})


def _one_sided(
    run: RunSummary, waits: Counter[str], others: Counter[str], *, is_first: bool
) -> Finding | None:
    requests = run.requests
    sides = (requests.before_ns, requests.after_ns)
    this, other = sides if is_first else reversed(sides)
    this_ns, other_ns = this.total(), other.total()
    waited_ns, others_ns = waits.total(), others.total()
    if not this_ns or not other_ns or waited_ns < _MOSTLY_WAITING * this_ns:
        return None
    lost_share = waited_ns / (this_ns + other_ns)
    if waited_ns < _FAR_MORE * others_ns or lost_share < _MIN_TIME_SHARE:
        return None
    ttft, tbt = requests.ttft, requests.tbt
    (cause, cause_ns), *_ = waits.most_common(1)
    figures = (
        Number("ttft_p50_ns", round(ttft.quantile_ns(0.50) or 0), "measured"),
        Number("ttft_p95_ns", round(ttft.quantile_ns(0.95) or 0), "measured"),
        Number("tbt_p50_ns", round(tbt.quantile_ns(0.50) or 0), "measured"),
        Number("tbt_p99_ns", round(tbt.quantile_ns(0.99) or 0), "measured"),
        Number("waiting_share_before_first_token", _share(requests.before_ns), "modelled"),
        Number("waiting_share_after_first_token", _share(requests.after_ns), "modelled"),
        Number("largest_wait", cause, "measured"),
        Number("largest_wait_share", cause_ns / this_ns, "modelled"),
    )
    waited = percent(waited_ns / this_ns)
    of_this, of_all = percent(cause_ns / this_ns), percent(others_ns / (this_ns + other_ns))
    mostly = f"{waited} of it is waiting, most of all `{cause}` ({of_this})"
    against = f"that is {percent(lost_share)} of all time, against {of_all} for"
    ttft_p95, tbt_p99 = _p(ttft.quantile_ns(0.95)), _p(tbt.quantile_ns(0.99))
    if is_first:
        return Finding(
            id="late_first_tokens",
            title="TTFT dominates latency",
            lost_share=lost_share,
            causes=(cause,),
            sentences=(
                f"TTFT is {ttft_p95} at p95, and {mostly}; {against} waits between tokens (TBT p99 "
                f"{tbt_p99}).",
            ),
            evidence=figures,
            advice=(
                f"{_ON_ADMISSION if cause in QUEUED else _ON_THE_CAUSE} Faster decode steps would "
                "hardly help."
            ),
            counterfactual=_without(
                cause, cause_ns, this_ns, ttft.num, name="TTFT", metric="ttft_mean"
            ),
        )
    return Finding(
        id="late_later_tokens",
        title="TBT dominates latency",
        lost_share=lost_share,
        causes=(cause,),
        sentences=(
            f"TBT is {tbt_p99} at p99, and {mostly}; {against} waits before the first token (TTFT "
            f"p95 {ttft_p95}).",
        ),
        evidence=figures,
        advice=(
            "Reduce the cause named above, between decode steps, not admission. "
            "A shorter queue would hardly help."
        ),
        counterfactual=_without(
            cause, cause_ns, this_ns, requests.num_tokens_after, name="TPOT", metric="tpot_mean"
        ),
    )


def _without(
    cause: str, cause_ns: int, whole_ns: int, num: int, *, name: str, metric: str
) -> Counterfactual:
    """Return a mean without one cause."""
    actual_ns, without_ns = whole_ns / num, (whole_ns - cause_ns) / num
    return Counterfactual(
        f"Without `{cause}`, the mean {name} would be {duration(without_ns)} instead of "
        f"{duration(actual_ns)}.",
        metric,
        round(actual_ns),
        round(without_ns),
    )


def _share(by_cause: Counter[str]) -> float:
    return _waiting(by_cause).total() / by_cause.total()


def starved_decodes(run: RunSummary) -> Finding | None:
    """Find whether others' prefills delay decoding requests."""
    requests, steps = run.requests, run.steps
    whole_ns = requests.after_ns.total()
    waited_ns = requests.after_ns["decode_interference"]
    actual_ns = requests.tbt.quantile_ns(0.99)
    without_ns = requests.tbt_without_prefills.quantile_ns(0.99)
    if not whole_ns or actual_ns is None or without_ns is None or not steps.num_mixed:
        return None
    if waited_ns < _STARVED * whole_ns or actual_ns < _STARVED_TAIL * without_ns:
        return None
    chunk = steps.mixed_prefill_tokens / steps.num_mixed
    return Finding(
        id="starved_decodes",
        title="Prefills starve decodes",
        lost_share=requests.share_of_life("decode_interference"),
        causes=("decode_interference",),
        sentences=(
            f"{percent(waited_ns / whole_ns)} of the time between tokens is others' prompts "
            f"in the same steps: {percent(steps.num_mixed / steps.num_decoding)} of the "
            f"steps that decode also prefill, {chunk:.0f} tokens on average.",
        ),
        evidence=(
            Number("decode_interference_share", waited_ns / whole_ns, "modelled"),
            Number("mixed_steps_share", steps.num_mixed / steps.num_decoding, "measured"),
            Number("prefill_tokens_per_mixed_step", chunk, "measured"),
            Number("tbt_p99_ns", round(actual_ns), "measured"),
            Number("tbt_p99_without_prefills_ns", round(without_ns), "modelled"),
        ),
        advice=(
            "Lower the token budget of a step so that prompts come in smaller chunks (TTFT rises), "
            "or prefill on other workers (disaggregation)."
        ),
        counterfactual=Counterfactual(
            f"Without others' prefills, TBT p99 would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "tbt_p99",
            round(actual_ns),
            round(without_ns),
        ),
    )


def small_batch_with_queue(run: RunSummary) -> Finding | None:
    """Find whether requests queue for slots although a larger batch would cost little."""
    requests, steps, plans = run.requests, run.steps, run.plans
    queued = requests.share_of_life("queue")
    if queued < _LONG_QUEUE or plans.bound_share("slots") < _BOUND or not steps.decode_together_ns:
        return None
    pays = steps.decode_alone_ns / steps.decode_together_ns
    if pays < _PAYS or (plans.peak_blocks_share or 0.0) > _MAX_BLOCKS_SHARE:
        return None
    running = plans.running_with_queue / plans.num_with_queue
    peak = plans.peak_blocks_share
    room = "" if peak is None else f"; at most {percent(peak)} of the KV blocks were in use"
    return Finding(
        id="small_batch_with_queue",
        title="Batch limit too low: requests queue while capacity is free",
        lost_share=queued,
        causes=QUEUED,
        sentences=(
            f"{percent(queued)} of the time is queueing, and in "
            f"{percent(plans.bound_share('slots'))} of the plans that left requests waiting the "
            f"limit was the number of slots, with {running:.1f} running.",
            f"Batched decoding takes {times(pays)} less than sequential, so a larger batch would "
            f"raise throughput{room}.",
        ),
        evidence=(
            Number("queue_share", queued, "measured"),
            Number("plans_bound_by_slots_share", plans.bound_share("slots"), "measured"),
            Number("running_while_others_wait", running, "measured"),
            Number("decode_batching_factor", pays, "modelled"),
        ),
        advice="Raise the batch limit (max_num_seqs, max_running).",
        counterfactual=_unqueued(run),
    )


def large_batch_for_nothing(run: RunSummary) -> Finding | None:
    """Find whether half the batch would decode nearly as many tokens per second."""
    requests, steps = run.requests, run.steps
    whole_ns, waited_ns = requests.after_ns.total(), requests.after_ns["decode_co_batched"]
    if not whole_ns or not steps.decode_together_ns:
        return None
    batch = steps.decodes / steps.num_decoding
    healthy_ns = whole_ns - requests.after_ns["slowdown"]
    if batch < _LARGE_BATCH or waited_ns < _MOSTLY_WAITING * healthy_ns:
        return None
    faster = _half_batch_ratio(steps)
    kept = 0.5 / faster
    if kept < _MIN_THROUGHPUT_SHARE or requests.share_of_life("queue") > _SHORT_QUEUE:
        return None
    computing_ns = waited_ns + requests.after_ns["decode_own"]
    actual_ns = whole_ns / requests.num_tokens_after
    without_ns = actual_ns - computing_ns * (1 - faster) / requests.num_tokens_after
    return Finding(
        id="large_batch_for_nothing",
        title="Batch too large: throughput has plateaued",
        lost_share=requests.share_of_life("decode_co_batched"),
        causes=("decode_co_batched",),
        sentences=(
            f"{batch:.0f} requests decode in a step on average; {percent(waited_ns / whole_ns)} "
            "of the time between tokens is spent on the others in the batch. Half as many would "
            f"decode {percent(kept)} as many tokens per second.",
        ),
        evidence=(
            Number("decodes_per_step", batch, "measured"),
            Number("throughput_kept_by_half_the_batch", kept, "modelled"),
            Number("decode_co_batched_share", waited_ns / whole_ns, "modelled"),
            Number("tpot_mean_ns", round(actual_ns), "measured"),
        ),
        advice=(
            "Lower the batch limit: throughput stays, tokens arrive faster, and the other requests "
            "wait in the queue instead of in the batch."
        ),
        counterfactual=Counterfactual(
            f"With half the batch, the mean TPOT would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "tpot_mean",
            round(actual_ns),
            round(without_ns),
        ),
    )


def _half_batch_ratio(steps: StepStats) -> float:
    """Return the time of half the decodes over that of all, interpolated between one and all."""
    batch = steps.decodes_modelled / steps.num_modelled
    alone_ns = steps.decode_alone_ns / steps.decodes_modelled
    together_ns = steps.decode_together_ns / steps.num_modelled
    each_ns = (together_ns - alone_ns) / max(1.0, batch - 1)
    return (alone_ns + each_ns * (batch / 2 - 1)) / together_ns


def _unqueued(run: RunSummary) -> Counterfactual | None:
    actual_ns = run.requests.e2e.quantile_ns(0.95)
    without_ns = run.requests.e2e_unqueued.quantile_ns(0.95)
    if actual_ns is None or without_ns is None:
        return None
    return Counterfactual(
        f"Without the queue, E2E p95 would be {duration(without_ns)} instead of "
        f"{duration(actual_ns)}, with the steps unchanged.",
        "e2e_p95",
        round(actual_ns),
        round(without_ns),
    )


def _p(ns: float | None) -> str:
    return "-" if ns is None else duration(ns)
