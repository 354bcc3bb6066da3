"""A step being executed, in the ledger: what its members wait for, not booked before its end.

Most steps are booked whole, class by class, in a few additions. Where one member's part must change
before the end (a token cuts it, the request leaves, its time is taken already), the step is laid
out as rows: [members, causes].
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.stays import Grip
from inferscope.records import CAUSES

Ints = NDArray[np.int64]

NUM_CAUSES = len(CAUSES)
_PREFILL_OWN, _DECODE_OWN = CAUSES.index("prefill_own"), CAUSES.index("decode_own")
"""Of each, co-batched and interference are the next two columns."""
_RECOMPUTE = CAUSES.index("recompute")


class OpenStep(msgspec.Struct):
    """A step being executed: its members' delay, not yet booked."""

    slots: Ints
    delay: Delay
    start_ns: int
    end_ns: int
    excess_column: int
    whole_at: int
    """The ledger's number of changes if all that run are members, else -1."""
    grip: Grip | None = None
    """What the members hold; None where that is not known."""
    is_counted: bool = False
    """The ledger has counted it in its members' numbers of open steps."""
    parts: Ints | None = None
    """[members, causes], made when a single member's rows must change before the end."""

    def rows(self) -> Ints:
        """Return what the step still has to book, by member and cause."""
        if self.parts is None:
            delay, num = self.delay, len(self.slots)
            parts = np.zeros((num, NUM_CAUSES), dtype=np.int64)
            own = np.full(num, _DECODE_OWN)
            interference = np.full(num, delay.decode_interference_ns)
            own[delay.prefills] = _PREFILL_OWN
            interference[delay.prefills] = delay.prefill_interference_ns
            member = np.arange(num)
            parts[member, own] = delay.own_ns
            parts[member, own + 1] = delay.co_batched_ns()
            parts[member, own + 2] = interference
            if delay.recompute_ns is not None:
                parts[:, _RECOMPUTE] = delay.recompute_ns
            parts[:, self.excess_column] += delay.excess_ns
            self.parts = parts
        return self.parts

    def book(self, ledger_rows: Ints) -> None:
        """Add to the ledger's rows what the step still has to book."""
        slots, delay = self.slots, self.delay
        cells = ledger_rows.reshape(-1)
        first = slots * NUM_CAUSES
        own = first + _DECODE_OWN
        if delay.prefills:
            own[delay.prefills] += _PREFILL_OWN - _DECODE_OWN
            interference = np.full(len(own), delay.decode_interference_ns)
            interference[delay.prefills] = delay.prefill_interference_ns
            cells[own + 2] += interference
        elif delay.decode_interference_ns:
            cells[own + 2] += delay.decode_interference_ns
        cells[own] += delay.own_ns
        own += 1
        cells[own] += delay.co_batched_ns()
        if delay.recompute_ns is not None:
            cells[first + _RECOMPUTE] += delay.recompute_ns
        if delay.excess_ns:
            cells[first + self.excess_column] += delay.excess_ns


class Attendance:
    """In how many of the open steps each slot is, counted when somebody asks."""

    def __init__(self, num_slots: int, steps: list[OpenStep]) -> None:
        self._steps = steps
        self._num = np.zeros(num_slots, dtype=np.int16)

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        more = num_slots - len(self._num)
        self._num = np.concatenate([self._num, np.zeros(more, dtype=np.int16)])

    def num_steps(self) -> NDArray[np.int16]:
        """Return the numbers: [slots]. Who leaves all steps at once sets its own to 0."""
        for step in self._steps:
            if not step.is_counted:
                step.is_counted = True
                self._num[step.slots] += 1
        return self._num

    def end(self, step: OpenStep) -> None:
        """Take a step out that is open no more."""
        if step.is_counted:
            self._num[step.slots] -= 1


def taken_until(slots: Ints, marks_ns: Ints, steps: list[OpenStep]) -> Ints:
    """Return up to where the slots' time belongs to their past or to steps still open.

    Args:
        slots: [members].
        marks_ns: [slots], up to where each one's life is explained.
        steps: those open.
    """
    taken_ns: Ints = marks_ns[slots]
    for step in steps:
        is_in_step = np.zeros(len(marks_ns), dtype=np.bool_)
        is_in_step[step.slots] = True
        is_in_step = is_in_step[slots]
        taken_ns[is_in_step] = np.maximum(taken_ns[is_in_step], step.end_ns)
    return taken_ns


def scaled(rows: Ints, totals_ns: Ints) -> Ints:
    """Scale rows of whole nanoseconds down to totals, each by largest remainder.

    Args:
        rows: [members, causes].
        totals_ns: [members]; a row that sums to no more than its total stays as it is.

    Returns:
        [members, causes]
    """
    columns = rows.any(axis=0).nonzero()[0]  # few causes have a part in one step
    cells = rows[:, columns]
    wholes_ns = cells.sum(axis=1)
    exact = cells * (totals_ns / np.maximum(wholes_ns, 1))[:, None]
    parts = np.minimum(np.floor(exact).astype(np.int64), cells)
    missing = totals_ns - parts.sum(axis=1)
    member, order = np.arange(len(rows))[:, None], (parts - exact).argsort(axis=1, kind="stable")
    while True:
        has_room = (cells > parts)[member, order]
        is_given = has_room & (has_room.cumsum(axis=1) <= missing[:, None])
        if not is_given.any():
            break
        parts[member, order] += is_given
        missing -= is_given.sum(axis=1)
    is_less = totals_ns < wholes_ns
    found = np.zeros_like(rows)
    found[:, columns] = np.where(is_less[:, None], parts, cells)
    return found
