"""Costs of a request other than time: by phase, by prompt part, and by use of the prefix cache.

None means unknown: counts need the model's shape, and savings need the cost model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import PromptCost, PromptPart
from inferscope.cost import Rates, StepModel, saved_ns
from inferscope.fold.cache_use import CacheUse
from inferscope.fold.final_records import CacheSavings, PhaseWork
from inferscope.fold.requests import Request, RequestTable
from inferscope.fold.work_totals import (
    COMPUTE_NS,
    READ_BYTES,
    TOKENS,
    WASTED_NS,
    WRITE_BYTES,
    WorkTotals,
)
from inferscope.records import CAUSES

Ints = NDArray[np.int64]

_PREFILL_OWN, _QUEUE = CAUSES.index("prefill_own"), CAUSES.index("queue")


def prompt_parts(
    request: Request, work: WorkTotals, ttft_row: Ints | None, *, has_flops: bool
) -> tuple[PromptPart, ...]:
    """Return the costs of a prompt's parts so far; none if it has no labels.

    Args:
        request: the request with the prompt.
        work: the totals of all requests.
        ttft_row: [causes], ledger up to the first token; None before it.
        has_flops: whether FLOPs are counted.
    """
    if not request.declared_parts:
        return ()
    cost = request.prompt_cost or PromptCost(request.declared_parts, request.prompt_tokens or 0)
    if cost.prompt_tokens != request.prompt_tokens:
        return ()  # its length was reported late, or never
    prefill, _ = work.of(request.slot)
    return cost.parts(
        prefill[COMPUTE_NS],
        cached_tokens=request.cached_tokens,
        ttft_own_ns=None if ttft_row is None else ttft_row.item(_PREFILL_OWN),
        has_flops=has_flops,
    )


def phase_work(amounts: list[int], rates: Rates | None) -> PhaseWork:
    """Return the tokens and bytes of one phase, from its columns of `WorkTotals`."""
    if rates is None:
        return PhaseWork(amounts[TOKENS])
    return PhaseWork(amounts[TOKENS], amounts[READ_BYTES], amounts[WRITE_BYTES])


def saved_by_cache(request: Request, rates: Rates | None, model: StepModel | None) -> CacheSavings:
    """Return the FLOPs and time that the prefix cache saved.

    Args:
        request: the request with the cached prompt.
        rates: rates of the model's shape; None if its work is not counted.
        model: current model of prefill time; None before the first prefill.
    """
    cached_tokens, prompt_tokens = request.cached_tokens, request.prompt_tokens
    if cached_tokens < 0 or (prompt_tokens is not None and cached_tokens > prompt_tokens):
        return CacheSavings()  # one of the two is wrong
    if not cached_tokens:
        return CacheSavings(None if rates is None else 0, 0)
    flops = None if rates is None else rates.saved_flops(cached_tokens)
    if prompt_tokens is None or model is None:
        return CacheSavings(flops)
    ns = saved_ns(model, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    return CacheSavings(flops, ns, model.fit_id)


def cache_use(
    request: Request, table: RequestTable, prefill: list[int], ttft_row: Ints | None
) -> CacheUse | None:
    """Return a request's use of the prefix cache; None if its core did not report it.

    Args:
        request: the final request.
        table: the table that holds it.
        prefill: its columns of `WorkTotals` in prefill.
        ttft_row: [causes], ledger up to the first token; None before it.
    """
    if request.cache is None:
        return None
    queued = None
    if request.queued_ns is not None and request.admitted_ns is not None:
        queued = request.queued_ns, request.admitted_ns
    return table.cache.use_of(
        request.cache,
        prompt_tokens=request.prompt_tokens,
        declared=request.declared_parts,
        prefill_ns=prefill[COMPUTE_NS],
        recomputed_ns=prefill[WASTED_NS],
        ttft_own_ns=None if ttft_row is None else ttft_row.item(_PREFILL_OWN),
        queued_ns=queued,
        queue_ns=None if ttft_row is None else ttft_row.item(_QUEUE),
    )
