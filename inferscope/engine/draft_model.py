"""Proposals of a small model whose keys and values lie in the same blocks as the target's.

Each model has a KV pool, and both use one block table: a block holds the same tokens in both. The
draft model so follows the target's chunks, prefix hits and preemptions without state of its own.
Before each step of the target it reads what the target is about to read, then generates the drafts
one by one. It chooses the tokens of a sampled request with the random numbers that the target will
use, so similar distributions choose the same token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.speculative import draft_start
from inferscope.probe import Probe

if TYPE_CHECKING:
    from inferscope.engine.runner import Runner


class DraftModel:
    """Proposer of drafts by a second model."""

    def __init__(self, runner: Runner) -> None:
        """Set the runner of the draft model; its pool has the blocks of the target's."""
        self._runner = runner

    def propose(self, step: int, plan: Plan, probe: Probe) -> None:
        """Set the drafts of a plan's requests; the probe times all passes as one step."""
        num_wanted = {part.request.sequence_slot: part.num_drafts for part in plan.slices}
        for part in plan.slices:
            part.request.draft = []
        batch = self._runner.prepare(_first_pass(plan))
        probe.start(step, mode="draft", cold=batch.is_cold)
        while True:
            chosen = self._runner.execute(batch).tolist()
            following = []
            for part, token in zip(batch.sampled, chosen, strict=True):
                draft = part.request.draft
                draft.append(token)
                if len(draft) < num_wanted[part.request.sequence_slot]:
                    end = part.context + part.num_tokens
                    following.append(Slice(part.request, end, 1, is_sampled=True))
            if not following:
                break
            batch = self._runner.prepare(_plan(following))
        probe.stop(step)


def _first_pass(plan: Plan) -> Plan:
    """Return the slices that the draft model reads, of known tokens only."""
    slices = []
    for part in plan.slices:
        start, end = draft_start(part), part.context + part.num_tokens - part.num_drafts
        slices.append(Slice(part.request, start, end - start, is_sampled=part.num_drafts > 0))
    return _plan(slices, plan)


def _plan(slices: list[Slice], of: Plan | None = None) -> Plan:
    return Plan(
        slices=slices,
        num_tokens=sum(part.num_tokens for part in slices),
        admitted=[] if of is None else of.admitted,
        preempted=[],
        binding="none",
    )
