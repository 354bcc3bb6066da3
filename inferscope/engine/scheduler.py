"""Scheduling: how many tokens each request computes in the next step.

A request has `todo = len(tokens) + len(draft) - computed` tokens left, and gets as many as the
token budget and the free KV blocks allow. Running requests come first, in order of admission, then
the queue. When a running request cannot get a block, the last admitted request is preempted: it
releases its blocks and returns to the head of the queue for recompute. A draft takes only what the
running requests behind it can spare.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from inferscope.engine.forensics import CacheForensics
from inferscope.engine.kv import NO_MATCH, ROOT, BlockPool, Match
from inferscope.engine.request import Request
from inferscope.records import Binding


class Slice(msgspec.Struct, frozen=True, gc=False):
    """One request's slice of a step: `num_tokens` tokens after `context` computed ones."""

    request: Request
    context: int
    num_tokens: int
    is_sampled: bool
    """Whether the slice ends at the request's last token, so that the next can be sampled."""
    num_drafts: int = 0
    """Number of its last tokens that are drafts; each of them has a row of logits as well."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Plan of one step.

    Attributes:
        admitted: Requests that took a sequence slot, including resumed ones.
        preempted: Requests that lost their blocks to earlier ones.
        binding: Limit that kept further work out of the step.
    """

    slices: list[Slice]
    num_tokens: int
    admitted: list[Request]
    preempted: list[Request]
    binding: Binding

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        return any(part.num_drafts for part in self.slices)


class Scheduler:
    """Scheduler of queued and running requests over one block pool.

    Attributes:
        may_admit: Condition besides blocks under which a queued request is admitted; None for none.
        forensics: Observer of published blocks; None for none.
    """

    def __init__(
        self, pool: BlockPool, *, token_budget: int, max_running: int, prefix_cache: bool
    ) -> None:
        self.pool = pool
        self.may_admit: Callable[[Request], bool] | None = None
        self.forensics: CacheForensics | None = None
        # Ordered, with removal of any request in O(1).
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running: list[Request] = []
        self._token_budget = token_budget
        self._max_running = max_running
        self._has_prefix_cache = prefix_cache
        self._free_sequence_slots = list(range(max_running - 1, -1, -1))
        self._head: tuple[Request, Match] | None = None
        """Last matched request and its match; None after its admission."""

    def enqueue(self, request: Request) -> None:
        """Append a request to the queue."""
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Remove a finished or cancelled request, queued or running, and release its blocks."""
        if request.sequence_slot < 0:
            del self.waiting[request]
            if self._head is not None and self._head[0] is request:
                self._head = None
        else:
            self.running.remove(request)
            self._vacate(request)

    def schedule(self) -> Plan:
        """Plan one step and allocate its blocks and sequence slots."""
        slices: list[Slice] = []
        admitted: list[Request] = []
        preempted: list[Request] = []
        left = self._plan_running(slices, preempted)
        binding: Binding = "blocks" if preempted else "none"
        while self.waiting and left and binding == "none":
            if len(self.running) == self._max_running:
                binding = "slots"
                break
            request = next(iter(self.waiting))
            match = self._match(request)
            if self._fits(request, match):
                self._admit(request, match)
                admitted.append(request)
                left -= self._plan_slice(request, left, slices, preempted)
            else:
                binding = "blocks"
        if binding == "none" and not left and self._has_more(slices):
            binding = "budget"
        return Plan(
            slices=slices,
            num_tokens=self._token_budget - left,
            admitted=admitted,
            preempted=preempted,
            binding=binding,
        )

    @property
    def has_room(self) -> bool:
        """Whether all running requests can compute their tokens without a preemption."""
        missing = sum(self.pool.blocks_for(len(r.tokens)) - len(r.blocks) for r in self.running)
        return missing <= self.pool.num_available

    def assume(self, launched: Slice) -> None:
        """Advance a request past a launched slice before its outcome is known (`overlap.py`)."""
        request = launched.request
        request.computed = launched.context + launched.num_tokens
        num_output = len(request.tokens) - request.num_prompt
        if launched.is_sampled and num_output + 1 < request.max_tokens:
            request.expect_token()

    def advance(self, done: Slice) -> None:
        """Advance a request past a computed slice and publish the blocks that it filled.

        Call it with the sampled tokens appended. The last of them is never computed, and rejected
        drafts behind it are forgotten: later tokens overwrite their keys and values.
        """
        request = done.request
        computed = min(done.context + done.num_tokens, len(request.tokens) - 1)
        if done.context < request.ever_computed:
            request.recomputed_tokens += min(computed, request.ever_computed) - done.context
        if computed > request.computed:
            request.computed = computed
        if computed > request.ever_computed:
            request.ever_computed = computed
        if not self._has_prefix_cache:
            return
        width = self.pool.block_tokens
        start = request.num_published
        while request.num_published < computed // width:
            at = request.num_published * width
            request.chain = self.pool.publish(
                request.blocks[request.num_published],
                chain=request.chain,
                tokens=tuple(request.tokens[at : at + width]),
            )
            request.num_published += 1
        if self.forensics is not None and request.num_published > start:
            self.forensics.published(request, start=start)

    def _plan_running(self, slices: list[Slice], preempted: list[Request]) -> int:
        left = self._token_budget
        # Preemption pops from the end of the list during the iteration, which a list allows.
        for place, request in enumerate(self.running, 1):
            if not request.todo:  # the step under way samples its last token
                continue
            if request.draft:
                self._cut_draft(request, left, num_behind=len(self.running) - place)
            num_tokens = self._plan_slice(request, left, slices, preempted)
            if not num_tokens:
                break
            left -= num_tokens
        return left

    def _cut_draft(self, request: Request, left: int, *, num_behind: int) -> None:
        """Cut a draft so that each request behind can have one token, and a block for it."""
        free = max(0, self.pool.num_available - num_behind)
        num_slots = (len(request.blocks) + free) * self.pool.block_tokens
        num_tokens = min(request.computed + left - num_behind, num_slots)
        del request.draft[max(0, num_tokens - len(request.tokens)) :]

    def _plan_slice(
        self, request: Request, left: int, slices: list[Slice], preempted: list[Request]
    ) -> int:
        """Add a slice within the remaining budget and return its number of tokens."""
        context, todo = request.computed, request.todo
        num_tokens = min(todo, left)
        missing = self.pool.blocks_for(context + num_tokens) - len(request.blocks)
        if missing > 0:
            if not self._preempt_for(missing, request, preempted):
                return 0
            request.blocks += self.pool.allocate(missing, index=request.index)
        if num_tokens:
            slices.append(
                Slice(
                    request=request,
                    context=context,
                    num_tokens=num_tokens,
                    is_sampled=num_tokens == todo,
                    num_drafts=len(request.draft),
                )
            )
        return num_tokens

    def _preempt_for(self, missing: int, request: Request, preempted: list[Request]) -> bool:
        """Preempt from the end until blocks are free; return False if `request` was preempted."""
        while missing > self.pool.num_available:
            victim = self.running.pop()
            self._vacate(victim)
            victim.computed = 0
            victim.draft = []
            self.waiting[victim] = None
            self.waiting.move_to_end(victim, last=False)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _match(self, request: Request) -> Match:
        if not self._has_prefix_cache:
            return NO_MATCH
        if self._head is not None:
            known, match = self._head
            if known is request and self.pool.is_current(match):
                return match
        # The last token is always computed: the next one is sampled from its logits.
        num_reusable = len(request.tokens) - 1
        max_blocks = num_reusable // self.pool.block_tokens
        match = self.pool.match(request.tokens, max_blocks=max_blocks, root=request.root)
        self._head = request, match
        return match

    def _fits(self, request: Request, match: Match) -> bool:
        if self.may_admit is not None and not self.may_admit(request):
            return False
        # All known tokens must fit, not only the first chunk, plus one block for each running
        # request. Otherwise it would be preempted within a few steps, and its work lost.
        missing = self.pool.blocks_for(len(request.tokens)) - len(match.blocks)
        return missing + match.num_cached + len(self.running) <= self.pool.num_available

    def _admit(self, request: Request, match: Match) -> None:
        del self.waiting[request]
        self._head = None
        self.pool.acquire(match.blocks)
        request.blocks = list(match.blocks)
        request.chain = match.chain
        request.num_published = len(match.blocks)
        found = len(match.blocks) * self.pool.block_tokens
        if request.received is not None:  # its first slice allocates their blocks
            found = max(found, request.received.handle.num_tokens)
        request.computed = found
        # After a preemption, only tokens that were never computed count as cached.
        request.cached_tokens += max(0, found - request.ever_computed)
        request.ever_computed = max(request.ever_computed, found)
        request.sequence_slot = self._free_sequence_slots.pop()
        self.running.append(request)

    def _vacate(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.chain = ROOT
        request.num_published = 0
        self._free_sequence_slots.append(request.sequence_slot)
        request.sequence_slot = -1

    def _has_more(self, slices: list[Slice]) -> bool:
        num_due = sum(request.todo > 0 for request in self.running)
        is_cut = len(slices) < num_due or not all(part.is_sampled for part in slices)
        return is_cut or bool(self.waiting)
