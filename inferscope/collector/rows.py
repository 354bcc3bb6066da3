"""The rows of steps: whose they are, and what each computes, as columns of a whole window.

A row is one phase of one request in one step; a request in several phases of a step has several
rows there, and is one member of it. What is known of a step when it is joined is whose rows they
are (see `reading`); all else is read when its window is split, for all of its steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.step_table import RowsOfMembers, StepTable
from inferscope.records import COLUMNS, PREFILL, RECOMPUTED, StepSlices

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


class Sliced(Protocol):
    """A step whose rows are known."""

    slots: Ints
    """[rows]."""
    is_single: bool
    """Each row is of another request."""
    slices: StepSlices


class Columns:
    """The rows of some steps, one step after the other, and the members.

    Attributes:
        sizes: [steps], rows of each.
        ends: [steps], where its rows end.
        firsts: [steps], where they begin.
        slots: [rows].
        phases: [rows].
        is_prefill: [rows].
        tokens: [rows].
        contexts: [rows].
        sampled: [rows], rows of logits.
        flags: [rows].
        is_again: [rows], a prefill that was computed before and lost to a preemption.
        member: [rows], positions of their members; None where rows and members are the same.
        member_slots: [members].
        table: the members, as the cost model sees them.
    """

    def __init__(self, steps: Sequence[Sliced]) -> None:
        """Read the columns of steps, at least one."""
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
        """Return the table of some of the steps, and whose the members in it are.

        Args:
            chosen: steps, rising.
            num: of all steps.
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
        """Return where a step's rows are."""
        end = self.ends[step]
        return slice(end - self.sizes.item(step), end)


def _column(raws: list[bytes], name: str, sizes: list[int]) -> NDArray[np.generic]:
    """Return a column of all steps; zeros where a step has none."""
    dtype = np.dtype(COLUMNS[name])
    width = dtype.itemsize
    whole = b"".join([raw or bytes(width * size) for raw, size in zip(raws, sizes, strict=True)])
    return np.frombuffer(whole, dtype=dtype)
