"""What the rows of a window's steps compute and move, by the model of FLOPs and bytes: as columns.

A row is one phase of one request in one step. Whether requests decode, prefill, draft or verify in
it makes no difference but for what is wasted, and for drafts, which are another model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.split import round_ns
from inferscope.attribution.weights import plain_shares, weight_shares
from inferscope.collector.counted_steps import Moved
from inferscope.collector.rows import Rows
from inferscope.collector.steps import Joined
from inferscope.collector.work import (
    COMPUTE_NS,
    DRAFT_NS,
    DRAFT_TOKENS,
    FLOPS,
    NUM_COLUMNS,
    READ_BYTES,
    TOKENS,
    WASTED_NS,
    WASTED_TOKENS,
    WRITE_BYTES,
)
from inferscope.cost.counts import Rates
from inferscope.records import COLUMNS, DRAFT, PREFILL, RECOMPUTED, StepSlices

Ints = NDArray[np.int64]


class Counted(NamedTuple):
    """The rows of some steps, one step after the other."""

    slots: Ints
    """[rows]."""
    phases: Ints
    """[rows], 0 for prefill and 1 for decode."""
    amounts: Ints
    """[columns, rows]."""
    ends: list[int]
    """[steps], of the rows of each."""
    moved: list[Moved]
    """[steps]."""


def count_rows(steps: Sequence[Joined], rates: Rates | None) -> Counted:
    """Return what the rows of split steps compute.

    Args:
        steps: at least one.
        rates: of the model's shape; None where its work is not counted.
    """
    rows = [step.rows for step in steps]
    sizes = np.array([len(each.slots) for each in rows])
    ends = sizes.cumsum()
    first = ends - sizes
    starts: list[int] = first.tolist()
    slots = np.concatenate([each.slots for each in rows])
    prefills = [start + at for start, of in zip(starts, rows, strict=True) for at in of.prefills]
    phases = np.ones(len(slots), dtype=np.int64)
    phases[prefills] = 0
    amounts = np.zeros((NUM_COLUMNS, len(slots)), dtype=np.int64)
    amounts[COMPUTE_NS] = np.concatenate([_of_all_ranks(step) for step in steps])
    amounts[TOKENS] = np.concatenate([each.tokens for each in rows])
    if rates is not None:
        sampled = [of.team.sampled if of.member_of_row is None else of.sampled for of in rows]
        own = amounts[TOKENS], np.concatenate([s.contexts for s in steps]), np.concatenate(sampled)
        amounts[FLOPS] = rates.flops.of_slices(*own)
        amounts[READ_BYTES] = rates.hbm.reads(*own)
        amounts[WRITE_BYTES] = rates.hbm.writes(own[0], own[2])
        simple = [of.team for of in rows if of.is_simple]
        if simple:
            is_simple = np.repeat([of.is_simple for of in rows], sizes)
            amounts[READ_BYTES, is_simple] += plain_shares(rates.hbm.weights, simple)
    for step, start in zip(steps, starts, strict=True):
        if not step.rows.is_simple or step.rows.recomputed is not None:
            _separate(step, amounts[:, start : start + len(step.rows.slots)], rates)
    columns = amounts[[READ_BYTES, WRITE_BYTES, FLOPS]]
    moved = np.zeros((3, 2, len(steps)), dtype=np.int64)
    moved[:, 1] = np.add.reduceat(columns, first, axis=1)
    if prefills:
        of_prefills, step_of = moved[:, 0], ends.searchsorted(prefills, "right")
        for found, column in zip(of_prefills, columns[:, prefills], strict=True):
            np.add.at(found, step_of, column)
        moved[:, 1] -= of_prefills
    return Counted(slots, phases, amounts, ends.tolist(), moved.reshape(6, -1).T.tolist())


def _of_all_ranks(step: Joined) -> Ints:
    assert step.split is not None
    shares_ns = step.split.shares_ns
    whole: Ints = shares_ns[0] if len(shares_ns) == 1 else np.add.reduce(shares_ns)
    return whole


def _separate(step: Joined, amounts: Ints, rates: Rates | None) -> None:
    """Separate what of a step was wasted and what was drafted; add the weights it reads.

    Args:
        step: one that has recomputed tokens, or that is not simple.
        amounts: [columns, rows] of it.
        rates: of the model.
    """
    rows = step.rows
    phases, tokens = rows.phases, rows.tokens
    wasted = np.zeros(len(tokens), dtype=np.int64)
    if not rows.is_simple:
        wasted = rejected_tokens(step.slices, tokens)
    if rows.recomputed is not None:
        again = (phases == PREFILL) & ((rows.flags & RECOMPUTED) > 0)
        wasted = np.where(again, tokens, wasted)
    amounts[WASTED_TOKENS] = wasted
    amounts[WASTED_NS] = amounts[COMPUTE_NS] * wasted // np.maximum(tokens, 1)
    drafts = phases == DRAFT
    amounts[FLOPS : WRITE_BYTES + 1, drafts] = 0
    amounts[DRAFT_TOKENS, drafts] = tokens[drafts]
    amounts[DRAFT_NS, drafts] = amounts[COMPUTE_NS, drafts]
    amounts[TOKENS, drafts] = 0
    if rates is not None and not rows.is_simple:
        amounts[READ_BYTES] += _weights(rows, np.where(drafts, 0, tokens), rates)


def rejected_tokens(slices: StepSlices, tokens: Ints) -> Ints:
    """Return how many of each row's tokens were drafts that the target model did not take."""
    num, dtype = len(tokens), np.dtype(COLUMNS["proposed"])
    size = num * dtype.itemsize
    if len(slices.proposed) != size or len(slices.accepted) not in (0, size):
        return np.zeros(num, dtype=np.int64)  # nothing was proposed, or not known in which rows
    proposed = np.frombuffer(slices.proposed, dtype=dtype).astype(np.int64)
    accepted = np.frombuffer(slices.accepted, dtype=dtype) if slices.accepted else 0
    rejected: Ints = np.clip(proposed - accepted, 0, tokens)
    return rejected


def _weights(rows: Rows, tokens: Ints, rates: Rates) -> Ints:
    """Return what each row reads of the weights, by the tokens that are of this model."""
    by_member, sampled = rows.by_member(tokens), rows.by_member(rows.sampled)
    shares = weight_shares(rates.hbm.weights, by_member, sampled)
    if rows.member_of_row is not None:
        per_token = shares / np.maximum(by_member, 1)
        shares = round_ns(per_token[rows.member_of_row] * tokens, int(shares.sum()))
    return shares
