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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE = 1.25
"""Largest excess over a bound that still counts as noise."""
_MORE_CONTEXT = 1.25
"""Context of a member, against a step's, up to which they compare: a decode's grows with each step.
Attention is linear in it, so the time grows by this factor at most."""
PureStep = tuple[int, int, int]
"""Tokens and context of a step's largest member, and its nanoseconds."""


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """Upper bounds from measured steps."""

    own_ns: Floats
    """[members], of T({i}); infinite where no step compares."""
    step_ns: float = math.inf
    """Upper bound of T(S): the members one after the other."""


class PureSteps:
    """The last two steps of each size, by tokens and context of their largest member.

    Sizes are a quarter of an octave apart. Of the two the longer time counts, and the smaller size:
    one step with a wrong time bounds nothing.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self._cells: dict[int, int] = {}
        self._last: list[PureStep] = []
        """[cells], the last step."""
        self._kept: list[PureStep] = []
        """[cells], the longer time and the smaller size of the last two."""
        self._chunked: list[int] = []
        """Cells of steps with chunks, which are few."""

    def observe(self, tokens: int, context: int, measured_ns: int) -> None:
        """Add a step of one phase that was not cold.

        Args:
            tokens: of its largest member.
            context: of the same.
            measured_ns: its delay.
        """
        step = (tokens, context, measured_ns)
        key = _cell(tokens) << 16 | _cell(context)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = len(self._kept)
            if tokens > 1:
                self._chunked.append(len(self._kept))
            self._last.append(step)
            self._kept.append(step)
            return
        before_tokens, before_context, before_ns = self._last[cell]
        self._kept[cell] = (
            tokens if tokens < before_tokens else before_tokens,
            context if context < before_context else before_context,
            measured_ns if measured_ns > before_ns else before_ns,
        )
        self._last[cell] = step

    def bounds(self, tokens: Ints, contexts: Ints, prefills: list[int]) -> Bounds | None:
        """Return the bounds of a step's prefills; None where no step compares."""
        if not prefills or not self._cells:
            return None
        own_ns: Floats | None = None
        for at in prefills:
            bound_ns = self._own_ns(tokens.item(at), contexts.item(at))
            if bound_ns < math.inf:
                if own_ns is None:
                    own_ns = np.full(len(tokens), math.inf)
                own_ns[at] = bound_ns
        return None if own_ns is None else Bounds(own_ns)

    def bounds_of_all(self, tokens: Ints, contexts: Ints) -> Bounds | None:
        """Return the bounds of a step and of all its members; None where no step compares."""
        if not self._cells:
            return None
        kept = np.array(self._kept, dtype=np.float64)
        more = np.maximum((contexts[:, None] + 1) / (kept[:, 1] + 1), 1.0)
        compares = (kept[:, 0] >= tokens[:, None]) & (more <= _MORE_CONTEXT)
        own_ns: Floats = np.where(compares, kept[:, 2] * more, math.inf).min(axis=1)
        return Bounds(own_ns, TOLERANCE * float(own_ns.sum()))

    def _own_ns(self, tokens: int, context: int) -> float:
        """Return the bound of one member, as `bounds_of_all` does of each."""
        bound_ns = math.inf
        kept = self._kept
        cells = self._chunked if tokens > 1 else range(len(kept))
        for cell in cells:
            of_tokens, of_context, took_ns = kept[cell]
            if of_tokens >= tokens and took_ns < bound_ns:
                more = (context + 1) / (of_context + 1)
                if more <= _MORE_CONTEXT:
                    bound_ns = min(bound_ns, took_ns * max(1.0, more))
        return bound_ns


def _cell(number: int) -> int:
    """Return the size class of a number: four to an octave."""
    shift = max(0, number.bit_length() - 3)
    return (shift << 3) | (number >> shift)
