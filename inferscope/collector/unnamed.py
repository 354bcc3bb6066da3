"""Steps whose requests nobody on this host can name: ranks of an engine whose core is elsewhere.

Their slices are in the core's ring, on another host. A rank itself knows how many tokens it
computed for prefills and how many for others. So a step of one phase is of that phase; one of both
is divided by the cost model, as one prompt's chunk beside decodes that have nothing behind them,
for how much they have is not known here.
"""

from __future__ import annotations

import numpy as np

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.split import parts_ns, price
from inferscope.collector.finals import RemoteWork
from inferscope.collector.rows import NO_ROWS
from inferscope.collector.steps import Execution, SplitStep
from inferscope.cost.book import CostBook
from inferscope.cost.step_table import StepTable

_MOST_TOKENS = 1 << 20
"""In a step: more is damage."""


def divide(book: CostBook, run: Execution) -> tuple[SplitStep, list[RemoteWork]]:
    """Divide a step by phase; where its ranks do not say what they computed it is of none.

    Args:
        book: the models in force; it does not learn from such a step.
        run: its execution.

    Returns:
        its time, of no request; and by rank, what of it was for prefills and for others.
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
    split = _of_nobody(
        run, paddings, nothing_ns, residual, model.fit_id, is_provisional=model.is_provisional
    )
    return split, unnamed


def among_none(run: Execution) -> SplitStep:
    """Return the split of a step that worked for no request, or for nobody knows what."""
    measured_ns = [rank.measured_ns for rank in run.ranks]
    return _of_nobody(run, [0 for _ in run.ranks], measured_ns, 0.0, "")


def _of_nobody(
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
