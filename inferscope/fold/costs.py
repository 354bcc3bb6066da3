"""Costs of a request other than time: by phase, by prompt part, and prefix-cache savings.

None means unknown: counts need the model's shape, and savings need the cost model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import PromptCost, PromptPart
from inferscope.cost import Rates, StepModel, saved_ns
from inferscope.fold.final_records import CacheSavings, PhaseWork
from inferscope.fold.requests import Request
from inferscope.fold.work_totals import COMPUTE_NS, READ_BYTES, TOKENS, WRITE_BYTES, WorkTotals
from inferscope.records import CAUSES

Ints = NDArray[np.int64]

_PREFILL_OWN = CAUSES.index("prefill_own")


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
