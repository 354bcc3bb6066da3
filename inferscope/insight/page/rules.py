"""Rules that a metrics page's totals can decide; all others are listed with the reason.

A page has no single requests and no steps. Its histograms state between which bounds a duration
lies, so a rule counts only what is surely beyond its limit, and a finding's lost share is a lower
bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from inferscope.insight.findings import (
    FEWEST_REQUESTS,
    RULES,
    TPOT_LIMIT_NS,
    TTFT_LIMIT_NS,
    Counterfactual,
    EngineFindings,
    Finding,
    NotJudged,
    Number,
    duration,
    percent,
)
from inferscope.metrics_page import PageHistogram, PageTotals, beyond

_MOSTLY_QUEUED = 0.5
"""Minimum share of the time to first token that is queue time."""
_LONG_QUEUE = 0.15
"""Minimum share of all responses' time that is queue time."""
_FULL, _FREE = 0.95, 0.90
"""KV use from which requests wait for blocks, and up to which they do not."""
_PREEMPTED = 0.02
"""Minimum number of preemptions per finished request."""
_TTFT_TAIL, _TBT_TAIL = 0.05, 0.01
"""Shares that may be beyond the limits: those of p95 and p99."""
_NO_REQUESTS = "a metrics page has no single requests"
_NO_STEPS = "a metrics page has no steps"
_REASONS = {
    "late_later_tokens": _NO_REQUESTS,
    "prompt_changes_early": _NO_REQUESTS,
    "cache_too_small": _NO_REQUESTS,
    "prefix_below_block": _NO_REQUESTS,
    "namespace_splits": _NO_REQUESTS,
    "duplicates_in_flight": _NO_REQUESTS,
    "documents_reordered": _NO_REQUESTS,
    "mostly_reasoning": _NO_REQUESTS,
    "bad_e2e": "a metrics page does not state which responses stream",
}


class _Missing(Exception):
    """Values that a rule needs and the page lacks."""


class _Queue(NamedTuple):
    """Queue time of all requests beside their times to first and to last token."""

    queued_s: float
    ttft_s: float
    e2e_s: float
    num: float

    @property
    def share(self) -> float:
        """Return the share of all responses' time that is queue time."""
        return self.queued_s / self.e2e_s


def page_findings(totals: PageTotals) -> EngineFindings:
    """Return the findings of a page's totals, and the rules that they cannot decide."""
    num = _num_requests(totals)
    found: list[Finding] = []
    not_judged = [
        NotJudged(rule.__name__, _REASONS.get(rule.__name__, _NO_STEPS))
        for rule in RULES
        if rule.__name__ not in _BY_ID
    ]
    not_judged.append(NotJudged("bad_e2e", _REASONS["bad_e2e"]))
    for name in _BY_ID:
        match _judged(name, totals):
            case Finding() as finding:
                found.append(finding)
            case NotJudged() as reason:
                not_judged.append(reason)
    found.sort(key=lambda finding: (-finding.lost_share, finding.id))
    return EngineFindings(
        engine_id=totals.url,
        model=", ".join(totals.models),
        num_requests=num,
        num_joined_late=0,
        findings=tuple(found) if num >= FEWEST_REQUESTS else None,
        disaggregation=None,
        not_judged=tuple(not_judged),
    )


def _judged(name: str, totals: PageTotals) -> Finding | NotJudged | None:
    try:
        return _BY_ID[name](totals)
    except _Missing as missing:
        return NotJudged(name, f"the page lacks {missing}")


def _late_first_tokens(totals: PageTotals) -> Finding | None:
    queue = _queue(totals)
    of_ttft = queue.queued_s / queue.ttft_s if queue.ttft_s else 0.0
    if of_ttft < _MOSTLY_QUEUED or queue.share < _LONG_QUEUE:
        return None
    mean_ns = round(1e9 * queue.ttft_s / queue.num)
    without_ns = max(0, round(1e9 * (queue.ttft_s - queue.queued_s) / queue.num))
    return Finding(
        id="late_first_tokens",
        title="TTFT dominates latency",
        lost_share=min(1.0, queue.share),
        causes=("queue",),
        sentences=(
            f"TTFT is {duration(mean_ns)} in the mean, and {percent(min(1.0, of_ttft))} of it is "
            f"queueing; that is {percent(min(1.0, queue.share))} of all time.",
        ),
        evidence=(
            Number("ttft_mean_ns", mean_ns, "measured"),
            Number("queue_share_before_first_token", min(1.0, of_ttft), "measured"),
            Number("queue_share", min(1.0, queue.share), "measured"),
        ),
        advice=(
            "Work on admission, not on decoding: more slots or KV blocks, a larger token budget, "
            "another replica."
        ),
        counterfactual=Counterfactual(
            f"Without any queue, the mean TTFT would be {duration(without_ns)} instead of "
            f"{duration(mean_ns)}, with the steps unchanged.",
            "ttft_mean",
            mean_ns,
            without_ns,
            "measured",
        ),
    )


def _short_of_kv(totals: PageTotals) -> Finding | None:
    preemptions, num = totals.counters.get("preemptions"), _num_requests(totals)
    waiting, used = _gauge(totals, "waiting"), _gauge(totals, "kv_share")
    if preemptions is None and (waiting is None or used is None):
        raise _Missing("preemptions, and KV use with waiting requests")
    preempted = bool(preemptions) and (preemptions or 0.0) >= _PREEMPTED * max(1, num)
    is_full = waiting is not None and used is not None and min(waiting) >= 1 and min(used) >= _FULL
    if not preempted and not is_full:
        return None
    sentences, evidence, lost = [], [], 0.0
    if preempted:
        sentences.append(
            f"{preemptions:.0f} preemptions over {num} finished requests: each computes its lost "
            "tokens again."
        )
        evidence.append(Number("preemptions", round(preemptions or 0.0), "measured"))
    if is_full:
        assert waiting is not None
        assert used is not None
        sentences.append(
            f"{waiting[-1]:.0f} requests wait while {percent(min(1.0, used[-1]))} of the KV cache "
            "is in use."
        )
        evidence += [
            Number("waiting_requests", round(waiting[-1]), "measured"),
            Number("kv_blocks_share", min(1.0, used[-1]), "measured"),
        ]
        lost = _queue_share(totals)
    return Finding(
        id="short_of_kv",
        title="The KV cache is too small for the admitted requests",
        lost_share=lost,
        causes=("preempted", "recompute", "queue"),
        sentences=tuple(sentences),
        evidence=tuple(evidence),
        advice=(
            "Give the KV cache more memory (gpu_memory_utilization, fewer or quantised weights, "
            "FP8 KV), shorten the longest contexts, or admit fewer requests at once."
        ),
    )


def _small_batch_with_queue(totals: PageTotals) -> Finding | None:
    waiting, used = _gauge(totals, "waiting"), _gauge(totals, "kv_share")
    running = _gauge(totals, "running")
    if waiting is None or used is None or running is None:
        raise _Missing("running and waiting requests, or KV use")
    if min(waiting) < 1 or max(used) > _FREE:
        return None
    lost = _queue_share(totals)
    return Finding(
        id="small_batch_with_queue",
        title="Requests wait while KV memory is free",
        lost_share=lost,
        causes=("queue",),
        sentences=(
            f"{waiting[-1]:.0f} requests wait and {running[-1]:.0f} run, with "
            f"{percent(used[-1])} of the KV cache in use: slots or the token budget hold them.",
        ),
        evidence=(
            Number("waiting_requests", round(waiting[-1]), "measured"),
            Number("running_requests", round(running[-1]), "measured"),
            Number("kv_blocks_share", used[-1], "measured"),
        ),
        advice=(
            "Raise the number of slots (max_num_seqs) or the token budget "
            "(max_num_batched_tokens), or add a replica."
        ),
    )


def _bad_ttft(totals: PageTotals) -> Finding | None:
    return _bad(totals, "ttft", "TTFT", "p95", TTFT_LIMIT_NS, _TTFT_TAIL)


def _bad_tbt(totals: PageTotals) -> Finding | None:
    return _bad(totals, "tbt", "TBT", "p99", TPOT_LIMIT_NS, _TBT_TAIL)


def _bad(
    totals: PageTotals, word: str, name: str, quantile: str, limit_ns: float, tail_share: float
) -> Finding | None:
    """Return a metric if more of its values than allowed are surely above the limit."""
    histogram = _histogram(totals, word)
    num, over_s = beyond(histogram, limit_ns / 1e9)
    if num <= tail_share * histogram.num:
        return None
    e2e = totals.histograms.get("e2e")
    lost = min(1.0, over_s / e2e.sum_s) if e2e is not None and e2e.sum_s > 0 else 0.0
    of_all = num / histogram.num
    return Finding(
        id=f"bad_{word}",
        title=f"{name} is bad",
        lost_share=lost,
        sentences=(
            f"{percent(of_all)} of {histogram.num:,.0f} values are above {duration(limit_ns)}: "
            f"{quantile} is too. A metrics page does not state why.",
        ),
        evidence=(
            Number(f"{word}_beyond_limit_share", of_all, "measured"),
            Number(f"{word}_limit_ns", round(limit_ns), "measured"),
        ),
        advice=(
            "Start the server with `inferscope run` to see the cause of each request's time, or "
            "lower the load until it fits."
        ),
    )


_Rule = Callable[[PageTotals], "Finding | None"]
_BY_ID: dict[str, _Rule] = {
    "late_first_tokens": _late_first_tokens,
    "short_of_kv": _short_of_kv,
    "small_batch_with_queue": _small_batch_with_queue,
    "bad_ttft": _bad_ttft,
    "bad_tbt": _bad_tbt,
}
"""Rules that a page can decide, by the findings' names."""


def _num_requests(totals: PageTotals) -> int:
    finished = totals.counters.get("finished")
    if finished is None:
        e2e = totals.histograms.get("e2e")
        finished = 0.0 if e2e is None else e2e.num
    return round(finished)


def _gauge(totals: PageTotals, word: str) -> tuple[float, ...] | None:
    """Return a gauge's value in each reading; None if one lacks it."""
    values = tuple(gauges[word] for gauges in totals.gauges if word in gauges)
    return values if len(values) == len(totals.gauges) else None


def _histogram(totals: PageTotals, word: str) -> PageHistogram:
    histogram = totals.histograms.get(word)
    if histogram is None or round(histogram.num) < 1:
        raise _Missing(f"a histogram of {word} with values")
    return histogram


def _queue(totals: PageTotals) -> _Queue:
    queue, ttft, e2e = (_histogram(totals, word) for word in ("queue", "ttft", "e2e"))
    if e2e.sum_s <= 0:
        raise _Missing("the sum of e2e")
    return _Queue(queue.sum_s, ttft.sum_s, e2e.sum_s, ttft.num)


def _queue_share(totals: PageTotals) -> float:
    """Return the share of all responses' time that is queue time; 0 if the page lacks it."""
    try:
        return max(0.0, min(1.0, _queue(totals).share))
    except _Missing:
        return 0.0
