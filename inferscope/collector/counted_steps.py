"""The steps of one rank while samples of its device come in: what each is expected to take.

A step stands here from when it is booked until no sample can reach it any more. What is expected of
it: its time by phase, and the bytes and FLOPs of the model. What samples give is always so much per
unit of one of these:

    energy of decode = its time · rate + its bytes · rate + ...

So nothing is given to a step itself. A sample gives to each tenth of a second that its window
reaches into, by what is expected of the steps of that tenth in that window:

    steps     ┌── 1 ──┐┌── 2 ──┐  ┌── 3 ──┐┌── 4 ──┐
    tenths    ┊◄───── 7 ──────►┊◄────── 8 ────────►┊      from the end of a step to that of another
    samples        │◄──────── a ────────►│
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import add, eq, sub
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.samples import amounts_until
from inferscope.collector.accounts import BUSY, ENERGY, NUM_COUNTED, READ, SM_ACTIVE, WRITE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Amounts = list[float]
"""[NUM_EXPECTED]"""

Moved = tuple[int, int, int, int, int, int]
"""Bytes read, bytes written and FLOPs, each of prefill and of decode."""
NOTHING_MOVED: Moved = (0, 0, 0, 0, 0, 0)

# What is expected of a step, each of prefill and behind it of decode:
TIME, BYTES_READ, BYTES_WRITTEN, FLOPS = 0, 2, 4, 6
NUM_EXPECTED = 8

BY_EXPECTED = {SM_ACTIVE: TIME, BUSY: TIME, ENERGY: TIME, READ: BYTES_READ, WRITE: BYTES_WRITTEN}
"""What is counted, by which of these it is known how much of it."""
# Where in what a tenth is given each part of it begins: [phases · counted].
VALUES, KNOWN, BLURRED = (part * 2 * NUM_COUNTED for part in range(3))
NUM_GIVEN = 3 * 2 * NUM_COUNTED

_MOST_FORGOTTEN = 1024
_END_OF_TIME_NS = 1 << 62


class Tenth:
    """The steps of one rank that ended in a tenth of a second.

    Attributes:
        number: of the tenth.
        first: the number of its first step.
        given: [NUM_GIVEN], by samples.
        rest: [NUM_EXPECTED], what is expected of steps that no sample can reach; None without such.
    """

    __slots__ = ("first", "given", "number", "rest")

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        self.given = [0.0] * NUM_GIVEN
        self.rest: Amounts | None = None


class Place(NamedTuple):
    """A time among the steps of one rank."""

    step: int
    """That runs then, or the first one behind."""
    part: float
    """Of that, what is over: 0..1."""
    ran_ns: int
    """The same."""


class CountedSteps:
    """The steps of one rank that wait for its device's samples.

    Attributes:
        tenths: those that are not settled.
        until_ns: the end of the last step that was read in.
    """

    def __init__(self) -> None:
        self.tenths: deque[Tenth] = deque()
        self.until_ns = 0
        self._new: list[tuple[float, ...]] = []
        """Start, end and what is expected of steps that have not been read in."""
        self._starts_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._expected: list[list[float]] = [[] for _ in range(NUM_EXPECTED)]
        """[NUM_EXPECTED][steps]; whole numbers, whose sums are exact."""
        self._first = 0
        """Of the steps, that is not forgotten."""
        self._num_gone = 0
        """Steps before those in the lists, and when the last of them ended."""
        self._gone_until_ns = 0
        self.add = self._new.append

    def begin(self, number: int) -> None:
        """Begin a tenth: all steps that are added from now on are of it."""
        first = self._num_gone + len(self._ends_ns) + len(self._new)
        if self.tenths and self.tenths[-1].first == first:
            self.tenths.pop()  # it has no steps
        self.tenths.append(Tenth(number, first))

    def read_in(self) -> None:
        """Add the steps that came since the last call to the sums."""
        if not self._new:
            return
        began_ns, ended_ns, *rest = zip(*self._new, strict=True)
        self._new.clear()
        columns: list[Sequence[float]] = [*rest]
        # Where steps overlap the later is cut, as in `devices`.
        ends_ns: list[int] = list(accumulate(ended_ns, max, initial=self.until_ns))
        starts_ns: list[int] = list(map(max, began_ns, ends_ns))
        del ends_ns[0]
        if any(map(eq, starts_ns, ends_ns)):
            busy_ns = list(map(sub, ends_ns, starts_ns))
            columns = self._without_unreachable(columns, busy_ns)
        for expected, column in zip(self._expected, columns, strict=True):
            expected += column
        self._starts_ns += starts_ns
        self._ends_ns += ends_ns
        self.until_ns = ends_ns[-1]

    def _without_unreachable(
        self, columns: list[Sequence[float]], busy_ns: list[int]
    ) -> list[Sequence[float]]:
        """Put what is expected of new steps of no length aside: they have no part in any window."""
        num = self._num_gone + len(self._ends_ns)
        for at, step in enumerate(zip(*columns, strict=True)):
            if not busy_ns[at]:
                reached = (each for each in reversed(self.tenths) if each.first <= num + at)
                tenth = next(reached, None)
                if tenth is not None:  # else it came after all of its time was given out
                    tenth.rest = list(map(add, tenth.rest or [0] * NUM_EXPECTED, step))
        return [
            [amount if ns else 0 for amount, ns in zip(column, busy_ns, strict=True)]
            for column in columns
        ]

    def place(self, at_ns: int) -> Place:
        """Find a time."""
        step = bisect_right(self._ends_ns, at_ns, self._first)
        if step == len(self._ends_ns):
            return Place(step, 0.0, 0)
        start_ns = self._starts_ns[step]
        if at_ns <= start_ns:
            return Place(step, 0.0, 0)
        return Place(step, (at_ns - start_ns) / (self._ends_ns[step] - start_ns), at_ns - start_ns)

    def between(self, begin: Place, end: Place) -> Amounts:
        """Return what is expected of its steps between two times."""
        (first, part, _), (last, last_part, _) = begin, end
        amounts = [sum(column[first:last]) for column in self._expected]
        if part:
            for at, column in enumerate(self._expected):
                amounts[at] -= part * column[first]
        if last_part:
            for at, column in enumerate(self._expected):
                amounts[at] += last_part * column[last]
        return amounts

    def busy_ns(self, begin: Place, end: Place) -> int:
        """Return for how long its steps ran between two times."""
        first, last = begin.step, end.step
        whole_ns = sum(self._ends_ns[first:last]) - sum(self._starts_ns[first:last])
        return whole_ns + end.ran_ns - begin.ran_ns

    def amounts_until(self, until_ns: Ints) -> Floats:
        """Sum how much of its steps' amounts lies before times, from some time before them on.

        Args:
            until_ns: [times].

        Returns:
            [NUM_EXPECTED + 5, times]; behind what is expected for how long steps ran, and the time
            of those that move bytes: read and written, each of prefill and of decode, by whose
            bytes these are.
        """
        begin = bisect_right(self._ends_ns, int(until_ns.min()), self._first)
        end = bisect_left(self._starts_ns, int(until_ns.max()), begin)
        expected = [column[begin:end] for column in self._expected]
        starts_ns, ends_ns = self._spans(begin, end)
        amounts = np.array([*expected, (ends_ns - starts_ns).tolist()], dtype=np.float64)
        amounts = np.concatenate([amounts, _moving_ns(amounts)])
        return amounts_until(starts_ns, ends_ns, amounts, until_ns)

    def spans_between(self, from_ns: int, to_ns: int) -> tuple[Ints, Ints]:
        """Return start and end of the steps that share time with a window."""
        begin = bisect_right(self._ends_ns, from_ns, self._first)
        return self._spans(begin, bisect_left(self._starts_ns, to_ns, begin))

    def _spans(self, begin: int, end: int) -> tuple[Ints, Ints]:
        starts_ns = np.array(self._starts_ns[begin:end], dtype=np.int64)
        return starts_ns, np.array(self._ends_ns[begin:end], dtype=np.int64)

    def windows(self, from_ns: int, to_ns: int) -> list[tuple[Tenth, int, int]]:
        """Return the tenths that share a window, and from when until when each one's steps ran."""
        found, until_ns = list[tuple[Tenth, int, int]](), _END_OF_TIME_NS
        for tenth in reversed(self.tenths):
            first = tenth.first - self._num_gone
            since_ns = self._ends_ns[first - 1] if first else self._gone_until_ns
            if since_ns < to_ns and until_ns > from_ns:
                found.append((tenth, since_ns, until_ns))
            until_ns = since_ns
        return found

    def settle(self, number: int) -> tuple[Tenth, Amounts] | None:
        """Return a tenth, which takes no more, and what is expected of all of its steps.

        None where no step was in it.
        """
        tenths = self.tenths
        while tenths and tenths[0].number < number:
            tenths.popleft()
        if not tenths or tenths[0].number != number:
            return None
        tenth = tenths.popleft()
        first = tenth.first - self._num_gone
        last = tenths[0].first - self._num_gone if tenths else len(self._ends_ns)
        amounts = [sum(column[first:last]) for column in self._expected]
        return tenth, amounts if tenth.rest is None else list(map(add, amounts, tenth.rest))

    def forget(self, before_ns: int) -> None:
        """Let go of settled steps that ended before a time."""
        end = self.tenths[0].first - self._num_gone if self.tenths else len(self._ends_ns)
        self._first = first = bisect_left(self._ends_ns, before_ns, self._first, end)
        if first > _MOST_FORGOTTEN:
            self._gone_until_ns = self._ends_ns[first - 1]
            del self._starts_ns[:first], self._ends_ns[:first]
            for column in self._expected:
                del column[:first]
            self._num_gone += first
            self._first = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether it holds no step."""
        return self._first == len(self._ends_ns) and not self._new


def _moving_ns(amounts: Floats) -> Floats:
    """Return the time of steps that move bytes, by whose bytes they are: [4, steps].

    Only within a mixed step do they go by the model.
    """
    took_ns = amounts[TIME] + amounts[TIME + 1]
    by_phase = amounts[BYTES_READ:FLOPS].reshape(2, 2, -1)
    moved = by_phase.sum(axis=1)
    ns_per_byte = np.zeros_like(moved)
    np.divide(took_ns, moved, out=ns_per_byte, where=moved > 0)
    moving_ns: Floats = (by_phase * ns_per_byte[:, None]).reshape(4, -1)
    return moving_ns
