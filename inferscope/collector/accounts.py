"""What counters say of each request: its part of what its steps are found to have taken.

Samples come late, and a step has many requests. So what requests compute is noted ten times a
second, for all at once, and when the samples of such a tenth are in, each request's part of it is
taken at the rates they show:

    by phase:   part = counted in the tenth · its time (its modelled bytes) / all time (all bytes)

A request that ends keeps its seat until all of its tenths are settled; its slot is free at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.collector.work import TOTALLED, AsOf, Work

Floats = NDArray[np.float64]

TENTH_NS = 100_000_000
SM_ACTIVE, BUSY, ENERGY, READ, WRITE = range(5)
"""What is counted: nanoseconds, nanoseconds, microjoules, bytes, bytes."""
NUM_COUNTED = 5
BY = (0, 0, 0, 1, 2)
"""By which of a request's totals (time, bytes read, bytes written) each is given out."""
NUM_BY = 3
_NUM_GIVEN = 2 * NUM_COUNTED * 3
_FIRST_SEATS = 32
_BY_PHASE = np.repeat([phase * NUM_BY + by for phase in (0, 1) for by in BY], 3)
"""[phases · counted · 3], which of a request's totals each is a part of."""


class Settled(NamedTuple):
    """What samples say of the steps of one tenth: [phases · counted] each."""

    values: Sequence[float]
    known: Sequence[float]
    """Of the steps' totals those that samples cover."""
    totals: Sequence[float]
    """Of time or bytes of all steps."""
    blurred: Sequence[float]
    """Of the values that which was divided over phases."""

    def rates(self, are_alone: list[bool]) -> list[float]:
        """Return what requests get for each unit that they computed.

        Args:
            are_alone: by phase, that no two requests computed in it.

        Returns:
            [phases · counted · 3], what is given out; of what total; and how much of the first was
            divided rather than measured.
        """
        rates = [0.0] * _NUM_GIVEN
        for at, known in enumerate(self.known):
            total = self.totals[at]
            if known > 0 and total > 0:
                part, value = known / total, self.values[at]
                rate = part * (value / known)
                blurred = rate
                if are_alone[at // NUM_COUNTED]:
                    blurred = rate * (self.blurred[at] / value) if value > 0 else 0.0
                rates[3 * at : 3 * at + 3] = rate, part, blurred
        return rates


class Left(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended, as it waits for its tenths."""

    seat: int
    num_tenths: int
    """That had begun by then, of all."""
    totals: list[int]
    """[phases · 3], all it computed."""


class _Tenth(msgspec.Struct, gc=False):
    """A tenth that is over."""

    number: int
    work: AsOf
    """What who had a seat then had computed, [seats]."""
    is_taken: Floats
    """[seats], 1 or 0: by a request that had not ended."""
    left: list[Left]
    """Who ended in it."""


class Accounts:
    """The requests of one engine as they share what is counted.

    Each has a seat. Slots are taken in turn, so that late words on a request hit nobody; the seat
    that was left last is taken first, so that there are no more than there were requests at once.

    Attributes:
        last: the newest tenth that has begun, -1 where none has.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seats: dict[int, int] = {}
        """By slot that is not free."""
        self._free: list[int] = []
        self._slots = np.zeros(0, dtype=np.int64)
        """[seats]"""
        self._is_taken = np.zeros(0)
        """[seats], 1 or 0: by a request that has not ended."""
        self._before = np.zeros((2 * NUM_BY, 0))
        """[phases · 3, seats], totals when the oldest tenth that is not settled began; 0 of who was
        not there."""
        self._given = np.zeros((_NUM_GIVEN, 0))
        """[phases · counted · 3, seats], as `Settled.rates` has it."""
        self._over: deque[_Tenth] = deque()
        """Tenths that are over and not settled."""
        self._is_running = False
        """The newest tenth is not over."""
        self._just_left: list[Left] = []
        """In that."""
        self._num_begun = self._num_settled = 0
        """Tenths."""
        self.last = -1

    def reach(self, number: int) -> None:
        """Begin a tenth, if it is a new one."""
        if number <= self.last:
            return
        if self._is_running:
            self._end_tenth()
        else:
            self._before = self._work.now(self._slots).totals() * self._is_taken
        self.last = number
        self._is_running = True
        self._num_begun += 1

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        if not self._free:
            self._add_seats()
        seat = self._seats[slot] = self._free.pop()
        self._slots[seat], self._is_taken[seat] = slot, 1.0
        self._given[:, seat] = 0.0

    def leave(self, slot: int, prefill: list[int], decode: list[int]) -> Left:
        """End a request; call before its slot is free.

        Args:
            slot: the request's.
            prefill: all that it computed, by column.
            decode: the same.
        """
        seat = self._seats.pop(slot)
        self._is_taken[seat] = 0.0
        totals = [amounts[column] for amounts in (prefill, decode) for column in TOTALLED]
        left = Left(seat, self._num_begun, totals)
        if self._is_running:
            self._just_left.append(left)
        return left

    def free(self, slot: int) -> None:
        """Give a slot back: what is not settled of who has not left is nobody's."""
        seat = self._seats.pop(slot, None)
        if seat is not None:
            self._is_taken[seat] = 0.0
            self._leave_out(seat)
            self._free.append(seat)

    def is_settled(self, left: Left) -> bool:
        """Tell whether a request's part is known of all that it computed."""
        return left.num_tenths <= self._num_settled

    def take(self, left: Sequence[Left]) -> list[list[float]]:
        """Return what requests that have ended are given, and give their seats back.

        Returns:
            for each [phases · counted · 3], as `Settled.rates` has it.
        """
        given: list[list[float]] = self._given[:, [each.seat for each in left]].T.tolist()
        for each in left:
            if not self.is_settled(each):
                self._leave_out(each.seat)
            self._free.append(each.seat)
        return given

    def open(self) -> list[int]:
        """Return the tenths that are not settled, oldest first."""
        numbers = [tenth.number for tenth in self._over]
        return [*numbers, self.last] if self._is_running else numbers

    def settle(self, settled: Sequence[Settled]) -> None:
        """Give out the oldest tenths."""
        if len(settled) > len(self._over):
            self._end_tenth()
            self._is_running = False
        self._num_settled += len(settled)
        for of_tenth in settled:
            amounts = self._computed(self._over.popleft())
            are_alone = [int(np.count_nonzero(amounts[at])) <= 1 for at in (0, NUM_BY)]
            parts = amounts.take(_BY_PHASE, axis=0)
            parts *= np.array(of_tenth.rates(are_alone))[:, None]
            given = self._given[:, : parts.shape[1]]
            given += parts

    def stop(self) -> None:
        """Leave open what is open: nobody counts any more."""
        self._over.clear()
        self._just_left.clear()
        self._is_running = False
        self._num_settled = self._num_begun
        self.last = -1

    def _end_tenth(self) -> None:
        """Note what each request has computed so far."""
        work, left = self._work.now(self._slots), self._just_left
        self._over.append(_Tenth(self.last, work, self._is_taken.copy(), left))
        self._just_left = []

    def _computed(self, tenth: _Tenth) -> Floats:
        """Return what each request computed in the oldest tenth: [phases · 3, seats]."""
        totals = tenth.work.totals()
        totals *= tenth.is_taken
        amounts: Floats = totals.copy()
        num = self._before.shape[1]
        amounts[:, :num] -= self._before
        if tenth.left:
            seats = [left.seat for left in tenth.left]
            amounts[:, seats] += np.array([left.totals for left in tenth.left]).T
        self._before = totals
        return amounts

    def _leave_out(self, seat: int) -> None:
        """Make what a request computed in tenths that are not settled nobody's."""
        if seat < self._before.shape[1]:
            self._before[:, seat] = 0.0
        self._just_left = [left for left in self._just_left if left.seat != seat]
        for tenth in self._over:
            tenth.is_taken[seat : seat + 1] = 0.0
            tenth.left = [left for left in tenth.left if left.seat != seat]

    def _add_seats(self) -> None:
        num = len(self._slots)
        more = num + _FIRST_SEATS
        self._free += range(num + more - 1, num - 1, -1)
        self._slots = np.concatenate([self._slots, np.zeros(more, dtype=np.int64)])
        self._is_taken = np.concatenate([self._is_taken, np.zeros(more)])
        self._given = np.concatenate([self._given, np.zeros((_NUM_GIVEN, more))], axis=1)
