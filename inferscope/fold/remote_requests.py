"""Steps whose requests are unknown on this host: ranks of an engine whose core is on another host.

Their slices are in the core's ring, on another host. A rank itself reports how many tokens it
computed for prefills and how many for others. A step of one phase belongs to that phase. A step of
both is divided by the cost model, as one prompt's chunk and decodes without context: their contexts
are unknown here.
"""

from __future__ import annotations

import numpy as np

from inferscope.attribution import Delay, parts_ns, price
from inferscope.cost import CostBook, StepTable
from inferscope.fold.final_records import RemoteWork
from inferscope.fold.rows import NO_ROWS
from inferscope.fold.steps import Execution, SplitStep

_MOST_TOKENS = 1 << 20
"""Maximum number of tokens in a step; more is treated as damage."""


def divide(book: CostBook, run: Execution) -> tuple[SplitStep, list[RemoteWork]]:
    """Divide a step by phase; a step without reported token counts belongs to neither phase.

    Args:
        book: cost models in force; they are not fitted to such a step.
        run: execution of the step.

    Returns:
        The split of its time without requests, and its prefill and decode parts by rank.
    """
    span = run.span
    prefill, decode = span.prefill_tokens, span.decode_tokens
    if prefill is None or not 0 < prefill + decode <= _MOST_TOKENS or min(prefill, decode) < 0:
        return among_none(run), [RemoteWork(0, 0, 0, 0) for _ in run.ranks]
    num_tokens = prefill + decode
    model = book.mode(span.mode).model
    tokens = np.ones(decode + bool(prefill), dtype=np.int64)
    tokens[0] = prefill or 1
    none = np.zeros_like(tokens)
    sizes = np.array([len(tokens)])
    priced = price(model, StepTable(tokens, none, none + 1, none > 0, sizes))
    modelled_ns = priced.modelled_ns.item()
    prefill_share = 0.0
    if prefill:
        prefill_share = (
            parts_ns(priced).item(0) / modelled_ns if modelled_ns > 0 and decode else 1.0
        )
    padding_share = 0.0
    if span.padded_tokens > num_tokens and modelled_ns > 0:
        extra_ns = model.f(span.padded_tokens) - model.f(num_tokens)
        padding_share = extra_ns / (modelled_ns + extra_ns)
    paddings, unnamed = [], []
    for rank in run.ranks:
        padding_ns = round(rank.measured_ns * padding_share)
        busy_ns = rank.measured_ns - padding_ns
        prefill_ns = min(busy_ns, round(busy_ns * prefill_share))
        paddings.append(padding_ns)
        unnamed.append(RemoteWork(prefill, prefill_ns, decode, busy_ns - prefill_ns))
    residual = run.delay_ns / modelled_ns - 1.0 if modelled_ns > 0 else 0.0
    nothing_ns = [0 for _ in run.ranks]
    split = _unattributed(
        run, paddings, nothing_ns, residual, model.fit_id, is_provisional=model.is_provisional
    )
    return split, unnamed


def among_none(run: Execution) -> SplitStep:
    """Return the split of a step whose requests do not exist or are unknown."""
    measured_ns = [rank.measured_ns for rank in run.ranks]
    return _unattributed(run, [0 for _ in run.ranks], measured_ns, 0.0, "")


def _unattributed(
    run: Execution,
    padding_ns: list[int],
    unattributed_ns: list[int],
    residual: float,
    fit_id: str,
    *,
    is_provisional: bool = False,
) -> SplitStep:
    none = NO_ROWS
    return SplitStep(
        shares_ns=[none for _ in run.ranks],
        padding_ns=padding_ns,
        unattributed_ns=unattributed_ns,
        residual=residual,
        fit_id=fit_id,
        slots=none,
        delay=Delay(none, None, [], 0, 0, 0, 0),
        is_provisional=is_provisional,
    )
