"""Verdict on a finished request under one objective: good, bad, or not counted.

                    answered           cancelled or rejected  failed by the server, or shed
    ttft            token by then      no token by then: bad; before that: not counted
    e2e             last token by then not over by then: bad; before that: not counted
    tbt             longest gap        a gap beyond it: bad; else not counted
    tpot            mean gap           not counted            not counted
    availability    good               not counted            bad
    goodput         all of the others  bad if one of them is  bad

A first token is judged whatever follows it. A request that was not observed from its beginning
(`joined_late`) is judged by its end alone. A non-streamed response has no first token that a client
waits for, and no gaps; a response of one token has no mean gap.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from inferscope.attribution import METRICS, LatencyLimit, LedgerView
from inferscope.slo.objectives import Metric, Objective

ANSWERS = frozenset({"stop", "length"})
FAILURES = frozenset({"timeout", "server_abort", "error", "engine_lost", "shed"})
"""Finish reasons the server is responsible for; not cancellation or client errors (`rejected`)."""


class Judged(msgspec.Struct, frozen=True, gc=False):
    """Results of a request's objectives."""

    results: dict[str, bool]
    """Good or bad by objective name, for the objectives that count."""
    cause: str | None = None
    """Cause of the largest miss; None without a miss or if it is unknown."""


def verdict(
    request: LedgerView, metric: Metric, limit_ns: int | None, *, has_missed: bool = False
) -> bool | None:
    """Return whether a finished request was good; None if it does not count.

    Args:
        request: the finished request.
        metric: metric of the objective.
        limit_ns: threshold of a latency.
        has_missed: for `goodput`: a latency threshold of its model was missed.
    """
    finish = request.finish
    if metric == "availability":
        return True if finish in ANSWERS else False if finish in FAILURES else None
    if metric == "goodput":
        if finish in FAILURES or has_missed:
            return False
        return True if finish in ANSWERS and not request.joined_late else None
    assert limit_ns is not None
    if metric == "ttft":
        return _first_token(request, limit_ns)
    if request.joined_late:
        return None
    if metric == "e2e":
        return _whole(request, limit_ns)
    if request.is_in_one_piece:
        return None
    return _gaps(request, limit_ns) if metric == "tbt" else _mean_gap(request, limit_ns)


def _first_token(request: LedgerView, limit_ns: int) -> bool | None:
    if request.is_in_one_piece:
        return None
    if request.first_token_ns is not None:
        return request.first_token_ns - request.arrived_ns <= limit_ns
    # If it joined late or has tokens, its first token was not observed.
    if request.joined_late or request.last_token_ns is not None or request.finish in ANSWERS:
        return None
    return False if request.delivered_ns - request.arrived_ns > limit_ns else None


def _whole(request: LedgerView, limit_ns: int) -> bool | None:
    if request.finish in ANSWERS:
        last_ns = request.last_token_ns
        end_ns = request.delivered_ns if last_ns is None else last_ns
        return end_ns - request.arrived_ns <= limit_ns
    return False if request.delivered_ns - request.arrived_ns > limit_ns else None


def _gaps(request: LedgerView, limit_ns: int) -> bool | None:
    if request.longest_gap_ns > limit_ns:
        return False
    if request.finish in ANSWERS:
        return True if request.num_gaps else None
    # The token that the client was waiting for at its end never came.
    last_ns = request.last_token_ns
    is_late = last_ns is not None and request.delivered_ns - last_ns > limit_ns
    return False if is_late else None


def _mean_gap(request: LedgerView, limit_ns: int) -> bool | None:
    first_ns, last_ns, num = request.first_token_ns, request.last_token_ns, request.output_tokens
    if request.finish not in ANSWERS or first_ns is None or last_ns is None or num < 2:
        return None
    return last_ns - first_ns <= (num - 1) * limit_ns


def latency_limits(objectives: Iterable[Objective]) -> tuple[LatencyLimit, ...]:
    """Return the thresholds among objectives, the strictest of each metric."""
    limits_ns: dict[str, int] = {}
    for one in objectives:
        if one.threshold_ns is not None:
            limits_ns[one.metric] = min(
                one.threshold_ns, limits_ns.get(one.metric, one.threshold_ns)
            )
    return tuple(
        LatencyLimit(metric, limits_ns[metric]) for metric in METRICS if metric in limits_ns
    )


def judged(request: LedgerView, objectives: Iterable[Objective]) -> dict[str, bool]:
    """Return good or bad by name for the objectives that count, of those in force for its model."""
    objectives = tuple(objectives)
    results: dict[str, bool] = {}
    has_missed = False
    for one in objectives:
        if one.threshold_ns is not None:
            result = verdict(request, one.metric, one.threshold_ns)
            if result is not None:
                results[one.name] = result
                has_missed |= not result
    for one in objectives:
        if one.threshold_ns is None:
            result = verdict(request, one.metric, None, has_missed=has_missed)
            if result is not None:
                results[one.name] = result
    return results
