"""What counters say of each request: its part of what its steps are found to have taken.

Samples come late, and a step has many requests. So what requests compute is noted ten times a
second, for all at once, and when the samples of such a tenth are in, each request's part of it is
taken at the rates they show:

    by phase:   part = counted in the tenth · its time (its modelled bytes) / all time (all bytes)

A request that ends leaves with what is not settled yet, and its slot is free.
"""

from __future__ import annotations

from collections import deque
from operator import sub
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.collector.work import Work

Floats = NDArray[np.float64]

TENTH_NS = 100_000_000
SM_ACTIVE, BUSY, ENERGY, READ, WRITE = range(5)
"""What is counted: nanoseconds, nanoseconds, microjoules, bytes, bytes."""
NUM_COUNTED = 5
BY = (0, 0, 0, 1, 2)
"""By which of a request's totals (time, bytes read, bytes written) each is given out."""
_NUM_TOTALS = 3
_NUM_GIVEN = 2 * NUM_COUNTED * 3
_FIRST_SEATS = 32
_TIMES = (0, _NUM_TOTALS)
_BY_PHASE = np.repeat([phase * _NUM_TOTALS + by for phase in (0, 1) for by in BY], 3)
"""[phases · counted · 3], which of a request's totals each is a part of."""


class Settled(NamedTuple):
    """What samples say of the steps of one tenth, by phase and what is counted."""

    values: Floats
    """[phases, counted]."""
    known: Floats
    """[phases, counted], of the steps' totals those that samples cover."""
    totals: Floats
    """[phases, counted], of time or bytes of all steps."""
    blurred: Floats
    """[phases, counted], of the values that which was divided over phases."""

    def rates(self, are_alone: list[bool]) -> list[float]:
        """Return what requests get for each unit that they computed.

        Args:
            are_alone: by phase, that no two requests computed in it.

        Returns:
            [phases · counted · 3], what is given out; of what total; and how much of the first was
            divided rather than measured.
        """
        rates = []
        for is_alone, *columns in zip(are_alone, *(part.tolist() for part in self), strict=True):
            for value, known, total, blurred in zip(*columns, strict=True):
                part = known / total if total > 0 else 0.0
                rate = part * (value / known) if known > 0 else 0.0
                if is_alone:
                    rates += [rate, part, rate * (blurred / value) if value > 0 else 0.0]
                else:
                    rates += [rate, part, rate]
        return rates


class Left(msgspec.Struct):
    """What a request that has ended takes along."""

    given: Floats
    """[phases · counted · 3], settled: as `Settled.rates` has it."""
    totals: list[list[int]]
    """[phases][3], all it computed."""
    num_unsettled: int
    """Tenths in which it computed, that are not settled yet."""


class _Tenth(msgspec.Struct):
    number: int
    before: Floats
    """[phases · 3, seats], totals at its start; 0 of who is not there or has left since."""
    left: list[tuple[Left, list[float]]] = []
    """Who has left, and what they computed in it."""


class Accounts:
    """The requests of one engine as they share what is counted.

    Each has a seat. Slots are taken in turn, so that late words on a request hit nobody; the seat
    that was left last is taken first, so that there are no more than there were requests at once.

    Attributes:
        last: the newest tenth that is open, -1 where none is.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._open: deque[_Tenth] = deque()
        self._seats: dict[int, int] = {}
        """By slot that is not free."""
        self._free: list[int] = []
        self._begun: list[int] = []
        """By seat, the tenth in which its request began."""
        self._slots = np.zeros(0, dtype=np.int64)
        """[seats]"""
        self._is_taken = np.zeros(0)
        """[seats], 1 or 0."""
        self._given = np.zeros((_NUM_GIVEN, 0))
        self.last = -1

    def reach(self, number: int) -> None:
        """Begin a tenth, if it is a new one."""
        if number > self.last:
            self._open.append(_Tenth(number, self._totals()))
            self.last = number

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        if not self._free:
            self._add_seats()
        seat = self._seats[slot] = self._free.pop()
        self._begun[seat] = self.last
        self._slots[seat], self._is_taken[seat] = slot, 1.0
        self._given[:, seat] = 0.0

    def leave(self, slot: int, totals: list[list[int]]) -> Left:
        """End a request; call before its slot is free.

        Args:
            slot: the request's.
            totals: [phases][3], all it computed.
        """
        seat = self._seats[slot]
        begun, left = self._begun[seat], Left(self._given[:, seat].copy(), totals, 0)
        after: list[float] = [*totals[0], *totals[1]]
        for tenth in reversed(self._open):
            if tenth.number < begun:
                break
            before = _column(tenth.before, seat)
            tenth.left.append((left, list(map(sub, after, before))))
            left.num_unsettled += 1
            after = before
        return left

    def free(self, slot: int) -> None:
        """Give a slot back: what is not settled of who has not left is nobody's."""
        seat = self._seats.pop(slot, None)
        if seat is None:
            return
        self._free.append(seat)
        self._is_taken[seat] = 0.0
        for tenth in self._open:
            tenth.before[:, seat : seat + 1] = 0

    def oldest(self) -> int | None:
        """Return the oldest tenth that is not settled."""
        return self._open[0].number if self._open else None

    def settle(self, settled: Settled) -> None:
        """Give out the oldest tenth."""
        tenth = self._open.popleft()
        after = self._open[0].before if self._open else self._totals()
        num_before, num_after = tenth.before.shape[1], after.shape[1]
        if num_before == num_after:
            amounts = after - tenth.before
        else:
            amounts = after.copy()
            amounts[:, :num_before] -= tenth.before
        of_left = np.array([computed for _, computed in tenth.left]).reshape(-1, len(amounts))
        are_alone = [
            int(np.count_nonzero(amounts[times])) + int(np.count_nonzero(of_left[:, times])) <= 1
            for times in _TIMES
        ]
        rates = np.array(settled.rates(are_alone))
        parts = amounts.take(_BY_PHASE, axis=0)
        parts *= rates[:, None]
        self._given[:, :num_after] += parts
        parts = of_left.take(_BY_PHASE, axis=1)
        parts *= rates
        for (left, _), part in zip(tenth.left, parts, strict=True):
            left.given += part
            left.num_unsettled -= 1

    def stop(self) -> None:
        """Leave open what is open: nobody counts any more."""
        for tenth in self._open:
            for left, _ in tenth.left:
                left.num_unsettled = 0
        self._open.clear()
        self.last = -1

    def _totals(self) -> Floats:
        """Return what each request has computed so far: [phases · 3, seats]."""
        totals = self._work.totals(self._slots).reshape(2 * _NUM_TOTALS, -1)
        totals *= self._is_taken
        return totals

    def _add_seats(self) -> None:
        num, more = len(self._begun), len(self._begun) + _FIRST_SEATS
        self._free += range(num + more - 1, num - 1, -1)
        self._begun += [-1] * more
        self._slots = np.concatenate([self._slots, np.zeros(more, dtype=np.int64)])
        self._is_taken = np.concatenate([self._is_taken, np.zeros(more)])
        self._given = np.concatenate([self._given, np.zeros((_NUM_GIVEN, more))], axis=1)


def _column(before: Floats, seat: int) -> list[float]:
    if seat < before.shape[1]:
        column: list[float] = before[:, seat].tolist()
        return column
    return [0.0] * len(before)
