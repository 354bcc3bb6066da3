"""Sums of steps by kind: prefill only, decode only, and mixed. They place a step on the roofline.

A step of one phase measures that phase's time by itself, so its rates need no division of the step.
Cold steps are left out: they time compilation and captures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferscope.cost import Rates, visible
from inferscope.fold.amounts import Counted
from inferscope.fold.rows import Columns
from inferscope.fold.snapshots import KindSums
from inferscope.fold.steps import Joined
from inferscope.records import DRAFT

Ints = NDArray[np.int64]

KINDS = ("prefill", "decode", "mixed")
NUM_SUMS = len(KindSums.__struct_fields__)
_FLOPS, _READ, _WRITE = slice(4, 6), slice(0, 2), slice(2, 4)
"""Columns of `Counted.moved`, prefill and decode."""


def kind_sums(
    steps: Sequence[Joined],
    columns: Columns,
    counted: Counted,
    rates: Rates | None,
    *,
    num_ranks: int,
) -> tuple[Ints, Ints]:
    """Return the kind of each step, and what it adds to the sums of its kind.

    Args:
        steps: split steps.
        columns: their rows.
        counted: what the rows compute.
        rates: rates of the model's shape; None if its work is not counted.
        num_ranks: number of ranks that compute a step, each an equal part.

    Returns:
        Indices into KINDS, [steps], -1 for a cold step; and [steps, NUM_SUMS] in the order of the
        fields of KindSums.
    """
    runs = [step.run for step in steps]
    num_prefills = np.add.reduceat(columns.is_prefill, columns.firsts, dtype=np.int64)
    kinds = np.where(num_prefills == 0, 1, np.where(num_prefills == columns.sizes, 0, 2))
    kinds[[run.is_cold for run in runs]] = -1
    tokens = columns.tokens * (columns.phases != DRAFT)
    prefill_tokens = np.add.reduceat(tokens * columns.is_prefill, columns.firsts)
    moved = counted.moved
    seen = np.array([min(len(run.ranks), num_ranks) for run in runs])
    weights, kv = _weights_and_kv(columns, rates)

    def of_ranks(values: Ints) -> Ints:
        """Return the part of the ranks that reported the step."""
        scaled: Ints = values * seen // num_ranks
        return scaled

    sums = [
        np.ones(len(steps), dtype=np.int64),
        np.array([run.longest_ns for run in runs]),
        np.array([run.sum_ns for run in runs]),
        of_ranks(moved[:, _FLOPS].sum(axis=1)),
        of_ranks(moved[:, _READ].sum(axis=1)),
        of_ranks(moved[:, _WRITE].sum(axis=1)),
        of_ranks(weights),
        of_ranks(kv),
        prefill_tokens,
        np.add.reduceat(tokens, columns.firsts) - prefill_tokens,
        columns.table.sizes,
    ]
    return kinds, np.stack(sums, axis=1)


def _weights_and_kv(columns: Columns, rates: Rates | None) -> tuple[Ints, Ints]:
    """Return the bytes that each step reads for weights and for KV, over all ranks: [steps]."""
    none = np.zeros(len(columns.firsts), dtype=np.int64)
    if rates is None:
        return none, none
    hbm, weights = rates.hbm, rates.hbm.weights
    own = columns.phases != DRAFT  # another model's tokens read other weights
    tokens, contexts = columns.tokens * own, columns.contexts * own
    read = hbm.kv_per_token * visible(tokens, contexts)
    if hbm.window_kv_per_token:
        read = read + hbm.window_kv_per_token * visible(tokens, contexts, hbm.window)
    num_tokens = np.add.reduceat(tokens, columns.firsts)
    num_rows = np.add.reduceat(columns.sampled * own, columns.firsts)
    touched = 1 - (1 - weights.touch_share) ** num_tokens
    of_weights = (
        weights.layers * (num_tokens > 0)
        + np.rint(weights.experts * touched).astype(np.int64)
        + weights.head * (num_rows > 0)
    )
    return of_weights, np.add.reduceat(read, columns.firsts)
