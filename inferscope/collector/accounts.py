"""What counters say of each request: its part of what its steps are found to have taken.

Samples come late, and a step has many requests. So what requests compute is noted down, and where
each tenth of a second begins; when the samples of some tenths are in, each request's part of these
is taken at the rates they show:

    by phase:   part = counted in the tenth · its time (its modelled bytes) / all time (all bytes)

A request that ends keeps its slot until all of its tenths are settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.collector.work import TOTALLED, Journal, Work

Floats = NDArray[np.float64]

TENTH_NS = 100_000_000
SM_ACTIVE, BUSY, ENERGY, READ, WRITE = range(5)
"""What is counted: nanoseconds, nanoseconds, microjoules, bytes, bytes."""
NUM_COUNTED = 5
BY = (0, 0, 0, 1, 2)
"""By which of a request's totals (time, bytes read, bytes written) each is given out."""
NUM_BY = 3
_NUM_GIVEN = 2 * NUM_COUNTED * 3
_BY_PHASE = np.repeat([phase * NUM_BY + by for phase in (0, 1) for by in BY], 3)
"""[phases · counted · 3], which of a request's totals each is a part of."""
_NO_RATES = (0.0, 0.0, 0.0)
_AT_ONCE = 16
"""Tenths that are summed up together: after a stall there are hundreds, of thousands of slots."""
_totalled = itemgetter(*TOTALLED)


class Settled(NamedTuple):
    """What samples say of the steps of one tenth: [phases · counted] each."""

    values: Sequence[float]
    known: Sequence[float]
    """Of the steps' totals those that samples cover."""
    totals: Sequence[float]
    """Of time or bytes of all steps."""
    blurred: Sequence[float]
    """Of the values that which was divided over phases."""

    def rates(self, is_prefill_alone: bool, is_decode_alone: bool) -> list[float]:
        """Return what requests get for each unit that they computed.

        Args:
            is_prefill_alone: no two requests computed in that phase.
            is_decode_alone: likewise.

        Returns:
            [phases · counted · 3], what is given out; of what total; and how much of the first was
            divided rather than measured.
        """
        rates: list[float] = []
        are_alone = [is_prefill_alone] * NUM_COUNTED + [is_decode_alone] * NUM_COUNTED
        for value, known, total, blurred, is_alone in zip(*self, are_alone, strict=True):
            if known > 0 and total > 0:
                part = known / total
                rate = part * (value / known)
                if is_alone:
                    rates += (rate, part, rate * (blurred / value) if value > 0 else 0.0)
                else:
                    rates += (rate, part, rate)
            else:
                rates += _NO_RATES
        return rates


class Left(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended, as it waits for its tenths."""

    slot: int
    num_tenths: int
    """Of all, up to the last that has a part of it."""
    totals: tuple[int, ...]
    """[phases · 3], all it computed."""


class Accounts:
    """The requests of one engine as they share what is counted.

    Attributes:
        last: the newest tenth that has begun, -1 where none has.
    """

    def __init__(self, work: Work, free: deque[int]) -> None:
        """Start with nobody.

        Args:
            work: knows what requests compute.
            free: takes the slots that nobody has a part in any more.
        """
        self._work = work
        self._free = free
        self._given = np.zeros((0, _NUM_GIVEN))
        """[slots, phases · counted · 3], as `Settled.rates` has it."""
        self._numbers: deque[int] = deque()
        """Of the tenths that are not settled."""
        self._ends: list[int] = []
        """In the journal, of those of them that are over."""
        self._waiting: set[int] = set()
        """Slots of requests that have ended, and are not told what they are given."""
        self._resting: deque[tuple[int, int]] = deque()
        """Slots of requests that are gone, after how many of all tenths they may be free."""
        self._num_begun = self._num_settled = 0
        """Tenths."""
        self.last = -1

    def reach(self, number: int) -> None:
        """Begin a tenth, if it is a new one."""
        if number <= self.last:
            return
        journal = self._work.journal
        if journal is None:
            journal = self._work.journal = Journal()
        if len(self._numbers) > len(self._ends):
            self._ends.append(len(journal.rows))
        else:
            journal.rows.clear()
        self.last = number
        self._numbers.append(number)
        self._num_begun += 1

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        more = np.zeros((num_slots - len(self._given), _NUM_GIVEN))
        self._given = np.concatenate([self._given, more])

    def leave(self, slot: int, at_ns: int, prefill: list[int], decode: list[int]) -> Left:
        """End a request; call before its slot is freed.

        Args:
            slot: the request's.
            at_ns: when it ended. A tenth that began since has nothing of its.
            prefill: all that it computed, by column.
            decode: the same.
        """
        self._waiting.add(slot)
        num_tenths = self._num_begun - sum(number * TENTH_NS > at_ns for number in self._numbers)
        return Left(slot, num_tenths, _totalled(prefill) + _totalled(decode))

    def free(self, slot: int) -> None:
        """Give a slot back, as soon as no tenth that is not settled has a part of its."""
        if slot not in self._waiting:
            self._rest(slot, self._num_begun)

    def is_settled(self, left: Left) -> bool:
        """Tell whether a request's part is known of all that it computed."""
        return left.num_tenths <= self._num_settled

    def take(self, left: Sequence[Left]) -> list[list[float]]:
        """Return what requests that have ended are given, and give their slots back.

        Returns:
            for each [phases · counted · 3], as `Settled.rates` has it.
        """
        given: list[list[float]] = self._given[[each.slot for each in left]].tolist()
        for each in left:
            self._waiting.discard(each.slot)
            self._rest(each.slot, self._num_begun)
        return given

    def _rest(self, slot: int, num_tenths: int) -> None:
        if num_tenths > self._num_settled:
            self._resting.append((num_tenths, slot))
            return
        self._given[slot] = 0.0
        self._free.append(slot)

    def open(self) -> list[int]:
        """Return the tenths that are not settled, oldest first."""
        return list(self._numbers)

    def settle(self, settled: Sequence[Settled]) -> None:
        """Give out the oldest tenths."""
        for at in range(0, len(settled), _AT_ONCE):
            self._settle(settled[at : at + _AT_ONCE])

    def _settle(self, settled: Sequence[Settled]) -> None:
        num, journal = len(settled), self._work.journal
        assert journal is not None  # a tenth has begun
        if num > len(self._ends):
            self._ends.append(len(journal.rows))
        slots, amounts = journal.sum_up(self._ends[:num], len(self._given))
        self._ends = [end - self._ends[num - 1] for end in self._ends[num:]]
        self._num_settled += num
        for _ in settled:
            self._numbers.popleft()
        if len(slots):
            are_alone = np.add.reduce(amounts[:, :, ::NUM_BY] > 0, axis=1) <= 1
            parts = amounts.take(_BY_PHASE, axis=2)
            rates = [
                each.rates(*alone) for each, alone in zip(settled, are_alone.tolist(), strict=True)
            ]
            parts *= np.array(rates)[:, None]
            self._given[slots] += np.add.reduce(parts)
        while self._resting and self._resting[0][0] <= self._num_settled:
            self._rest(self._resting.popleft()[1], 0)

    def stop(self) -> None:
        """Leave open what is open: nobody counts any more."""
        self._numbers.clear()
        self._ends.clear()
        self._work.journal = None
        self._num_settled = self._num_begun
        self.last = -1
        while self._resting:
            self._rest(self._resting.popleft()[1], 0)
