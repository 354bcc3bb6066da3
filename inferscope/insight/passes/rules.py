"""Rules that forward passes can decide; all others are listed with the reason.

The passes have no single requests. Time of requests is counted by Little's law: each pass adds its
time once for each request that it computes, and once for each that waits.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from inferscope.insight.findings import (
    RULES,
    EngineFindings,
    Finding,
    NotJudged,
    Number,
    percent,
)
from inferscope.insight.passes.reading import ForwardPass

_PREEMPTED = 0.02
_STARVED = 0.2
_STARVED_TAIL = 1.5
_FEWEST = 20
"""Minimum number of passes of a kind to compare kinds."""
_NO_REQUESTS = "forward passes have no single requests"
_DECIDED = ("short_of_kv", "starved_decodes")


def passes_findings(passes: Sequence[ForwardPass]) -> tuple[EngineFindings, ...]:
    """Return the findings of each worker's passes, and the rules that they cannot decide."""
    by_worker: defaultdict[str, list[ForwardPass]] = defaultdict(list)
    for each in passes:
        if not each.is_idle:
            by_worker[each.worker_id].append(each)
    return tuple(_of_worker(name, found) for name, found in by_worker.items())


def _of_worker(worker: str, passes: Sequence[ForwardPass]) -> EngineFindings:
    not_judged = [
        NotJudged(rule.__name__, _NO_REQUESTS) for rule in RULES if rule.__name__ not in _DECIDED
    ]
    not_judged += [NotJudged(f"bad_{name}", _NO_REQUESTS) for name in ("ttft", "tbt", "e2e")]
    found: list[Finding] = []
    for outcome in (_short_of_kv(passes), _starved_decodes(passes)):
        if isinstance(outcome, Finding):
            found.append(outcome)
        elif outcome is not None:
            not_judged.append(outcome)
    found.sort(key=lambda finding: (-finding.lost_share, finding.id))
    return EngineFindings(
        engine_id=worker or "worker",
        model="",
        num_requests=0,
        num_joined_late=0,
        findings=tuple(found),
        disaggregation=None,
        not_judged=tuple(not_judged),
    )


def _short_of_kv(passes: Sequence[ForwardPass]) -> Finding | NotJudged | None:
    if not any(each.scheduled_requests.num_prefill_requests for each in passes):
        return NotJudged("short_of_kv", "without prefills, queued decodes may wait for transfers")
    lost_s = sum(each.wall_time * each.queued_requests.num_decode_requests for each in passes)
    share = lost_s / _requests_s(passes)
    if share < _PREEMPTED:
        return None
    return Finding(
        id="short_of_kv",
        title="The KV cache is too small for the admitted requests",
        lost_share=share,
        causes=("preempted",),
        sentences=(
            f"{percent(share)} of the requests' time is spent in the queue after decoding had "
            "begun: they lost their KV blocks.",
        ),
        evidence=(Number("preempted_share", share, "measured"),),
        advice=(
            "Give the KV cache more memory (mem_fraction_static, gpu_memory_utilization), shorten "
            "the longest contexts, or admit fewer requests at once."
        ),
    )


def _starved_decodes(passes: Sequence[ForwardPass]) -> Finding | NotJudged | None:
    decoding = [each for each in passes if each.scheduled_requests.num_decode_requests]
    pure: defaultdict[int, list[float]] = defaultdict(list)
    mixed: list[ForwardPass] = []
    for each in decoding:
        if each.scheduled_requests.num_prefill_requests:
            mixed.append(each)
        else:
            pure[_size(each)].append(each.wall_time)
    if min(len(mixed), sum(map(len, pure.values()))) < _FEWEST:
        return NotJudged("starved_decodes", f"fewer than {_FEWEST} passes with and without prefill")
    usual_s = {size: statistics.median(times) for size, times in pure.items()}
    lost_s = 0.0
    for each in mixed:
        nearest = min(usual_s, key=lambda size: abs(size - _size(each)))
        over_s = max(0.0, each.wall_time - usual_s[nearest])
        lost_s += over_s * each.scheduled_requests.num_decode_requests
    decode_s = sum(
        each.wall_time * each.scheduled_requests.num_decode_requests for each in decoding
    )
    tail = _p99_s(decoding) / _p99_s(
        [each for each in decoding if not each.scheduled_requests.num_prefill_requests]
    )
    share = lost_s / decode_s
    if share < _STARVED or tail < _STARVED_TAIL:
        return None
    return Finding(
        id="starved_decodes",
        title="Prefills of other requests delay decodes",
        lost_share=lost_s / _requests_s(passes),
        causes=("decode_interference",),
        sentences=(
            f"Passes that also compute prompts take {percent(share)} of the decodes' time beyond "
            f"what passes without them take; p99 of a decode's pass is {tail:.1f} times as long.",
        ),
        evidence=(
            Number("decode_interference_share", share, "modelled"),
            Number("decode_pass_p99_ratio", tail, "measured"),
        ),
        advice=(
            "Compute prompts in smaller chunks (chunked_prefill_size, max_num_batched_tokens), or "
            "prefill in separate workers."
        ),
    )


def _size(each: ForwardPass) -> int:
    """Return a class of batch sizes: the exponent of the next power of two."""
    return (each.scheduled_requests.num_decode_requests - 1).bit_length()


def _p99_s(passes: Sequence[ForwardPass]) -> float:
    """Return the 99th percentile of a decode's pass time: each pass counts once per decode."""
    ordered = sorted(
        (each.wall_time, each.scheduled_requests.num_decode_requests) for each in passes
    )
    left = 0.99 * sum(num for _, num in ordered)
    for wall_s, num in ordered:
        left -= num
        if left <= 0:
            return wall_s
    return ordered[-1][0]


def _requests_s(passes: Sequence[ForwardPass]) -> float:
    """Return the time of all requests, running and waiting."""
    return sum(
        each.wall_time
        * (
            each.scheduled_requests.num_prefill_requests
            + each.scheduled_requests.num_decode_requests
            + each.queued_requests.num_prefill_requests
            + each.queued_requests.num_decode_requests
        )
        for each in passes
    ) or float("inf")
