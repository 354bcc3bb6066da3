"""Times of steps of one phase, which bound what a member of another step took by itself.

A step that computes as many tokens behind as much context as a member, or more, takes at least as
long as the member alone. So the fastest such step is an upper bound of T({i}), however wrong a cost
model is that few steps have taught. Only steps of one phase are kept: a mixed one bounds nothing
that is asked of it.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.cost.batch import Batch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE = 1.25
"""Excess over a bound that is still noise of the steps."""
_MORE_CONTEXT = 1.25
"""Context of a member, against a step's, up to which they compare: a decode's grows with each step.
Attention is linear in it, so the time grows by this factor at most."""
_FIRST_CELLS = 64


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """Upper bounds from measured steps."""

    own_ns: Floats
    """[members], of T({i}); infinite where no step compares."""
    step_ns: float = math.inf
    """Of T(S): computing the members one after the other would have taken this."""


class PureSteps:
    """The last two steps of each size, by tokens and context of their largest member.

    Sizes are a quarter of an octave apart. Of the two the longer time counts, and the smaller size:
    one step with a wrong time bounds nothing.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self._cells: dict[tuple[int, int], int] = {}
        self._last = np.zeros((_FIRST_CELLS, 3))
        """[cells], tokens, context and nanoseconds of the last step."""
        self._kept = np.zeros((_FIRST_CELLS, 3))
        """[cells], of the last two."""

    def observe(self, batch: Batch, prefills: list[int], measured_ns: int) -> None:
        """Add a step that was not cold; a mixed one is left out.

        Args:
            batch: its requests.
            prefills: positions of those that prefill.
            measured_ns: its delay.
        """
        team = batch.team
        if measured_ns <= 0 or (prefills and len(prefills) < len(team.tokens)):
            return
        tokens, context = 1, batch.longest_single - 1
        for at, of_chunk in zip(team.chunks, team.chunk_tokens, strict=True):
            if of_chunk > tokens:
                tokens, context = of_chunk, batch.context.item(at)
        step = (tokens, context, measured_ns)
        key = (_cell(tokens), _cell(context))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = len(self._cells)
            if cell == len(self._kept):
                self._last = np.concatenate([self._last, np.zeros_like(self._last)])
                self._kept = np.concatenate([self._kept, np.zeros_like(self._kept)])
            self._kept[cell] = step
        else:
            before = self._last[cell].tolist()
            self._kept[cell] = (
                min(tokens, before[0]),
                min(context, before[1]),
                max(measured_ns, before[2]),
            )
        self._last[cell] = step

    def bounds(self, batch: Batch, prefills: list[int]) -> Bounds | None:
        """Return the bounds of a step's prefills; None where no step compares."""
        if not prefills or not self._cells:
            return None
        own_ns = np.full(len(batch.context), math.inf)
        own_ns[prefills] = self._own_ns(batch.team.tokens[prefills], batch.context[prefills])
        return Bounds(own_ns)

    def bounds_of_all(self, batch: Batch) -> Bounds | None:
        """Return the bounds of a step and of all its members; None where no step compares."""
        if not self._cells:
            return None
        own_ns = self._own_ns(batch.team.tokens, batch.context)
        return Bounds(own_ns, TOLERANCE * float(own_ns.sum()))

    def _own_ns(self, tokens: Ints, contexts: Ints) -> Floats:
        kept = self._kept[: len(self._cells)]
        more = np.maximum((contexts[:, None] + 1) / (kept[:, 1] + 1), 1.0)
        compares = (kept[:, 0] >= tokens[:, None]) & (more <= _MORE_CONTEXT)
        bounds: Floats = np.where(compares, kept[:, 2] * more, math.inf).min(axis=1)
        return bounds


def _cell(number: int) -> int:
    """Return the size class of a number: four to an octave."""
    shift = max(0, number.bit_length() - 3)
    return (shift << 3) | (number >> shift)
