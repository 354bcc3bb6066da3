"""What counters say of each request: its part of what its steps are found to have taken.

Samples come late, and a step has many requests. So what requests compute is noted ten times a
second, for all at once, and when the samples of such a tenth are in, each request's part of it is
taken at the rates they show:

    by phase:   part = counted in the tenth · its time (its modelled bytes) / all time (all bytes)

A request that ends leaves with what is not settled yet, and its slot is free.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.collector.work import Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TENTH_NS = 100_000_000
SM_ACTIVE, BUSY, ENERGY, READ, WRITE = range(5)
"""What is counted: nanoseconds, nanoseconds, microjoules, bytes, bytes."""
NUM_COUNTED = 5
BY = (0, 0, 0, 1, 2)
"""By which of a request's totals (time, bytes read, bytes written) each is given out."""
_NEVER = 1 << 62
VALUE, KNOWN, BLURRED = range(3)
"""What was given out; of what total; how much of the value was divided rather than measured."""


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

    def parts(self, amounts: Floats) -> Floats:
        """Return what requests get.

        Args:
            amounts: [phases, 3, requests], what all of them computed in it.

        Returns:
            [phases, counted, 3, requests], by VALUE, KNOWN, BLURRED.
        """
        is_alone = np.count_nonzero(amounts[:, 0] > 0, axis=1) <= 1
        known = amounts[:, BY] * _ratio(self.known, self.totals)[..., None]
        values = known * _ratio(self.values, self.known)[..., None]
        blur = _ratio(self.blurred, self.values)[..., None]
        blurred = values * np.where(is_alone[:, None, None], blur, 1.0)
        return np.stack([values, known, blurred], axis=2)


class _Tenth(msgspec.Struct):
    number: int
    before: Ints
    """[phases, 3, slots], totals at its start."""


class Left(msgspec.Struct):
    """What a request that has ended takes along."""

    given: Floats
    """[phases, counted, 3], settled."""
    totals: list[list[int]]
    """[phases][3], all it computed."""
    unsettled: dict[int, Floats]
    """By tenth, what it computed: [phases, 3]."""


class Accounts:
    """The requests of one engine, by slot, as they share what is counted.

    Attributes:
        last: the newest tenth that is open, -1 where none is.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._open: deque[_Tenth] = deque()
        self._left: list[Left] = []
        self._begun = np.zeros(0, dtype=np.int64)
        """[slots], the tenth in which its request began."""
        self._given = np.zeros((2, NUM_COUNTED, 3, 0))
        self.last = -1

    def reach(self, number: int) -> None:
        """Begin a tenth, if it is a new one."""
        if number > self.last:
            totals = self._work.totals()
            self._grow(totals.shape[2])
            self._open.append(_Tenth(number, totals))
            self.last = number

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        if slot < len(self._begun):
            self._begun[slot] = self.last
            self._given[..., slot] = 0.0

    def leave(self, slot: int) -> Left:
        """End a request; call before its slot is free."""
        now = self._work.totals_of(slot)
        self._grow(slot + 1)
        begun = self._begun.item(slot)
        tenths = [tenth for tenth in self._open if tenth.number >= begun]
        marks = np.array([*(_column(tenth.before, slot) for tenth in tenths), now])
        if tenths and tenths[0].number == begun:
            marks[0] = 0
        amounts = (marks[1:] - marks[:-1]).astype(np.float64)
        unsettled = {tenth.number: each for tenth, each in zip(tenths, amounts, strict=True)}
        left = Left(self._given[..., slot].copy(), now.tolist(), unsettled)
        if unsettled:
            self._left.append(left)
        return left

    def free(self, slot: int) -> None:
        """Give a slot back: what is not settled there is nobody's, until it has another owner."""
        if slot < len(self._begun):
            self._begun[slot] = _NEVER

    def oldest(self) -> int | None:
        """Return the oldest tenth that is not settled."""
        return self._open[0].number if self._open else None

    def settle(self, settled: Settled) -> None:
        """Give out the oldest tenth."""
        tenth = self._open.popleft()
        number = tenth.number
        after = self._open[0].before if self._open else self._work.totals()
        self._grow(after.shape[2])
        amounts = after.astype(np.float64)
        num_before = tenth.before.shape[2]
        begun = self._begun[: amounts.shape[2]]
        amounts[:, :, :num_before] -= np.where(begun[:num_before] == number, 0, tenth.before)
        amounts[:, :, begun > number] = 0.0
        leaving = [left for left in self._left if number in left.unsettled]
        theirs = [left.unsettled.pop(number)[:, :, None] for left in leaving]
        there = np.flatnonzero(amounts[:, 0].any(axis=0))
        parts = settled.parts(np.concatenate([amounts[:, :, there], *theirs], axis=2))
        self._given[..., there] += parts[..., : len(there)]
        for at, left in enumerate(leaving, len(there)):
            left.given += parts[..., at]
        self._left = [left for left in self._left if left.unsettled]

    def stop(self) -> None:
        """Leave open what is open: nobody counts any more."""
        self._open.clear()
        for left in self._left:
            left.unsettled.clear()
        self._left.clear()
        self.last = -1

    def _grow(self, num_slots: int) -> None:
        more = num_slots - len(self._begun)
        if more > 0:
            self._begun = np.concatenate([self._begun, np.full(more, -1, dtype=np.int64)])
            none = np.zeros((2, NUM_COUNTED, 3, more))
            self._given = np.concatenate([self._given, none], axis=3)


def _column(before: Ints, slot: int) -> Ints:
    return before[:, :, slot] if slot < before.shape[2] else np.zeros((2, 3), dtype=np.int64)


def _ratio(part: Floats, whole: Floats) -> Floats:
    found: Floats = np.zeros_like(whole)
    return np.divide(part, whole, out=found, where=whole > 0)
