"""What a whole team does alike, noted once, and told to its members when somebody asks.

A batch that decodes emits and computes with the same members step after step. Appending to every
member's list and adding to every member's cells costs more than all else about such a step; here it
is one list and one vector, keyed by the team's array of slots. A team that stays keeps its array;
any change makes a new one, and then the sums are told first.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import FlopRates

Ints = NDArray[np.int64]

_MOST_EVENTS = 1024
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Emissions:
    """Times at which each member of a team emitted one token.

    Attributes:
        slots: the team.
        is_in_engine: the times are those of the engine's edge as well.
        times_ns: not told to the members yet.
    """

    __slots__ = ("is_in_engine", "slots", "times_ns")

    def __init__(self) -> None:
        self.slots = _NOBODY
        self.is_in_engine = False
        self.times_ns: list[int] = []

    def takes(self, slots: Ints, *, is_in_engine: bool) -> bool:
        """Tell whether another event of this team can be noted."""
        return (
            slots is self.slots
            and is_in_engine is self.is_in_engine
            and len(self.times_ns) < _MOST_EVENTS
        )

    def tell(self, num_tokens: Ints, edge_ns: Ints, times_ns: list[array[int]]) -> None:
        """Tell the members: their numbers of tokens, their last times and all of their times."""
        slots, last_ns = self.slots, self.times_ns[-1]
        edge_ns[slots] = last_ns
        num_tokens[slots] += len(self.times_ns)
        if len(self.times_ns) == 1:
            for slot in slots.tolist():
                times_ns[slot].append(last_ns)
        else:
            told = array("q", self.times_ns)
            for slot in slots.tolist():
                times_ns[slot] += told
        self.times_ns.clear()


class Work:
    """What a team's decodes computed, one token each: shares of step time, and FLOPs.

    The FLOPs of a slice are linear in its context, so contexts are summed and nothing else.
    """

    __slots__ = ("_contexts", "_num_steps", "_rates", "_shares_ns", "slots")

    def __init__(self, slots: Ints, rates: FlopRates | None) -> None:
        self.slots = slots
        self._rates = rates
        self._shares_ns: Ints = np.zeros(len(slots), dtype=np.int64)
        self._contexts: Ints = np.zeros(len(slots), dtype=np.int64)
        self._num_steps = 0

    def takes(self, slots: Ints, rates: FlopRates | None) -> bool:
        """Tell whether another step of this team, and of this model, can be added."""
        return slots is self.slots and rates is self._rates

    def add(self, shares_ns: list[Ints], contexts: Ints) -> None:
        """Add a step: for each rank, the members' shares."""
        for shares in shares_ns:
            self._shares_ns += shares
        self._contexts += contexts
        self._num_steps += 1

    def tell(self, compute_ns: Ints, flops: Ints) -> None:
        """Add the sums to the members' decode cells."""
        if not self._num_steps:
            return
        cells = 2 * self.slots + 1
        compute_ns.reshape(-1)[cells] += self._shares_ns
        if self._rates is not None:
            flops.reshape(-1)[cells] += self._rates.of_singles(self._num_steps, self._contexts)
        self._num_steps = 0
        self._shares_ns[:] = 0
        self._contexts[:] = 0
