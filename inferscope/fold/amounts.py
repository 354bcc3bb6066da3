"""Modelled FLOPs and bytes of the rows of a window's steps, as columns.

A row is one phase of one request in one step. Decode, prefill, drafting and verification count
alike, except for wasted tokens, and for drafts, which another model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import plain_shares, round_ns, weight_shares
from inferscope.cost import Rates, WeightBytes
from inferscope.fold.rows import Columns
from inferscope.fold.work_totals import (
    COMPUTE_NS,
    DRAFT_NS,
    DRAFT_TOKENS,
    FLOPS,
    NUM_COLUMNS,
    PROPOSED_TOKENS,
    READ_BYTES,
    TOKENS,
    WASTED_NS,
    WASTED_TOKENS,
    WRITE_BYTES,
)
from inferscope.records import COLUMNS, DRAFT, StepSlices

Ints = NDArray[np.int64]


class Counted(NamedTuple):
    """Amounts that the rows of some steps compute."""

    phases: Ints
    """[rows], 0 for prefill and 1 for decode."""
    amounts: Ints
    """[columns, rows]."""
    moved: Ints
    """[steps, 6], in the layout of `Moved`."""


def count_rows(
    columns: Columns, shares_ns: Ints, slices: Sequence[StepSlices], rates: Rates | None
) -> Counted:
    """Return the amounts that the rows of split steps compute.

    Args:
        columns: the rows.
        shares_ns: [rows], time over all ranks.
        slices: [steps], their recorded slices.
        rates: rates of the model's shape; None if its work is not counted.
    """
    tokens, contexts, sampled = columns.tokens, columns.contexts, columns.sampled
    amounts = np.zeros((NUM_COLUMNS, len(tokens)), dtype=np.int64)
    amounts[COMPUTE_NS], amounts[TOKENS] = shares_ns, tokens
    if rates is not None:
        amounts[FLOPS] = rates.flops.of_slices(tokens, contexts, sampled)
        amounts[READ_BYTES] = rates.hbm.reads(tokens, contexts, sampled)
        amounts[WRITE_BYTES] = rates.hbm.writes(tokens, sampled)
    wasted = np.where(columns.is_again, tokens, 0)
    for at, of in enumerate(slices):
        if of.proposed:
            rows = columns.rows(at)
            proposed, rejected = verified_tokens(of, tokens[rows])
            amounts[PROPOSED_TOKENS, rows] = proposed
            wasted[rows] = np.where(columns.is_again[rows], tokens[rows], rejected)
    if wasted.any():
        amounts[WASTED_TOKENS] = wasted
        amounts[WASTED_NS] = shares_ns * wasted // np.maximum(tokens, 1)
    drafts = columns.phases == DRAFT
    if drafts.any():
        amounts[FLOPS : WRITE_BYTES + 1, drafts] = 0
        amounts[DRAFT_TOKENS, drafts], amounts[DRAFT_NS, drafts] = tokens[drafts], shares_ns[drafts]
        amounts[TOKENS, drafts] = 0
    if rates is not None:
        amounts[READ_BYTES] += _weights(columns, amounts[TOKENS], rates.hbm.weights)
    first = columns.firsts
    of_rows = amounts[[READ_BYTES, WRITE_BYTES, FLOPS]]
    moved = np.zeros((3, 2, len(first)), dtype=np.int64)
    moved[:, 1] = np.add.reduceat(of_rows, first, axis=1)
    if columns.is_prefill.any():
        moved[:, 0] = np.add.reduceat(of_rows * columns.is_prefill, first, axis=1)
        moved[:, 1] -= moved[:, 0]
    return Counted(1 - columns.is_prefill, amounts, moved.reshape(6, -1).T)


def verified_tokens(slices: StepSlices, tokens: Ints) -> tuple[Ints, Ints]:
    """Return each row's draft tokens that the target model verified, and those it rejected."""
    num, dtype = len(tokens), np.dtype(COLUMNS["proposed"])
    size = num * dtype.itemsize
    if len(slices.proposed) != size or len(slices.accepted) not in (0, size):
        none = np.zeros(num, dtype=np.int64)
        return none, none  # no proposals, or their rows are unknown
    proposed = np.frombuffer(slices.proposed, dtype=dtype).astype(np.int64)
    accepted = np.frombuffer(slices.accepted, dtype=dtype) if slices.accepted else 0
    rejected: Ints = np.clip(proposed - accepted, 0, tokens)
    return proposed, rejected


def _weights(columns: Columns, tokens: Ints, weights: WeightBytes) -> Ints:
    """Return the weight bytes that each row reads, by its tokens of this model: [rows]."""
    is_whole = tokens > 0
    if columns.member is None and is_whole.all():
        return plain_shares(weights, columns.table)
    shares = np.zeros_like(tokens)
    table, member = columns.table, columns.member
    for step in range(len(table)):
        rows, of = columns.rows(step), table.span(step, step + 1)
        by_member, sampled = tokens[rows], table.sampled[of]
        if member is not None:
            at = member[rows] - of.start
            by_member = np.bincount(at, by_member, of.stop - of.start).astype(np.int64)
        of_step = weight_shares(weights, by_member, sampled)
        if member is not None:
            per_token = of_step / np.maximum(by_member, 1)
            of_step = round_ns(per_token[at] * tokens[rows], int(of_step.sum()))
        shares[rows] = of_step
    return shares
