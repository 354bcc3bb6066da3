"""Buffer of one rank's steps, with their expected amounts, until its device's samples arrive.

A step is buffered from its booking until no further sample can reach it. Its expected amounts are
its time by phase, and the modelled bytes and FLOPs. Samples yield rates per unit of these amounts:

    energy of decode = its time · rate + its bytes · rate + ...

Samples therefore add nothing to a step itself. A sample adds to each bucket of 100 ms that its
window overlaps, by the expected amounts of that bucket's steps within the window:

    steps     ┌── 1 ──┐┌── 2 ──┐  ┌── 3 ──┐┌── 4 ──┐
    buckets   ┊◄───── 7 ──────►┊◄────── 8 ────────►┊      from the end of one step to another
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

from inferscope.attribution import amounts_until
from inferscope.fold.join.counter_shares import BUSY, ENERGY, NUM_COUNTED, READ, SM_ACTIVE, WRITE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Amounts = list[float]
"""[NUM_EXPECTED]"""

Moved = tuple[int, int, int, int, int, int]
"""Bytes read, bytes written and FLOPs, each of prefill and of decode."""
NOTHING_MOVED: Moved = (0, 0, 0, 0, 0, 0)

# First column of each expected amount: prefill, followed by decode.
TIME, BYTES_READ, BYTES_WRITTEN, FLOPS = 0, 2, 4, 6
NUM_EXPECTED = 8

BY_EXPECTED = {SM_ACTIVE: TIME, BUSY: TIME, ENERGY: TIME, READ: BYTES_READ, WRITE: BYTES_WRITTEN}
"""Expected amount that measures the coverage of each quantity by samples."""
# Offsets of the parts of a bucket's values: [phases · counted] each.
VALUES, KNOWN, BLURRED = (part * 2 * NUM_COUNTED for part in range(3))
NUM_GIVEN = 3 * 2 * NUM_COUNTED

_MOST_FORGOTTEN = 1024
_END_OF_TIME_NS = 1 << 62


class StepBucket:
    """Steps of one rank that ended in a bucket of 100 ms.

    Attributes:
        number: number of the bucket.
        first: number of its first step.
        given: [NUM_GIVEN], values from samples.
        rest: [NUM_EXPECTED], amounts of steps that no sample can reach; None without such steps.
    """

    __slots__ = ("first", "given", "number", "rest")

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        self.given = [0.0] * NUM_GIVEN
        self.rest: Amounts | None = None


class StepPosition(NamedTuple):
    """Position of a time among the steps of one rank."""

    step: int
    """Index of the step that runs then, or of the first later one."""
    part: float
    """Part of that step that is over: 0..1."""
    ran_ns: int
    """Time of that step that is over, in nanoseconds."""


class StepBuffer:
    """Buffer of one rank's steps that wait for its device's samples.

    Attributes:
        buckets: unsettled buckets.
        until_ns: end of the last step added to the sums.
    """

    def __init__(self) -> None:
        self.buckets: deque[StepBucket] = deque()
        self.until_ns = 0
        self._new: list[tuple[float, ...]] = []
        """Start, end and expected amounts of steps not yet added to the sums."""
        self._starts_ns: list[int] = []
        self._ends_ns: list[int] = []
        self._expected: list[list[float]] = [[] for _ in range(NUM_EXPECTED)]
        """[NUM_EXPECTED][steps]; whole numbers, whose sums are exact."""
        self._first = 0
        """Index of the first step that is kept."""
        self._num_gone = 0
        """Number of steps removed from the lists."""
        self._gone_until_ns = 0
        """End of the last removed step."""
        self.add = self._new.append

    def begin(self, number: int) -> None:
        """Begin a bucket: later steps belong to it."""
        first = self._num_gone + len(self._ends_ns) + len(self._new)
        if self.buckets and self.buckets[-1].first == first:
            self.buckets.pop()  # it has no steps
        self.buckets.append(StepBucket(number, first))

    def read_in(self) -> None:
        """Add the steps since the last call to the sums."""
        if not self._new:
            return
        began_ns, ended_ns, *rest = zip(*self._new, strict=True)
        self._new.clear()
        columns: list[Sequence[float]] = [*rest]
        # If steps overlap, the later one is cut, as in `devices`.
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
        """Move the amounts of zero-length steps to `rest`: no window contains such a step."""
        num = self._num_gone + len(self._ends_ns)
        for at, step in enumerate(zip(*columns, strict=True)):
            if not busy_ns[at]:
                reached = (each for each in reversed(self.buckets) if each.first <= num + at)
                bucket = next(reached, None)
                if bucket is not None:  # else its bucket is settled
                    bucket.rest = list(map(add, bucket.rest or [0] * NUM_EXPECTED, step))
        return [
            [amount if ns else 0 for amount, ns in zip(column, busy_ns, strict=True)]
            for column in columns
        ]

    def place(self, at_ns: int) -> StepPosition:
        """Return the position of a time among the steps."""
        step = bisect_right(self._ends_ns, at_ns, self._first)
        if step == len(self._ends_ns):
            return StepPosition(step, 0.0, 0)
        start_ns = self._starts_ns[step]
        if at_ns <= start_ns:
            return StepPosition(step, 0.0, 0)
        return StepPosition(
            step, (at_ns - start_ns) / (self._ends_ns[step] - start_ns), at_ns - start_ns
        )

    def between(self, begin: StepPosition, end: StepPosition) -> Amounts:
        """Return the expected amounts of the steps between two positions."""
        (first, part, _), (last, last_part, _) = begin, end
        amounts = [sum(column[first:last]) for column in self._expected]
        if part:
            for at, column in enumerate(self._expected):
                amounts[at] -= part * column[first]
        if last_part:
            for at, column in enumerate(self._expected):
                amounts[at] += last_part * column[last]
        return amounts

    def busy_ns(self, begin: StepPosition, end: StepPosition) -> int:
        """Return the time that steps ran between two positions."""
        first, last = begin.step, end.step
        whole_ns = sum(self._ends_ns[first:last]) - sum(self._starts_ns[first:last])
        return whole_ns + end.ran_ns - begin.ran_ns

    def amounts_until(self, until_ns: Ints) -> Floats:
        """Return cumulative amounts of the steps up to each time, from a common earlier time.

        Args:
            until_ns: [times], in nanoseconds.

        Returns:
            [NUM_EXPECTED + 5, times]: the expected amounts, the time that steps ran, and the time
            of steps that move bytes: read and written, each divided between prefill and decode by
            their bytes.
        """
        begin = bisect_right(self._ends_ns, int(until_ns.min()), self._first)
        end = bisect_left(self._starts_ns, int(until_ns.max()), begin)
        expected = [column[begin:end] for column in self._expected]
        starts_ns, ends_ns = self._spans(begin, end)
        amounts = np.array([*expected, (ends_ns - starts_ns).tolist()], dtype=np.float64)
        amounts = np.concatenate([amounts, _moving_ns(amounts)])
        return amounts_until(starts_ns, ends_ns, amounts, until_ns)

    def spans_between(self, from_ns: int, to_ns: int) -> tuple[Ints, Ints]:
        """Return the starts and ends of the steps that overlap a window."""
        begin = bisect_right(self._ends_ns, from_ns, self._first)
        return self._spans(begin, bisect_left(self._starts_ns, to_ns, begin))

    def _spans(self, begin: int, end: int) -> tuple[Ints, Ints]:
        starts_ns = np.array(self._starts_ns[begin:end], dtype=np.int64)
        return starts_ns, np.array(self._ends_ns[begin:end], dtype=np.int64)

    def windows(self, from_ns: int, to_ns: int) -> list[tuple[StepBucket, int, int]]:
        """Return the buckets that overlap a window, each with the interval of its steps."""
        found, until_ns = list[tuple[StepBucket, int, int]](), _END_OF_TIME_NS
        for bucket in reversed(self.buckets):
            first = bucket.first - self._num_gone
            since_ns = self._ends_ns[first - 1] if first else self._gone_until_ns
            if since_ns < to_ns and until_ns > from_ns:
                found.append((bucket, since_ns, until_ns))
            until_ns = since_ns
        return found

    def settle(self, number: int) -> tuple[StepBucket, Amounts] | None:
        """Close a bucket; return it with the expected amounts of all its steps.

        Return None if no step is in it.
        """
        buckets = self.buckets
        while buckets and buckets[0].number < number:
            buckets.popleft()
        if not buckets or buckets[0].number != number:
            return None
        bucket = buckets.popleft()
        first = bucket.first - self._num_gone
        last = buckets[0].first - self._num_gone if buckets else len(self._ends_ns)
        amounts = [sum(column[first:last]) for column in self._expected]
        return bucket, amounts if bucket.rest is None else list(map(add, amounts, bucket.rest))

    def forget(self, before_ns: int) -> None:
        """Remove the settled steps that ended before a time."""
        end = self.buckets[0].first - self._num_gone if self.buckets else len(self._ends_ns)
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
        """Return whether the buffer holds no step."""
        return self._first == len(self._ends_ns) and not self._new


def _moving_ns(amounts: Floats) -> Floats:
    """Return the time of steps that move bytes, divided by phase: [4, steps].

    Only within a mixed step does the division depend on the model.
    """
    took_ns = amounts[TIME] + amounts[TIME + 1]
    by_phase = amounts[BYTES_READ:FLOPS].reshape(2, 2, -1)
    moved = by_phase.sum(axis=1)
    ns_per_byte = np.zeros_like(moved)
    np.divide(took_ns, moved, out=ns_per_byte, where=moved > 0)
    moving_ns: Floats = (by_phase * ns_per_byte[:, None]).reshape(4, -1)
    return moving_ns
