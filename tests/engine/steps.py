"""Helpers for a scheduler without an engine, with a model that always returns token 0."""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.engine.kv import BlockPool
from inferscope.engine.request import Request, Sampling
from inferscope.engine.scheduler import Plan, Scheduler
from inferscope.records import RequestIndex

WIDTH = 4


def make_request(index: int, prompt: Sequence[int], *, max_tokens: int = 8) -> Request:
    return Request(
        index=RequestIndex(index),
        request_id=str(index),
        tokens=list(prompt),
        num_prompt=len(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(max_tokens=max_tokens),
        stop_ids=frozenset(),
        seed=0,
    )


def make_scheduler(
    *, num_blocks: int = 64, token_budget: int = 32, max_running: int = 4, prefix_cache: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks, block_tokens=WIDTH)
    return Scheduler(
        pool, token_budget=token_budget, max_running=max_running, prefix_cache=prefix_cache
    )


def commit(scheduler: Scheduler, plan: Plan) -> None:
    """Commit a plan as the engine does, with token 0 as every sampled token."""
    for part in plan.slices:
        if part.is_sampled:
            part.request.tokens.append(0)
        scheduler.advance(part)
    for part in plan.slices:
        if part.is_sampled and part.request.finish_after(0):
            scheduler.remove(part.request)
