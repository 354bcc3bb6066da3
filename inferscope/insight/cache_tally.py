"""Use of the prefix cache over a run, by class, tenant, prompt part or conversation.

A `CacheTally` is a sink of the fold. All sums are integers of final requests, so tokens sum to the
prompts, and prices to their attributed prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from inferscope.fold import Collector, Curve, FinalRequest, FinalStep
from inferscope.records import CACHE_CLASSES

CacheBy = Literal["cause", "tenant", "part", "conversation"]

_MOST_GROUPS = 10_000
"""Maximum number of groups of one kind; the requests of further ones are summed in one."""
OTHERS = "(others)"
"""Name of that group."""
_MOST_POSITIONS = 4096
_WIDTH_TOKENS = 16
"""Width in tokens of the bins that positions of difference are counted in."""


class ClassUse(msgspec.Struct):
    """Tokens and prices of one class."""

    tokens: int = 0
    """Prompt tokens."""
    gpu_ns: int = 0
    """Device time spent on them, as far as it is known."""
    ttft_ns: int = 0
    """Time before first tokens spent on them, as far as it is known."""

    def add(self, tokens: int, gpu_ns: int | None, ttft_ns: int | None) -> None:
        """Add tokens with their prices."""
        self.tokens += tokens
        self.gpu_ns += gpu_ns or 0
        self.ttft_ns += ttft_ns or 0


class Divergence(msgspec.Struct):
    """Prompts that differ from an earlier one at about one position."""

    position: int
    """First position of the bin, in tokens."""
    part: str
    """Declared part at the difference; empty without parts."""
    num_requests: int = 0
    """Requests that differ there."""
    changed_tokens: int = 0
    """Tokens behind the difference that were seen before."""
    gpu_ns: int = 0
    """Device time spent on these."""
    example: str = ""
    """One of the requests."""


class CacheGroup(msgspec.Struct):
    """Requests with one tenant, part or conversation."""

    name: str
    """Name of the group; empty if the records hold none."""
    num_requests: int = 0
    """Requests."""
    by_class: dict[str, ClassUse] = {}
    """Tokens and prices by class."""

    def add(self, cache: str, tokens: int, gpu_ns: int | None, ttft_ns: int | None) -> None:
        """Add tokens of one class."""
        use = self.by_class.get(cache)
        if use is None:
            use = self.by_class[cache] = ClassUse()
        use.add(tokens, gpu_ns, ttft_ns)

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all classes."""
        return sum(use.tokens for use in self.by_class.values())

    @property
    def hit_share(self) -> float | None:
        """Return the share of tokens from the cache; None without tokens."""
        whole = self.prompt_tokens
        hit = self.by_class.get("hit")
        return (0 if hit is None else hit.tokens) / whole if whole else None

    @property
    def miss_gpu_ns(self) -> int:
        """Return the device time spent on tokens that were not in the cache."""
        return sum(use.gpu_ns for use in self.by_class.values())


class EngineCache(msgspec.Struct):
    """Use of one engine's prefix cache over a run.

    Attributes:
        whole: all requests together.
        num_unknown: finished requests whose use of the cache was not recorded.
        num_unpriced: requests whose chunks are not all known; they have no price.
        queue_evicted_ns: time queued behind the recomputation of evicted tokens.
        below_block_tokens: tokens equal to an earlier prompt's that do not fill a block.
        num_reordered: requests whose seen tokens stand in several places.
        reordered_tokens: their changed tokens.
        evictor_tenants: evicted tokens by tenant of the evictor.
        off_reasons: tokens that were not looked up, by reason.
        differs: tokens in another namespace, by what separates it.
        block_tokens: tokens of a block; 0 if unknown.
    """

    whole: CacheGroup
    groups: dict[str, dict[str, CacheGroup]]
    divergences: dict[tuple[int, str], Divergence] = {}
    num_unknown: int = 0
    num_unpriced: int = 0
    queue_evicted_ns: int = 0
    below_block_tokens: int = 0
    num_below_block: int = 0
    num_reordered: int = 0
    reordered_tokens: int = 0
    reordered_gpu_ns: int = 0
    evictor_tenants: Counter[str] = Counter()
    off_reasons: Counter[str] = Counter()
    differs: Counter[str] = Counter()
    block_tokens: int = 0

    def add(self, request: FinalRequest) -> None:
        """Add a final request."""
        use = request.cache
        if use is None:
            self.num_unknown += 1
            return
        tenant, conversation = request.attributes.get("tenant", ""), request.conversation
        whole = [self.whole, self._group("tenant", tenant)]
        whole.append(self._group("conversation", conversation))
        for group in whole:
            group.num_requests += 1
        parts: set[str] = set()
        for each in use.segments:
            amounts = each.name, each.tokens, each.gpu_ns, each.ttft_ns
            for group in whole:
                group.add(*amounts)
            of_part = self._group("part", each.part)
            of_part.num_requests += each.part not in parts
            of_part.add(*amounts)
            parts.add(each.part)
        tokens, gpu_ns = use.tokens, use.gpu_ns
        self.num_unpriced += gpu_ns is None
        self.queue_evicted_ns += use.queue_evicted_ns or 0
        self.below_block_tokens += use.below_block_tokens
        self.num_below_block += use.below_block_tokens > 0
        self.block_tokens = use.block_tokens or self.block_tokens
        if use.evictor is not None:
            self.evictor_tenants[use.evictor.tenant] += tokens.get("evicted", 0)
        if use.off_reason:
            self.off_reasons[use.off_reason] += tokens.get("off", 0)
        difference, changed = use.difference, tokens.get("changed", 0)
        if difference is None:
            return
        if difference.differs and tokens.get("namespace"):
            self.differs[" and ".join(difference.differs)] += tokens["namespace"]
        if not changed:
            return
        changed_ns = (gpu_ns or {}).get("changed", 0)
        if use.is_reordered:
            self.num_reordered += 1
            self.reordered_tokens += changed
            self.reordered_gpu_ns += changed_ns
        self._diverge(request, difference.diverged_at, difference.part, changed, changed_ns)

    def _diverge(
        self, request: FinalRequest, position: int, part: str, changed: int, changed_ns: int
    ) -> None:
        key = position // _WIDTH_TOKENS * _WIDTH_TOKENS, part
        at = self.divergences.get(key)
        if at is None:
            if len(self.divergences) >= _MOST_POSITIONS:
                return
            at = self.divergences[key] = Divergence(*key)
        at.num_requests += 1
        at.changed_tokens += changed
        at.gpu_ns += changed_ns
        at.example = request.external_id or request.request_id

    def _group(self, kind: str, name: str) -> CacheGroup:
        groups = self.groups.setdefault(kind, {})
        if name not in groups and len(groups) >= _MOST_GROUPS:
            name = OTHERS
        if name not in groups:
            groups[name] = CacheGroup(name)
        return groups[name]

    def largest(self, by: CacheBy) -> list[CacheGroup]:
        """Return the groups of a kind, the largest price first."""
        if by == "cause":
            return []
        groups = self.groups.get(by, {}).values()
        return sorted(
            groups, key=lambda group: (-group.miss_gpu_ns, -group.prompt_tokens, group.name)
        )

    def worst_divergences(self, most: int) -> list[Divergence]:
        """Return the positions of difference with the largest price behind them."""
        found = self.divergences.values()
        order = sorted(found, key=lambda each: (-each.gpu_ns, -each.changed_tokens, each.position))
        return order[:most]


class CacheTally:
    """Sink that sums the use of the prefix cache of each engine.

    Attributes:
        engines: use by engine ID.
    """

    def __init__(self) -> None:
        self.engines: dict[str, EngineCache] = {}

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Add a final request."""
        if request.joined_late:
            return
        engine = self.engines.get(request.engine_id)
        if engine is None:
            engine = self.engines[request.engine_id] = EngineCache(CacheGroup(""), {})
        engine.add(request)


class CacheReport(msgspec.Struct, frozen=True):
    """Use of one engine's prefix cache, with its curve at the end of the run."""

    engine_id: str
    model: str
    use: EngineCache
    curve: Curve | None
    """Hit ratio by size of the KV cache; None without samples."""
    curves: Mapping[str, Curve]
    """The same by tenant, for tenants that the records name."""
    is_synthetic: bool = False


def cache_reports(tally: CacheTally, collector: Collector) -> list[CacheReport]:
    """Return a report for each engine with requests whose use of the cache is known."""
    reports = []
    for engine_id, use in tally.engines.items():
        engine = collector.engines.get(engine_id)
        if engine is None or not use.whole.num_requests:
            continue
        info, cache = engine.info, engine.lives.table.cache
        model = "" if info is None else info.served_name or info.model
        curves = cache.curves_by_tenant()
        reports.append(
            CacheReport(engine_id, model, use, cache.curve(), curves, engine.is_synthetic)
        )
    return reports


def in_order(by_class: Mapping[str, ClassUse]) -> list[tuple[str, ClassUse]]:
    """Return the classes that occur, in the order of tables."""
    return [(name, by_class[name]) for name in CACHE_CLASSES if name in by_class]
