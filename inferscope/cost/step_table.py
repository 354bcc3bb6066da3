"""Many steps of one execution mode as columns, in the order of their starts.

A member is one request in one step; the members of a step stand together. Everything that the cost
model sees of a step is a sum over its members, so it is known for all steps after a few passes over
the columns. Where one request has several rows in a step (phases of its own), they are one member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_Number = TypeVar("_Number", np.float64, np.int64, np.bool_)


class RowsOfMembers(NamedTuple):
    """Rows of a table in which some request has several in one step."""

    member: Ints
    """[rows], position of each row's member in the table."""
    tokens: Ints
    """[rows], scheduled."""
    sizes: Ints
    """[steps], rows of each step."""


class StepTable:
    """Steps, at least one, of at least one member each.

    Attributes:
        tokens: [members], scheduled, each at least 1.
        context: [members], cached before.
        sampled: [members], rows of logits.
        is_prefill: [members]; the others decode.
        sizes: [steps], members of each step.
        first: [steps], position of each step's first member.
        step_of: [members].
        recomputed: [members], tokens lost to a preemption; None where there are none.
        rows: the rows, None where every member has one.
        row_sizes: [steps], rows of each step.
        visible: [members], context and new token; 0 for chunks.
        num_tokens: [steps], scheduled.
        num_rows: [steps], sampled.
        num_single: [steps], members with one token.
        is_plain: [steps], each of these samples one row.
        single_rows: [steps], sampled by them.
        sum_visible: [steps], of them.
        longest: [steps], the most that one of them has; 0 where there is none.
        chunks: [chunks], positions of the members with more than one token.
        chunk_step: [chunks].
        num_chunks: [steps].
        chunk_tokens: [chunks].
        chunk_pairs: [chunks], query-key pairs.
        chunk_visible: [chunks], context and new tokens.
        prefills: [prefills], positions of the members that prefill.
    """

    def __init__(
        self,
        tokens: Ints,
        context: Ints,
        sampled: Ints,
        is_prefill: Bools,
        sizes: Ints,
        *,
        recomputed: Ints | None = None,
        rows: RowsOfMembers | None = None,
    ) -> None:
        self.tokens, self.context, self.sampled = tokens, context, sampled
        self.is_prefill, self.sizes = is_prefill, sizes
        self.recomputed, self.rows = recomputed, rows
        self.row_sizes = sizes if rows is None else rows.sizes
        self.first: Ints = np.cumsum(sizes) - sizes
        num = len(sizes)
        self.step_of: Ints = np.repeat(np.arange(num), sizes)
        is_single = tokens == 1
        self.chunks: Ints = np.flatnonzero(~is_single)
        self.chunk_step: Ints = self.step_of[self.chunks]
        self.num_chunks: Ints = np.bincount(self.chunk_step, minlength=num)
        self.num_single: Ints = sizes - self.num_chunks
        visible = context + 1
        singles_rows = sampled
        if len(self.chunks):
            visible[self.chunks] = 0
            singles_rows = np.where(is_single, sampled, 0)
        self.visible: Ints = visible
        self.num_tokens: Ints = np.add.reduceat(tokens, self.first)
        self.num_rows: Ints = np.add.reduceat(sampled, self.first)
        self.single_rows: Ints = np.add.reduceat(singles_rows, self.first)
        plain = np.add.reduceat((is_single & (sampled == 1)).astype(np.int64), self.first)
        self.is_plain: Bools = plain == self.num_single
        self.sum_visible: Ints = np.add.reduceat(visible, self.first)
        self.longest: Ints = np.maximum.reduceat(visible, self.first)
        cached = context[self.chunks]
        self.chunk_tokens: Ints = tokens[self.chunks]
        self.chunk_pairs: Ints = (
            self.chunk_tokens * cached + self.chunk_tokens * (self.chunk_tokens + 1) // 2
        )
        self.chunk_visible: Ints = cached + self.chunk_tokens
        self.prefills: Ints = np.flatnonzero(is_prefill)

    @classmethod
    def of(
        cls, tokens: Ints, context: Ints, sampled: Ints, prefills: Sequence[int] = ()
    ) -> StepTable:
        """Return the table of one step.

        Args:
            tokens: [members].
            context: [members].
            sampled: [members].
            prefills: positions of those that prefill.
        """
        is_prefill = np.zeros(len(tokens), dtype=np.bool_)
        is_prefill[list(prefills)] = True
        return cls(tokens, context, sampled, is_prefill, np.array([len(tokens)]))

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[StepTable, int]]) -> StepTable:
        """Return some steps, by table and position, without their recomputed tokens."""
        spans = [table.span(at, at + 1) for table, at in steps]
        tables = [(table, span) for (table, _), span in zip(steps, spans, strict=True)]
        sizes = np.array([span.stop - span.start for span in spans])
        rows: RowsOfMembers | None = None
        if any(table.rows is not None for table, _ in steps):
            of_steps = [table.rows_of(at, at + 1) for table, at in steps]
            member = np.concatenate([of.member for of in of_steps])
            num_rows = np.concatenate([of.sizes for of in of_steps])
            member += np.repeat(sizes.cumsum() - sizes, num_rows)
            rows = RowsOfMembers(member, np.concatenate([of.tokens for of in of_steps]), num_rows)
        return cls(
            np.concatenate([table.tokens[span] for table, span in tables]),
            np.concatenate([table.context[span] for table, span in tables]),
            np.concatenate([table.sampled[span] for table, span in tables]),
            np.concatenate([table.is_prefill[span] for table, span in tables]),
            sizes,
            rows=rows,
        )

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.sizes)

    def span(self, start: int, end: int) -> slice:
        """Return the slice of the members of the steps from `start` to before `end`."""
        low = self.first.item(start)
        return slice(low, self.first.item(end - 1) + self.sizes.item(end - 1))

    def rows_of(self, start: int, end: int) -> RowsOfMembers:
        """Return the rows of the same, by positions of their members among these."""
        span, rows = self.span(start, end), self.rows
        if rows is None:
            at = np.arange(span.stop - span.start)
            return RowsOfMembers(at, self.tokens[span], self.sizes[start:end])
        of = slice(int(rows.sizes[:start].sum()), int(rows.sizes[:end].sum()))
        return RowsOfMembers(rows.member[of] - span.start, rows.tokens[of], rows.sizes[start:end])

    def part(self, start: int, end: int) -> StepTable:
        """Return the steps from one to before another: a window is priced by model in force."""
        if start == 0 and end == len(self):
            return self
        span = self.span(start, end)
        return StepTable(
            self.tokens[span], self.context[span], self.sampled[span], self.is_prefill[span],
            self.sizes[start:end],
            recomputed=None if self.recomputed is None else self.recomputed[span],
            rows=None if self.rows is None else self.rows_of(start, end),
        )  # fmt: skip

    def members(self, at: Ints) -> StepTable:
        """Return the steps as they would have been with these members only, without empty ones.

        Args:
            at: positions of at least one member, rising.
        """
        sizes = np.bincount(self.step_of[at], minlength=len(self))
        return self.taken(at, sizes[sizes > 0])

    def taken(
        self, at: Ints, sizes: Ints, *, again: Ints | None = None, rows: RowsOfMembers | None = None
    ) -> StepTable:
        """Return steps of some of the members, without or with their recomputed tokens and rows.

        Args:
            at: positions of members.
            sizes: [steps], members of each.
            again: [members taken], tokens lost to a preemption.
            rows: theirs.
        """
        return StepTable(
            self.tokens[at], self.context[at], self.sampled[at], self.is_prefill[at], sizes,
            recomputed=again, rows=rows,
        )  # fmt: skip

    def by_step(self, chunk_values: Floats | Ints) -> Floats:
        """Sum values of chunks by step, in their order."""
        return np.bincount(self.chunk_step, chunk_values, minlength=len(self)).astype(np.float64)


def cut_into_steps(values: NDArray[_Number], sizes: Ints) -> list[NDArray[_Number]]:
    """Return a column of all steps, cut into steps of these sizes."""
    ends: list[int] = sizes.cumsum().tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def product(left: Floats, right: Floats) -> Floats:
    """Return left @ right for whole numbers, by as many steps at a time as one thread multiplies.

    For a larger product BLAS wakes threads of its own, and they wait in loops for the next one: of
    a window of 256 steps they take as much processor time as all that the fold does.

    Args:
        left: [n, steps].
        right: [steps, m].
    """
    width = max(1, _MOST_OF_ONE_THREAD // max(1, left.shape[0] * right.shape[1]))
    found: Floats = left[:, :width] @ right[:width]
    for at in range(width, len(right), width):
        found += left[:, at : at + width] @ right[at : at + width]
    return found


_MOST_OF_ONE_THREAD = 1 << 18
"""Multiplications of a product for which OpenBLAS uses no other threads."""


class Grid:
    """Rows of steps laid out as [steps, width], for what must be sorted step by step."""

    def __init__(self, sizes: Ints) -> None:
        self.width = int(sizes.max())
        self._cell: Ints | None = None
        if len(sizes) * self.width != int(sizes.sum()):
            step_of = np.repeat(np.arange(len(sizes)), sizes)
            at = np.arange(len(step_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            self._cell = step_of * self.width + at
        self.num_steps = len(sizes)

    def lay(self, values: Floats, fill: float) -> Floats:
        """Return values by row as [steps, width], filled up."""
        if self._cell is None:
            return values.reshape(self.num_steps, self.width)
        grid = np.full(self.num_steps * self.width, fill)
        grid[self._cell] = values
        return grid.reshape(self.num_steps, self.width)

    def pick(self, flat: NDArray[_Number]) -> NDArray[_Number]:
        """Return the rows' values of a flat [steps, width]."""
        return flat if self._cell is None else flat[self._cell]

    def positions(self, order: Ints) -> Ints:
        """Return flat positions of an order within each step: [steps, width]."""
        found: Ints = order + np.arange(0, order.size, self.width)[:, None]
        return found
