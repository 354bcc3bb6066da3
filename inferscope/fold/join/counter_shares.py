"""Counter shares of requests: each request's part of the counter values of its steps.

Samples arrive late, and a step has many requests. A journal therefore records what requests compute
and where each bucket of 100 ms begins. When the samples of a bucket have arrived, each request gets
a share of their values:

    by phase:   share = counted in the bucket · its time (modelled bytes) / all time (all bytes)

An ended request keeps its slot until all of its buckets are settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.fold.work_totals import TOTALLED, Journal, WorkTotals

Floats = NDArray[np.float64]

BUCKET_NS = 100_000_000
SM_ACTIVE, BUSY, ENERGY, READ, WRITE = range(5)
"""Counted quantities, in nanoseconds, nanoseconds, microjoules, bytes and bytes."""
NUM_COUNTED = 5
BY = (0, 0, 0, 1, 2)
"""Request total (time, bytes read, bytes written) by which each quantity is divided."""
NUM_BY = 3
_NUM_GIVEN = 2 * NUM_COUNTED * 3
_BY_PHASE = np.repeat([phase * NUM_BY + by for phase in (0, 1) for by in BY], 3)
"""[phases · counted · 3], index of the request total by which each value is divided."""
_NO_RATES = (0.0, 0.0, 0.0)
_AT_ONCE = 16
"""Most buckets summed in one array: after a stall there are hundreds, of thousands of slots."""
_totalled = itemgetter(*TOTALLED)


class SettledBucket(NamedTuple):
    """Sampled values of the steps of one bucket: [phases · counted] each."""

    values: Sequence[float]
    known: Sequence[float]
    """Part of the steps' time or bytes that samples cover."""
    totals: Sequence[float]
    """Time or bytes of all steps."""
    blurred: Sequence[float]
    """Part of the values that was divided over phases."""

    def rates(self, is_prefill_alone: bool, is_decode_alone: bool) -> list[float]:
        """Return the values that requests get per unit of time or bytes.

        Args:
            is_prefill_alone: at most one request computed in prefill.
            is_decode_alone: at most one request computed in decode.

        Returns:
            [phases · counted · 3]: the value, the covered part of the total, and the part of the
            value that was divided rather than measured.
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


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """An ended request whose buckets are not all settled."""

    slot: int
    num_buckets: int
    """Number of buckets begun by its end; all its compute is in them."""
    totals: tuple[int, ...]
    """[phases · 3], time in nanoseconds, bytes read and bytes written of the request."""


class CounterShares:
    """Division of one engine's counter values among its requests.

    Attributes:
        last: number of the newest bucket, -1 before the first.
    """

    def __init__(self, work: WorkTotals, free: deque[int]) -> None:
        """Start without requests.

        Args:
            work: source of what requests compute.
            free: receives the slots that no unsettled bucket refers to.
        """
        self._work = work
        self._free = free
        self._given = np.zeros((0, _NUM_GIVEN))
        """[slots, phases · counted · 3], sums in the layout of `SettledBucket.rates`."""
        self._numbers: deque[int] = deque()
        """Numbers of the unsettled buckets."""
        self._ends: list[int] = []
        """Journal positions at which the unsettled buckets that are over end."""
        self._waiting: set[int] = set()
        """Slots of ended requests whose values have not been taken."""
        self._resting: deque[tuple[int, int]] = deque()
        """Slots of removed requests, each with the number of settled buckets that frees it."""
        self._num_begun = self._num_settled = 0
        """Buckets begun, buckets settled."""
        self.last = -1

    def reach(self, number: int) -> None:
        """Begin a bucket unless it has begun."""
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
        """Extend the columns to `num_slots` slots."""
        more = np.zeros((num_slots - len(self._given), _NUM_GIVEN))
        self._given = np.concatenate([self._given, more])

    def leave(self, slot: int, at_ns: int, prefill: list[int], decode: list[int]) -> EndedRequest:
        """End a request; call this before its slot is freed.

        Args:
            slot: its slot.
            at_ns: time of its end; buckets that began later hold nothing of it.
            prefill: its prefill totals, by column.
            decode: its decode totals, by column.
        """
        self._waiting.add(slot)
        num_buckets = self._num_begun - sum(number * BUCKET_NS > at_ns for number in self._numbers)
        return EndedRequest(slot, num_buckets, _totalled(prefill) + _totalled(decode))

    def free(self, slot: int) -> None:
        """Return a slot to the free list once no unsettled bucket refers to it."""
        if slot not in self._waiting:
            self._rest(slot, self._num_begun)

    def is_settled(self, left: EndedRequest) -> bool:
        """Return whether all buckets of an ended request are settled."""
        return left.num_buckets <= self._num_settled

    def take(self, left: Sequence[EndedRequest]) -> list[list[float]]:
        """Return the values of ended requests, and release their slots.

        Returns:
            [phases · counted · 3] of each request, in the layout of `SettledBucket.rates`.
        """
        given: list[list[float]] = self._given[[each.slot for each in left]].tolist()
        for each in left:
            self._waiting.discard(each.slot)
            self._rest(each.slot, self._num_begun)
        return given

    def _rest(self, slot: int, num_buckets: int) -> None:
        if num_buckets > self._num_settled:
            self._resting.append((num_buckets, slot))
            return
        self._given[slot] = 0.0
        self._free.append(slot)

    def open(self) -> list[int]:
        """Return the numbers of the unsettled buckets, oldest first."""
        return list(self._numbers)

    def settle(self, settled: Sequence[SettledBucket]) -> None:
        """Divide the values of the oldest buckets among their requests."""
        for at in range(0, len(settled), _AT_ONCE):
            self._settle(settled[at : at + _AT_ONCE])

    def _settle(self, settled: Sequence[SettledBucket]) -> None:
        num, journal = len(settled), self._work.journal
        assert journal is not None  # a bucket has begun
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
        """Drop the unsettled buckets: no sampler runs any more."""
        self._numbers.clear()
        self._ends.clear()
        self._work.journal = None
        self._num_settled = self._num_begun
        self.last = -1
        while self._resting:
            self._rest(self._resting.popleft()[1], 0)
