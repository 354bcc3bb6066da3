"""Computed work of each request by phase: time, tokens, FLOPs, bytes, and wasted work.

Counters also need it by request and 100 ms bucket. Reading every request's totals ten times a
second would cost more than the rest of the join. So while counters are read, booked rows are kept
in a journal until they are summed, for many buckets at once:

    rows │ rows │ rows │ rows │ rows │ ...
    ◄─── bucket 7 ────►◄─ bucket 8 ─
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMPUTE_NS, TOKENS, FLOPS, READ_BYTES, WRITE_BYTES = range(5)
WASTED_TOKENS, WASTED_NS = 5, 6
"""Columns of wasted work: recomputed tokens of a prefill, rejected drafts of a decode."""
DRAFT_TOKENS, DRAFT_NS = 7, 8
"""Columns of drafting in a decode, separate from the target model's tokens, FLOPs and bytes."""
PROPOSED_TOKENS = 9
"""Column of draft tokens that the target model verified in a decode."""
NUM_COLUMNS = 10
TOTALLED = (COMPUTE_NS, READ_BYTES, WRITE_BYTES)
"""Columns in the journal, by which counters are apportioned."""
NUM_TOTALLED = len(TOTALLED)


class WorkTotals:
    """Amounts by phase (prefill, decode), slot and column.

    Attributes:
        journal: journal of all booked rows; None while it has no reader.
    """

    def __init__(self, num_slots: int) -> None:
        self._cells = np.zeros((NUM_COLUMNS, 2, num_slots), dtype=np.int64)
        self.journal: Journal | None = None

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self._cells[:, :, slot] = 0

    def grow(self, num_slots: int) -> None:
        """Enlarge the columns to this number of slots."""
        none = np.zeros((NUM_COLUMNS, 2, num_slots - self._cells.shape[2]), dtype=np.int64)
        self._cells = np.concatenate([self._cells, none], axis=2)

    def computed(self, slots: Ints, phases: Ints, amounts: Ints) -> None:
        """Book rows of some steps.

        Args:
            slots: slots of the requests, [rows].
            phases: 0 for prefill and 1 for decode, [rows].
            amounts: amounts to add, [columns, rows].
        """
        if self.journal is not None:
            self.journal.rows.append((slots, phases, amounts[list(TOTALLED)]))
        at = phases * self._cells.shape[2] + slots
        for cells, column in zip(self._cells.reshape(NUM_COLUMNS, -1), amounts, strict=True):
            if column.any():
                np.add.at(cells, at, column)

    def of(self, slot: int) -> tuple[list[int], list[int]]:
        """Return a request's amounts by column, for prefill and for decode."""
        prefill, decode = self._cells[:, :, slot].T.tolist()
        return prefill, decode


class Journal:
    """Rows booked since the last sum.

    Attributes:
        rows: slots and phases, [rows], and totalled amounts, [NUM_TOTALLED, rows].
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Ints, Ints, Ints]] = []

    def sum_up(self, ends: Sequence[int], num_slots: int) -> tuple[Ints, Floats]:
        """Remove the rows of some buckets; return their sums.

        Args:
            ends: number of journal rows at the end of each bucket; the first bucket begins at 0.
            num_slots: number of slots.

        Returns:
            Slots with any amount, ascending; and their amounts, [buckets, these slots, phases · 3],
            whole numbers.
        """
        buckets = _places(ends)
        rows = self.rows[: len(buckets)]
        del self.rows[: len(rows)]
        num_buckets = len(ends)
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros((num_buckets, 0, 2 * NUM_TOTALLED))
        slots, phases = (np.concatenate([of[at] for of in rows]) for at in (0, 1))
        amounts = np.concatenate([of for _, _, of in rows], axis=1)
        bucket = np.repeat(buckets, [len(each) for each, _, _ in rows])
        keys = (phases * num_buckets + bucket) * num_slots + slots
        num_keys = 2 * num_buckets * num_slots
        # Floats hold the sums exactly up to 2**53, in any order of addition.
        sums = np.array([np.bincount(keys, column, num_keys) for column in amounts])
        sums = sums.reshape(NUM_TOTALLED, 2, num_buckets, num_slots)
        (there,) = np.logical_or.reduce(sums, axis=(0, 1, 2)).nonzero()
        found = sums.take(there, axis=3).transpose(2, 3, 1, 0)
        return there, found.reshape(num_buckets, len(there), -1)


def _places(ends: Sequence[int]) -> list[int]:
    """Return the bucket of each entry."""
    found: list[int] = []
    for at, end in enumerate(ends):
        found += [at] * (end - len(found))
    return found
