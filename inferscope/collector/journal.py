"""What requests computed, in the order in which it was booked, until somebody sums it up.

Counters need it by request and tenth of a second. `Work` knows what each request has computed so
far, and to ask that of all of them ten times a second costs more than all else of the join. So as
long as counters are read, it hands on what it books. Nothing is copied: these arrays do not change
afterwards.

    rows │ rows │ rows │ rows │ rows │ ...        summed up at once, for all tenths
    ◄──── tenth 7 ────►◄─ tenth 8 ─
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_TOTALLED = 3
"""Time, bytes read, bytes written."""


class Journal:
    """What was booked since it was last summed up.

    Attributes:
        rows: slots, phases, and time and bytes of steps, [rows] and [rows, NUM_TOTALLED].
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Ints, Ints, Ints]] = []

    def sum_up(self, ends: Sequence[int], num_slots: int) -> tuple[Ints, Floats]:
        """Return what was computed in some tenths, and forget it.

        Args:
            ends: of each of them, where they end; the first begins where the journal does.
            num_slots: that there are.

        Returns:
            the slots that somebody computed in, ascending; and [tenths, these, phases · 3], whole
            numbers.
        """
        tenths = _tenths(ends)
        rows = self.rows[: len(tenths)]
        del self.rows[: len(rows)]
        num_tenths = len(ends)
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros((num_tenths, 0, 2 * NUM_TOTALLED))
        slots, phases, amounts = map(np.concatenate, zip(*rows, strict=True))
        tenth = np.repeat(tenths, [len(each) for each, _, _ in rows])
        keys = (phases * num_tenths + tenth) * num_slots + slots
        num_keys = 2 * num_tenths * num_slots
        # Floats hold them exactly up to 2**53, in whatever order they are added up.
        sums = np.array([np.bincount(keys, column, num_keys) for column in amounts.T])
        sums = sums.reshape(NUM_TOTALLED, 2, num_tenths, num_slots)
        (there,) = np.logical_or.reduce(sums, axis=(0, 1, 2)).nonzero()
        found = sums.take(there, axis=3).transpose(2, 3, 1, 0)
        return there, found.reshape(num_tenths, len(there), -1)


def _tenths(ends: Sequence[int]) -> list[int]:
    """Return for each entry of what tenth it is."""
    found: list[int] = []
    for at, end in enumerate(ends):
        found += [at] * (end - len(found))
    return found
