"""Sums over the scheduler's plans, and over the beginnings of prompts, as the records tell them."""

from __future__ import annotations

from collections import Counter, OrderedDict

from inferscope.records import PREFIX_TOKENS, RequestEvent, StepPlan

_MOST_PREFIXES = 16_384
"""Beginnings that are remembered, the latest seen."""


class PlanStats:
    """What one engine's scheduler decided.

    Attributes:
        num: plans.
        num_with_queue: while requests waited.
        running_with_queue: summed over those.
        bindings: what bound those.
        peak_blocks_share: of the KV blocks, in use at most; None where blocks are not told.
        most_running: at once.
    """

    def __init__(self) -> None:
        self.num = self.num_with_queue = self.running_with_queue = self.most_running = 0
        self.bindings: Counter[str] = Counter()
        self.peak_blocks_share: float | None = None

    def add(self, plan: StepPlan) -> None:
        """Take a plan."""
        self.num += 1
        self.most_running = max(self.most_running, plan.running)
        if plan.waiting:
            self.num_with_queue += 1
            self.running_with_queue += plan.running
            self.bindings[plan.binding] += 1
        if plan.blocks_total:
            share = plan.blocks_used / plan.blocks_total
            self.peak_blocks_share = max(share, self.peak_blocks_share or 0.0)

    def bound_share(self, binding: str) -> float:
        """Return how many of the plans made while requests waited were bound by this."""
        return self.bindings[binding] / self.num_with_queue if self.num_with_queue else 0.0

    @property
    def queue_share(self) -> float:
        """Return how many of the plans left requests waiting."""
        return self.num_with_queue / self.num if self.num else 0.0


class PrefixStats:
    """How much of the prompts began like an earlier one, by digests of their beginnings.

    Attributes:
        num: prompts whose beginning is known.
        num_repeated: that began like an earlier one.
        repeated_tokens: of those, at least.
    """

    def __init__(self) -> None:
        self.num = self.num_repeated = self.repeated_tokens = 0
        self._seen: OrderedDict[int, None] = OrderedDict()

    def add(self, event: RequestEvent) -> None:
        """Take an event; it counts where it tells how a prompt begins."""
        digests = event.prefix_digests
        if not digests:
            return
        self.num += 1
        repeated = [
            tokens
            for tokens, digest in zip(PREFIX_TOKENS, digests, strict=False)
            if digest in self._seen
        ]
        if repeated:
            self.num_repeated += 1
            self.repeated_tokens += max(repeated)
        for digest in digests:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > _MOST_PREFIXES:
            self._seen.popitem(last=False)
