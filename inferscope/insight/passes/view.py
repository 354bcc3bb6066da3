"""View of forward passes: batch, queue, rates and pass times; what they do not state is null."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from inferscope.insight.passes.reading import ForwardPass
from inferscope.json_document import Document

SOURCE = "forward passes"


class PassTimes(msgspec.Struct, frozen=True):
    """Times of the passes of one kind."""

    num: int
    """Number of passes."""
    p50_ns: int
    """Median."""
    p99_ns: int
    """99th percentile."""


class PassesDocument(Document, frozen=True, kw_only=True):
    """Forward passes of SGLang or Dynamo (`inferscope attach FILE.jsonl --json`)."""

    source: str = SOURCE
    """Source of the document, always `forward passes`."""
    name: str
    """File or address."""
    workers: tuple[str, ...]
    """Workers that sent them."""
    num_ranks: int
    """Data-parallel ranks of all workers."""
    num_passes: int
    """Passes with work."""
    num_missing: int | None
    """Passes that the counters show to be missing; null if the source has no counters."""
    is_sampled: bool
    """Whether the source leaves passes out on purpose; rates are then null."""
    real_ns: int | None
    """Wall time of the newest message; null if the source does not state it."""
    window_ns: int | None
    """Time from the first message to the last; null likewise."""
    num_running: int
    """Requests in the newest pass of each rank."""
    num_waiting: int
    """Requests in the queue at the newest pass of each rank."""
    num_preempted: int
    """Those of them that had begun to decode."""
    prompt_tok_s: float | None
    """Prompt tokens computed per second; null if times are unknown or passes missing."""
    prefill: PassTimes | None
    """Passes that only compute prompts."""
    decode: PassTimes | None
    """Passes that only decode."""
    mixed: PassTimes | None
    """Passes that do both."""
    kv_share: float | None = None
    """Always null: the messages do not state the size of the KV cache."""
    cached_share: float | None = None
    """Always null: the messages do not count cached prompt tokens by request."""
    generated_tok_s: float | None = None
    """Always null: a pass with drafts yields an unknown number of tokens."""
    ttft: None = None
    """Always null: the messages have no single requests."""
    tbt: None = None
    """Always null, likewise."""
    e2e: None = None
    """Always null, likewise."""
    ledger: None = None
    """Always null, likewise."""


def passes_view(passes: Sequence[ForwardPass], name: str) -> PassesDocument:
    """Return the view of messages in their order."""
    newest = {(each.worker_id, each.dp_rank): each for each in passes}
    counters: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for each in passes:
        if each.counter_id is not None:
            counters[each.worker_id, each.dp_rank].add(each.counter_id)
    missing = sum(max(seen) - min(seen) + 1 - len(seen) for seen in counters.values())
    is_sampled = any(each.is_sampled for each in passes)
    seen_ns = [each.observed_real_ns for each in passes if each.observed_real_ns is not None]
    window_ns = max(seen_ns) - min(seen_ns) if seen_ns else None
    tokens = sum(each.scheduled_requests.sum_prefill_tokens for each in passes[1:])
    is_whole = bool(window_ns) and bool(counters) and not missing and not is_sampled
    return PassesDocument(
        name=name,
        workers=tuple(dict.fromkeys(each.worker_id for each in passes)),
        num_ranks=len(newest),
        num_passes=sum(not each.is_idle for each in passes),
        num_missing=missing if counters else None,
        is_sampled=is_sampled,
        real_ns=max(seen_ns, default=None),
        window_ns=window_ns,
        num_running=sum(
            each.scheduled_requests.num_prefill_requests
            + each.scheduled_requests.num_decode_requests
            for each in newest.values()
        ),
        num_waiting=sum(
            each.queued_requests.num_prefill_requests + each.queued_requests.num_decode_requests
            for each in newest.values()
        ),
        num_preempted=sum(each.queued_requests.num_decode_requests for each in newest.values()),
        prompt_tok_s=1e9 * tokens / window_ns if is_whole and window_ns else None,
        prefill=_times(passes, has_prefill=True, has_decode=False),
        decode=_times(passes, has_prefill=False, has_decode=True),
        mixed=_times(passes, has_prefill=True, has_decode=True),
    )


def _times(
    passes: Sequence[ForwardPass], *, has_prefill: bool, has_decode: bool
) -> PassTimes | None:
    ordered = sorted(
        each.wall_time
        for each in passes
        if not each.is_idle
        and bool(each.scheduled_requests.num_prefill_requests) is has_prefill
        and bool(each.scheduled_requests.num_decode_requests) is has_decode
    )
    if not ordered:
        return None
    p50_s, p99_s = (ordered[math.ceil(q * len(ordered)) - 1] for q in (0.5, 0.99))
    return PassTimes(len(ordered), round(1e9 * p50_s), round(1e9 * p99_s))
