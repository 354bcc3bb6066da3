"""Columns of the rows of all steps in a window: their requests, and what each row computes.

A row is one phase of one request in one step; a request in several phases of a step has several
rows there, and is one member of it. When a step is joined, only the slots of its rows are read (see
`reading`); the other columns are read when its window is split, for all of its steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferscope.cost import RowsOfMembers, StepTable
from inferscope.records import COLUMNS, PREFILL, RECOMPUTED, StepSlices

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class Sliced(Protocol):
    """Step with known rows."""

    slots: Ints
    """Slots of the requests, [rows]."""
    is_single: bool
    """Whether each row has a request of its own."""
    slices: StepSlices


class Columns:
    """Rows and members of some steps, one step after the other.

    Attributes:
        sizes: number of rows, [steps].
        ends: index after the last row, [steps].
        firsts: index of the first row, [steps].
        slots: slots of the requests, [rows].
        phases: phase codes, [rows].
        is_prefill: whether the phase is prefill, [rows].
        tokens: computed tokens, [rows].
        contexts: context tokens before them, [rows].
        sampled: rows of logits, [rows].
        flags: flag bits, [rows].
        is_again: whether a prefill recomputes tokens lost to a preemption, [rows].
        member: positions of the members, [rows]; None if rows and members are the same.
        member_slots: slots of the requests, [members].
        table: members, as input of the cost model.
    """

    def __init__(self, steps: Sequence[Sliced]) -> None:
        """Read the columns of at least one step."""
        slices = [step.slices for step in steps]
        sizes = [len(step.slots) for step in steps]
        self.sizes = np.array(sizes)
        ends = self.sizes.cumsum()
        self.ends: list[int] = ends.tolist()
        self.firsts: Ints = ends - self.sizes
        self.slots: Ints = np.concatenate([step.slots for step in steps])
        self.phases = _column([of.phases for of in slices], "phases", sizes).astype(np.uint8)
        self.is_prefill: Flags = self.phases == PREFILL
        self.tokens = _column([of.tokens for of in slices], "tokens", sizes).astype(np.int64)
        self.contexts = _column([of.contexts for of in slices], "contexts", sizes).astype(np.int64)
        self.sampled = _column([of.sampled for of in slices], "sampled", sizes).astype(np.int64)
        self.flags = _column([of.flags for of in slices], "flags", sizes).astype(np.uint8)
        self.is_again: Flags = self.is_prefill & ((self.flags & RECOMPUTED) > 0)
        again = np.where(self.is_again, self.tokens, 0) if self.is_again.any() else None
        self.member: Ints | None = None
        self.member_slots = self.slots
        if all(step.is_single for step in steps):
            self.table = StepTable(
                np.maximum(self.tokens, 1),
                self.contexts,
                self.sampled,
                self.is_prefill,
                self.sizes,
                recomputed=again,
            )
            return
        of_steps = [np.unique(step.slots, return_inverse=True) for step in steps]
        for at, step in enumerate(steps):
            if step.is_single:
                of_steps[at] = step.slots, np.arange(len(step.slots))
        num_members = np.array([len(slots) for slots, _ in of_steps])
        first = num_members.cumsum() - num_members
        self.member_slots = np.concatenate([slots for slots, _ in of_steps])
        self.member = member = np.concatenate([at for _, at in of_steps]) + np.repeat(
            first, self.sizes
        )
        contexts = np.full(len(self.member_slots), np.iinfo(np.int64).max)
        np.minimum.at(contexts, member, self.contexts)
        self.table = StepTable(
            np.maximum(self._summed(self.tokens), 1),
            contexts,
            self._summed(self.sampled),
            self._summed(self.is_prefill) > 0,
            num_members,
            recomputed=None if again is None else self._summed(again),
            rows=RowsOfMembers(member, self.tokens, self.sizes),
        )

    def _summed(self, values: NDArray[np.generic]) -> Ints:
        """Sum the rows' values by member."""
        sums = np.bincount(self.member, values, len(self.member_slots))  # type: ignore[arg-type]
        return sums.astype(np.int64)

    def steps(self, chosen: list[int], num: int) -> tuple[StepTable, Ints]:
        """Return the table of some of the steps, and the slots of its members.

        Args:
            chosen: indices of steps, ascending.
            num: number of all steps.
        """
        table = self.table
        if len(chosen) == num:
            return table, self.member_slots
        is_chosen = np.zeros(num, dtype=np.bool_)
        is_chosen[chosen] = True
        is_taken = is_chosen[table.step_of]
        at, rows, again = is_taken.nonzero()[0], table.rows, table.recomputed
        if rows is not None:
            of_rows = is_taken[rows.member]
            member = (is_taken.cumsum() - 1)[rows.member[of_rows]]
            rows = RowsOfMembers(member, rows.tokens[of_rows], rows.sizes[is_chosen])
        if again is not None:
            again = again[at]
        taken = table.taken(at, table.sizes[is_chosen], again=again, rows=rows)
        return taken, self.member_slots[at]

    def rows(self, step: int) -> slice:
        """Return the range of a step's rows."""
        end = self.ends[step]
        return slice(end - self.sizes.item(step), end)


def _column(raws: list[bytes], name: str, sizes: list[int]) -> NDArray[np.generic]:
    """Return a column of all steps, with zeros for steps without it."""
    dtype = np.dtype(COLUMNS[name])
    width = dtype.itemsize
    whole = b"".join([raw or bytes(width * size) for raw, size in zip(raws, sizes, strict=True)])
    return np.frombuffer(whole, dtype=dtype)
