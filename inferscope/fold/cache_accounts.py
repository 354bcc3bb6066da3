"""Accounts of one engine's prefix cache: its records by request, prices, and the miss-ratio curve.

The records of a request come from two processes in any order. They are kept until the request is
final; then its prompt is divided and its chunks are cut. What a request waited for in the queue is
also decided then, because the step that recomputed evicted tokens ended before its admission.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from inferscope.attribution import Chunk, Likeness, cache_segments, cache_spans, part_spans
from inferscope.fold.cache_use import CacheUse, PromptDifference, RequestName
from inferscope.fold.miss_ratio import Curve, MissRatio, curve
from inferscope.fold.snapshots import CacheView
from inferscope.records import (
    CACHE_CLASSES,
    COLUMNS,
    LOOKUP_CLASSES,
    LORA,
    MULTIMODAL,
    SALT,
    CacheLookup,
    CacheSample,
    PromptLikeness,
)

_MOST_NAMES = 4096
"""Maximum number of requests per ring that may still be an evictor; about 1 MB."""
_MOST_CHUNKS = 8192
"""Maximum number of chunks kept to explain the queue behind them."""
_DIFFERENCES = ((SALT, "salt"), (LORA, "lora"), (MULTIMODAL, "multimodal"))


class CacheFacts(msgspec.Struct, eq=False):
    """Records of the cache on one request that is not final."""

    name: RequestName
    chunks: list[Chunk] = []
    """Chunks of its prefill without recomputed ones."""
    lookup: CacheLookup | None = None
    likeness: PromptLikeness | None = None
    evictor: RequestName | None = None
    evictors: list[RequestName] = []
    twin: RequestName | None = None
    earlier: RequestName | None = None
    block_tokens: int = 0


class _Computed(NamedTuple):
    """Chunk of a step that others may have waited for."""

    start_ns: int
    end_ns: int
    facts: CacheFacts
    tokens: int
    context: int
    share: float
    """Share of the step's time."""


class CacheAccounts:
    """State of one engine's prefix cache.

    Attributes:
        is_on: whether the engine has reported a record of its cache.
        tokens: prompt tokens of final requests by class.
        gpu_ns: price of final requests by class, in device time.
        pool_blocks: blocks of a replica's KV cache; 0 if unknown.
        peak_blocks: most blocks that requests of one replica held at once.
        block_tokens: tokens of a block; 0 if unknown.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.tokens = dict.fromkeys(CACHE_CLASSES, 0)
        self.gpu_ns = dict.fromkeys(CACHE_CLASSES, 0)
        self.pool_blocks = self.peak_blocks = self.block_tokens = 0
        self._names: dict[int, OrderedDict[int, RequestName]] = {}
        """Names by ring and index, the oldest first."""
        self._computed: list[_Computed] = []
        """Chunks by the end of their steps."""
        self._replicas: dict[int, MissRatio] = {}
        """Accesses by data-parallel rank."""

    # --- records ------------------------------------------------------------------------------

    def remember(self, ring: int, index: int, name: RequestName) -> None:
        """Keep the name of a request, which later records may refer to by its index."""
        names = self._names.setdefault(ring, OrderedDict())
        names[index] = name
        if len(names) > _MOST_NAMES:
            names.popitem(last=False)

    def forget(self, ring: int) -> None:
        """Drop the names of a replaced ring."""
        self._names.pop(ring, None)

    def note(self, ring: int, facts: CacheFacts, record: CacheLookup | PromptLikeness) -> None:
        """Add a record to the facts of its request; the first of each type counts."""
        names: Mapping[int, RequestName] = self._names.get(ring, {})
        if isinstance(record, CacheLookup):
            if facts.lookup is None:
                facts.lookup = record
                facts.evictor, facts.twin = names.get(record.evictor), names.get(record.twin)
                facts.evictors = [names[index] for index in record.evictors if index in names]
        elif facts.likeness is None:
            facts.likeness, facts.earlier = record, names.get(record.earlier)

    def sampled(
        self, dp_rank: int, sample: CacheSample, lookup: CacheLookup, *, tenant: str
    ) -> None:
        """Add the sampled blocks of an admitted prompt to the curve."""
        if not self.pool_blocks or not 0 < sample.rate <= 1 or len(sample.digests) % 8:
            return
        replica = self._replicas.get(dp_rank)
        if replica is None or replica.pool_blocks != self.pool_blocks:
            replica = self._replicas[dp_rank] = MissRatio(self.pool_blocks)
        replica.prompt(
            sum(getattr(lookup, name) for name in LOOKUP_CLASSES),
            np.frombuffer(sample.digests, dtype=COLUMNS["digests"]).tolist(),
            num_blocks=sample.num_blocks,
            block_tokens=sample.block_tokens,
            rate=sample.rate,
            tenant=tenant,
            hit_tokens=lookup.hit,
            pending_tokens=lookup.pending,
        )

    def plan(self, blocks_used: int, blocks_total: int) -> None:
        """Note the blocks of a plan."""
        self.pool_blocks = blocks_total or self.pool_blocks
        self.peak_blocks = max(self.peak_blocks, blocks_used)

    def computed(
        self, facts: CacheFacts, chunk: Chunk, *, start_ns: int, end_ns: int, step_ns: int
    ) -> None:
        """Add a chunk of a step.

        Args:
            facts: the request that it belongs to.
            chunk: its tokens and time.
            start_ns: start of the step.
            end_ns: end of the step.
            step_ns: measured time of the step on all ranks, as `chunk.share_ns`.
        """
        facts.chunks.append(chunk)
        share = chunk.share_ns / max(1, step_ns)
        self._computed.append(
            _Computed(start_ns, end_ns, facts, chunk.tokens, chunk.context, share)
        )
        if len(self._computed) >= 2 * _MOST_CHUNKS:
            del self._computed[:_MOST_CHUNKS]

    # --- results ------------------------------------------------------------------------------

    def use_of(
        self,
        facts: CacheFacts,
        *,
        prompt_tokens: int | None,
        declared: tuple[tuple[str, int], ...],
        prefill_ns: int,
        recomputed_ns: int,
        ttft_own_ns: int | None,
        queued_ns: tuple[int, int] | None,
        queue_ns: int | None,
    ) -> CacheUse | None:
        """Return the use of the cache by a request; None if its core did not report it.

        Args:
            facts: its records.
            prompt_tokens: length of its prompt; None to take the lookup's.
            declared: declared parts of its prompt.
            prefill_ns: its share of prefill.
            recomputed_ns: part of that repeated after preemptions.
            ttft_own_ns: `prefill_own` before its first token; None if unknown.
            queued_ns: start and end of its wait in the queue; None if unknown.
            queue_ns: `queue` before its first token; None if unknown.
        """
        lookup, likeness = facts.lookup, facts.likeness
        if lookup is None:
            return None
        by_core = {name: getattr(lookup, name) for name in LOOKUP_CLASSES}
        num_tokens = sum(by_core.values()) if prompt_tokens is None else prompt_tokens
        if num_tokens <= 0:
            return None
        block_tokens = facts.block_tokens or self.block_tokens
        compared = None
        if likeness is not None:
            compared = Likeness(max(0, likeness.diverged_at), likeness.spans, likeness.differs != 0)
        spans = cache_spans(num_tokens, by_core, compared, block_tokens=block_tokens)
        use = CacheUse(
            segments=cache_segments(
                spans,
                facts.chunks,
                declared=declared,
                prefill_ns=prefill_ns - recomputed_ns,
                ttft_own_ns=ttft_own_ns,
            ),
            at_ns=lookup.t_ns,
            recomputed_ns=recomputed_ns,
            queue_evicted_ns=self._queue_evicted_ns(queued_ns, queue_ns),
            evictor=copy(facts.evictor) if lookup.evicted else None,
            evictors=tuple(map(copy, facts.evictors)),
            num_evictors=lookup.num_evictors,
            evicted_ns=lookup.evicted_ns,
            is_inferred=lookup.is_inferred,
            twin=copy(facts.twin) if lookup.pending else None,
            off_reason=lookup.off_reason,
            difference=_difference(facts, declared, num_tokens),
            below_block_tokens=_below_block(lookup, likeness, block_tokens),
            block_tokens=block_tokens,
        )
        self._add(use)
        return use

    def _add(self, use: CacheUse) -> None:
        for name, num in use.tokens.items():
            self.tokens[name] += num
        for name, ns in (use.gpu_ns or {}).items():
            self.gpu_ns[name] += ns

    def _queue_evicted_ns(
        self, queued_ns: tuple[int, int] | None, queue_ns: int | None
    ) -> int | None:
        """Return the part of a wait in which evicted tokens were recomputed."""
        if queued_ns is None or queue_ns is None:
            return None
        if not queue_ns:
            return 0
        since_ns, until_ns = queued_ns
        chunks, waited_ns = self._computed, 0.0
        first = bisect_right(chunks, since_ns, key=_end_ns)
        if first == 0 and len(chunks) >= _MOST_CHUNKS:
            return None  # older ones are forgotten
        for each in islice(chunks, first, None):
            if each.start_ns >= until_ns:
                break
            overlap_ns = min(each.end_ns, until_ns) - max(each.start_ns, since_ns)
            waited_ns += max(0, overlap_ns) * each.share * _evicted_share(each)
        return min(round(waited_ns), queue_ns)

    def view(self) -> CacheView | None:
        """Return the use of the cache so far; None without a request whose use is known."""
        tokens = {name: num for name, num in self.tokens.items() if num}
        if not tokens:
            return None
        return CacheView(tokens, {name: self.gpu_ns[name] for name in tokens}, self.curve())

    def curve(self, tenant: str | None = None) -> Curve | None:
        """Return the miss-ratio curve of one or all tenants; None without samples."""
        replicas = list(self._replicas.values())
        return curve(replicas, peak_blocks=self.peak_blocks, tenant=tenant) if replicas else None

    def curves_by_tenant(self) -> dict[str, Curve]:
        """Return the curve of each tenant of the shared cache."""
        tenants = {name for each in self._replicas.values() for name in each.tenants} - {""}
        found = {tenant: self.curve(tenant) for tenant in sorted(tenants)}
        return {tenant: of for tenant, of in found.items() if of is not None}


def _end_ns(computed: _Computed) -> int:
    return computed.end_ns


def _evicted_share(computed: _Computed) -> float:
    """Return the share of a chunk's tokens that had been evicted."""
    lookup = computed.facts.lookup
    if lookup is None or not lookup.evicted:
        return 0.0
    start = lookup.hit + lookup.off + lookup.cleared
    context, end = computed.context, computed.context + computed.tokens
    num = min(end, start + lookup.evicted) - max(context, start)
    return max(0, num) / max(1, computed.tokens)


def _difference(
    facts: CacheFacts, declared: tuple[tuple[str, int], ...], prompt_tokens: int
) -> PromptDifference | None:
    """Return how a prompt differs from the most similar earlier one; None without one."""
    likeness = facts.likeness
    if likeness is None:
        return None
    parts = part_spans(declared, prompt_tokens) if declared else []
    return PromptDifference(
        copy(facts.earlier),
        likeness.diverged_at,
        likeness.equal_again_at,
        likeness.shift,
        likeness.spans,
        tuple(name for bit, name in _DIFFERENCES if likeness.differs & bit),
        next((name for name, end in parts if end > likeness.diverged_at), ""),
    )


def _below_block(lookup: CacheLookup, likeness: PromptLikeness | None, block_tokens: int) -> int:
    """Return the tokens that are equal to an earlier prompt's and do not fill a block."""
    if likeness is None or not block_tokens:
        return 0
    explained = lookup.hit + lookup.off + lookup.cleared + lookup.evicted + lookup.pending
    equal = likeness.diverged_at
    return max(0, equal - max(explained, equal // block_tokens * block_tokens))
