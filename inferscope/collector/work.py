"""What was computed for each request, by phase: time, tokens, FLOPs, bytes, and what was wasted.

Decodes of one token are kept as sums: FLOPs and a slice's own bytes are linear in its context, so
the contexts' sum is all they need.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.collector.journal import Journal
from inferscope.cost.counts import Rates

Ints = NDArray[np.int64]

COMPUTE_NS, TOKENS, FLOPS, READ_BYTES, WRITE_BYTES = range(5)
WASTED_TOKENS, WASTED_NS = 5, 6
"""Of a prefill, computed before and lost to a preemption; of a decode, drafts not accepted."""
DRAFT_TOKENS, DRAFT_NS = 7, 8
"""Of the drafting, in a decode: not among the target model's tokens, FLOPs and bytes."""
NUM_COLUMNS = 9
TOTALLED = (COMPUTE_NS, READ_BYTES, WRITE_BYTES)
"""What the journal tells, for counters to be given out by."""
_SINGLES, _CONTEXTS, _SEEN, _SHARES_NS, _WEIGHTS = range(5)
"""Of decodes of one token: how many, the sum of their contexts, and as far as windows reach, their
time, and what they read of the weights. Their FLOPs and bytes follow, when somebody asks."""
_NUM_SUMS = 5

_EXACT = 1 << 53
"""Whole numbers below it are exact as floats."""


class Work:
    """Amounts by phase (prefill, decode), slot and column.

    Attributes:
        journal: takes all that is booked, None while nobody reads it.
    """

    def __init__(self, num_slots: int) -> None:
        self._cells = np.zeros((2, num_slots, NUM_COLUMNS), dtype=np.int64)
        self._singles = np.zeros((_NUM_SUMS, num_slots), dtype=np.int64)
        """What is to be added to the decodes."""
        self._rates: Rates | None = None
        self.journal: Journal | None = None

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self._cells[:, slot] = 0
        self._singles[:, slot] = 0

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        num_more = num_slots - self._singles.shape[1]
        none = np.zeros((2, num_more, NUM_COLUMNS), dtype=np.int64)
        self._cells = np.concatenate([self._cells, none], axis=1)
        no_sums = np.zeros((_NUM_SUMS, num_more), dtype=np.int64)
        self._singles = np.concatenate([self._singles, no_sums], axis=1)

    def decoded(
        self, slots: Ints, shares_ns: Ints, contexts: Ints, weights: Ints, rates: Rates | None
    ) -> None:
        """Book decodes of one token, of any steps.

        Args:
            slots: [rows].
            shares_ns: [rows].
            contexts: [rows].
            weights: [rows], bytes that each read of the weights.
            rates: of the model's shape, None where it is not counted.
        """
        if rates is not self._rates:
            self._count_singles()
            self._rates = rates
        num = self._singles.shape[1]
        sums = self._singles
        sums[_SINGLES] += np.bincount(slots, minlength=num)
        sums[_CONTEXTS] += _by_slot(slots, contexts, num)
        sums[_SHARES_NS] += _by_slot(slots, shares_ns, num)
        if rates is None:
            reads = writes = np.zeros(len(slots), dtype=np.int64)
        else:
            seen = np.minimum(contexts, rates.window - 1) if rates.window else contexts
            if rates.window:
                sums[_SEEN] += _by_slot(slots, seen, num)
            sums[_WEIGHTS] += _by_slot(slots, weights, num)
        if self.journal is None:
            return
        if rates is not None:
            reads = weights + rates.hbm.reads_of_singles(1, contexts, seen)
            writes = np.full(len(slots), rates.hbm.writes(1, 1))
        totals = np.array((shares_ns, reads, writes)).T
        self.journal.rows.append((slots, np.ones(len(slots), dtype=np.int64), totals))

    def computed(self, slots: Ints, phases: Ints, amounts: Ints, *, is_once: bool) -> None:
        """Book rows of a step.

        Args:
            slots: [rows].
            phases: [rows], 0 for prefill and 1 for decode.
            amounts: [rows, columns].
            is_once: no slot is named twice.
        """
        if self.journal is not None:
            self.journal.rows.append((slots, phases, amounts[:, TOTALLED]))
        if is_once:
            self._cells[phases, slots] += amounts
        else:
            np.add.at(self._cells, (phases, slots), amounts)

    def _count_singles(self) -> None:
        """Count the decodes of all slots by the rates they were computed at: others come."""
        for slot in self._singles[_SINGLES].nonzero()[0].tolist():
            self._cells[:, slot] = self.of(slot)
        self._singles[:] = 0

    def of(self, slot: int) -> tuple[list[int], list[int]]:
        """Return a request's amounts by column, of prefill and of decode."""
        prefill, decode = self._cells[:, slot].tolist()
        num, contexts, seen, shares_ns, weights = self._singles[:, slot].tolist()
        decode[COMPUTE_NS] += shares_ns
        decode[TOKENS] += num
        if self._rates is not None:
            flops, hbm = self._rates
            decode[FLOPS] += flops.of_singles(num, contexts, seen)
            decode[READ_BYTES] += weights + hbm.reads_of_singles(num, contexts, seen)
            decode[WRITE_BYTES] += hbm.writes(num, num)
        return prefill, decode

    @property
    def compute_ns(self) -> Ints:
        """Return the attributed time: [slots, 2]."""
        compute_ns: Ints = self._cells[:, :, COMPUTE_NS].T.copy()
        compute_ns[:, 1] += self._singles[_SHARES_NS]
        return compute_ns


def _by_slot(slots: Ints, amounts: Ints, num_slots: int) -> Ints:
    """Sum rows' amounts, none negative, by slot: [slots]."""
    if int(amounts.max(initial=0)) < _EXACT // max(1, len(amounts)):
        return np.bincount(slots, amounts, num_slots).astype(np.int64)
    sums = np.zeros(num_slots, dtype=np.int64)
    np.add.at(sums, slots, amounts)
    return sums
