"""One device's steps while samples of it come in: what each is expected to take, what it is given.

A step stands here from when it is booked until no sample can reach it any more. What is expected of
it: its time by phase, and the bytes and FLOPs of the model. What it is given of a sample is always
so much per unit of one of these, and so much is all that is kept:

    energy of a decode = ENERGY_OF_DECODE · its time + ENERGY_OF_BYTES · its bytes + ...

All of it stands in one table of a column for each step, so that what a tenth of a second has been
given is a few sums of products of two rows.

Ranks may share a device. Each does one thing after the other, but two of them run at once:

    rank 0  ┌── 1 ──┐  ┌── 2 ──┐         a sample of the device is divided over all steps that it
    rank 1     ┌─── 1 ───┐┌─── 2 ───┐    touches, of both
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.samples import Covering, Touching, covering, in_lanes, touching
from inferscope.collector.accounts import BUSY, ENERGY, NUM_COUNTED, READ, SM_ACTIVE, WRITE, Settled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Moved = tuple[int, int, int, int, int, int]
"""Bytes read, bytes written and FLOPs, each of prefill and of decode."""
NOTHING_MOVED: Moved = (0, 0, 0, 0, 0, 0)

# Rows of the table. What is expected, each of prefill and behind it of decode:
TIME, BYTES_READ, BYTES_WRITTEN, FLOPS = 0, 2, 4, 6
NUM_EXPECTED = 8
_ONE = 8
# What is given per unit of it; the same again for what was divided over phases rather than measured
# of one; energy, which always is; and by what is counted, the share of the step that samples cover.
SM_OF_PREFILL, SM_OF_DECODE, BUSY_OF_TIME, READ_OF_READ, WRITE_OF_WRITE = range(5)
NUM_MEASURABLE = BLURRED = 5
ENERGY_OF_PREFILL, ENERGY_OF_DECODE, ENERGY_OF_BYTES, ENERGY_OF_FLOPS = range(10, 14)
COVERED = 14
NUM_GIVEN = COVERED + NUM_COUNTED
_GIVEN = _ONE + 1
_NUM_ROWS = _GIVEN + NUM_GIVEN

_FIRST_ROOM = 512


class UnderLong(NamedTuple):
    """A few long samples as they lie over steps.

    Attributes:
        begin: the first of the steps.
        end: behind the last.
        pairs: of samples and steps.
        busy_ns: [samples], for how long any step ran.
        sums: [samples][NUM_EXPECTED], what is expected of it.
    """

    begin: int
    end: int
    pairs: Covering
    busy_ns: list[float]
    sums: list[list[float]]


class UnderShort(NamedTuple):
    """Many short samples as they lie over steps.

    Attributes:
        begin: the first of the steps.
        end: behind the last.
        pairs: of samples and steps.
        busy_ns: [samples], for how long any step ran.
        sums: [NUM_EXPECTED, samples], what is expected of it.
        moving_ns: [read and written, samples], by what bytes are divided: the time of steps that
            move some. Only within a mixed step do they go by the model.
        ns_per_byte: [read and written, steps].
    """

    begin: int
    end: int
    pairs: Touching
    busy_ns: Floats
    sums: Floats
    moving_ns: Floats
    ns_per_byte: Floats


class CountedSteps:
    """The steps of one device that wait for its samples."""

    def __init__(self) -> None:
        self._new_spans = array("q")
        """Ring, start and end, by step; not in the table yet."""
        self._new_expected = array("d")
        self._table = _no_steps(_FIRST_ROOM)
        self._ring, self._starts_ns, self._ends_ns, self._reached_ns = (
            np.zeros(_FIRST_ROOM, dtype=np.int64) for _ in range(4)
        )
        """By column: whose it is, when it began and ended, and the last end up to it."""
        self._first = self._end = 0
        """Of the columns in use."""
        self._tenths: list[tuple[int, int]] = []
        """Each that has steps, and its first column."""
        self._last_tenth = -1
        self._until_ns: dict[int, int] = {}
        """By ring, when its last step ended."""

    def add(
        self, ring: int, tenth: int, *, span_ns: tuple[int, int], expected: Sequence[float]
    ) -> None:
        """Take a step.

        Args:
            ring: of the rank, whose steps follow each other.
            tenth: that it is of.
            span_ns: its start and end.
            expected: [NUM_EXPECTED], its time and what is modelled of it.
        """
        start_ns, end_ns = span_ns
        # Where a rank's steps overlap the later is cut, as in `devices`.
        until_ns = self._until_ns.get(ring, 0)
        if start_ns < until_ns:
            start_ns, end_ns = until_ns, max(end_ns, until_ns)
        self._until_ns[ring] = end_ns
        if tenth != self._last_tenth:
            self._last_tenth = tenth
            self._tenths.append((tenth, self._end + len(self._new_spans) // 3))
        self._new_spans.extend((ring, start_ns, end_ns))
        self._new_expected.extend(expected)

    def read_in(self) -> None:
        """Put the steps that came since the last call into the table."""
        num = len(self._new_spans) // 3
        if not num:
            return
        if self._end + num > len(self._ring):
            self._make_room(num)
        begin, end = self._end, self._end + num
        spans = np.frombuffer(self._new_spans, dtype=np.int64).reshape(num, 3)
        expected = np.frombuffer(self._new_expected).reshape(num, NUM_EXPECTED)
        self._new_spans, self._new_expected = array("q"), array("d")
        self._ring[begin:end] = spans[:, 0]
        self._starts_ns[begin:end] = spans[:, 1]
        self._ends_ns[begin:end] = spans[:, 2]
        reached_ns = self._reached_ns[begin:end]
        np.maximum.accumulate(spans[:, 2], out=reached_ns)
        if begin > self._first:
            np.maximum(reached_ns, self._reached_ns[begin - 1], out=reached_ns)
        self._table[:NUM_EXPECTED, begin:end] = expected.T
        self._end = end

    def under_long(self, from_ns: list[int], to_ns: list[int]) -> UnderLong:
        """Lay long samples over the steps.

        Args:
            from_ns: [samples], where each begins.
            to_ns: [samples], where it ends.
        """
        begin, end = self._between(min(from_ns), max(to_ns))
        starts_ns, ends_ns = self._starts_ns[begin:end], self._ends_ns[begin:end]
        edges = np.array([from_ns, to_ns])
        pairs = covering(starts_ns, ends_ns, edges[0], edges[1])
        busy_ns = pairs.busy_ns()
        if len(self._until_ns) > 1:
            busy_ns = touching(*_merged(starts_ns, ends_ns), edges[0], edges[1]).busy_ns()
        sums = pairs.sums(self._table[:NUM_EXPECTED, begin:end])
        return UnderLong(begin, end, pairs, busy_ns.tolist(), sums.T.tolist())

    def under_short(self, from_ns: Ints, to_ns: Ints) -> UnderShort:
        """Lay short samples over the steps; see `under_long`."""
        begin, end = self._between(int(from_ns.min()), int(to_ns.max()))
        starts_ns, ends_ns = self._starts_ns[begin:end], self._ends_ns[begin:end]
        pairs = in_lanes(starts_ns, ends_ns, _lanes(self._ring[begin:end]), from_ns, to_ns)
        busy_ns = pairs.busy_ns()
        if len(self._until_ns) > 1:
            busy_ns = touching(*_merged(starts_ns, ends_ns), from_ns, to_ns).busy_ns()
        expected = self._table[:NUM_EXPECTED, begin:end]
        took_ns = expected[TIME] + expected[TIME + 1]
        moved = expected[BYTES_READ : BYTES_WRITTEN + 2].reshape(2, 2, -1).sum(axis=1)
        ns_per_byte = np.zeros_like(moved)
        np.divide(took_ns, moved, out=ns_per_byte, where=moved > 0)
        sums = pairs.sums(np.concatenate([expected, moved * ns_per_byte]))
        return UnderShort(begin, end, pairs, busy_ns, sums[:-2], sums[-2:], ns_per_byte)

    def give(self, under: UnderLong | UnderShort, rates: Floats) -> None:
        """Give samples to the steps.

        Args:
            under: how they lie over them.
            rates: [NUM_GIVEN, samples], what each unit of what is expected of a step is given, for
                all of the step; of the covered, what part of the step is.
        """
        given = under.pairs.shares(rates)
        if isinstance(under, UnderShort):
            given[READ_OF_READ : WRITE_OF_WRITE + 1] *= under.ns_per_byte
            given[BLURRED + READ_OF_READ : BLURRED + WRITE_OF_WRITE + 1] *= under.ns_per_byte
        into = self._table[_GIVEN:, under.begin : under.end]
        into += given
        covered = into[COVERED:]
        np.minimum(covered, 1.0, out=covered)

    def _between(self, from_ns: int, to_ns: int) -> tuple[int, int]:
        """Return the columns of all steps that share time with some span, and maybe of others."""
        first, end = self._first, self._end
        begin = first + int(self._reached_ns[first:end].searchsorted(from_ns, "right"))
        if len(self._until_ns) < 2:
            end = begin + int(self._starts_ns[begin:end].searchsorted(to_ns, "left"))
        return begin, end

    def of_tenth(self, number: int) -> Settled:
        """Sum the steps of a tenth."""
        at = bisect_left(self._tenths, (number,))
        if at == len(self._tenths) or self._tenths[at][0] != number:
            return Settled(*np.zeros((4, 2, NUM_COUNTED)))
        begin = self._tenths[at][1]
        end = self._tenths[at + 1][1] if at + 1 < len(self._tenths) else self._end
        table = self._table[:, begin:end]
        terms = table.take(_FACTORS[0], axis=0)
        terms *= table.take(_FACTORS[1], axis=0)
        sums = np.add.reduce(terms, axis=1)
        return Settled(*np.bincount(_TARGETS, sums).reshape(4, 2, NUM_COUNTED))

    def forget(self, number: int, before_ns: int) -> None:
        """Let go of the steps up to a tenth that no sample can reach any more."""
        tenths, first, end = self._tenths, self._first, self._end
        at = bisect_right(tenths, (number, end))
        begin = tenths[at][1] if at < len(tenths) else end
        reached = int(self._reached_ns[first:end].searchsorted(before_ns, "left"))
        self._first = first = min(begin, first + reached)
        num_gone = bisect_right(tenths, first, key=_column) - 1
        if num_gone > 0:
            del tenths[:num_gone]
        if len(self._until_ns) > 1:
            left = {ring: at_ns for ring, at_ns in self._until_ns.items() if at_ns >= before_ns}
            self._until_ns = left

    def _make_room(self, num: int) -> None:
        """Move what is still needed to the front, of twice the room if that is half full."""
        first, used = self._first, self._end - self._first
        room = len(self._ring)
        while room < 2 * (used + num):
            room *= 2
        table = _no_steps(room)
        table[:, :used] = self._table[:, first : self._end]
        columns = np.zeros((4, room), dtype=np.int64)
        for column, now in zip(
            columns, (self._ring, self._starts_ns, self._ends_ns, self._reached_ns), strict=True
        ):
            column[:used] = now[first : self._end]
        self._table = table
        self._ring, self._starts_ns, self._ends_ns, self._reached_ns = columns
        self._tenths = [(number, max(0, begin - first)) for number, begin in self._tenths]
        self._first, self._end = 0, used


def _no_steps(room: int) -> Floats:
    """Return a table for steps that nothing is expected of and nothing is given to yet."""
    table = np.zeros((_NUM_ROWS, room))
    table[_ONE] = 1.0
    return table


def _terms() -> tuple[Ints, Ints]:
    """Return which rows' products make up what is settled of a tenth, and where each goes.

    Returns:
        [2, terms], rows of the table; [terms], places in values, known, totals, blurred, each by
        phase and what is counted.
    """
    rows, targets = list[tuple[int, int]](), list[int]()
    expected = {SM_ACTIVE: TIME, BUSY: TIME, ENERGY: TIME, READ: BYTES_READ, WRITE: BYTES_WRITTEN}
    for phase in (0, 1):
        measurable = [
            (SM_ACTIVE, SM_OF_PREFILL + phase, TIME),
            (BUSY, BUSY_OF_TIME, TIME),
            (READ, READ_OF_READ, BYTES_READ),
            (WRITE, WRITE_OF_WRITE, BYTES_WRITTEN),
        ]
        energy = [
            (ENERGY, ENERGY_OF_PREFILL + phase, TIME),
            (ENERGY, ENERGY_OF_BYTES, BYTES_READ),
            (ENERGY, ENERGY_OF_BYTES, BYTES_WRITTEN),
            (ENERGY, ENERGY_OF_FLOPS, FLOPS),
        ]
        blurred = [(counted, BLURRED + given, of) for counted, given, of in measurable]
        known = [(counted, COVERED + counted, of) for counted, of in expected.items()]
        totals = [(counted, _ONE - _GIVEN, of) for counted, of in expected.items()]
        for kind, terms in enumerate((measurable + energy, known, totals, blurred + energy)):
            for counted, given, of in terms:
                rows.append((_GIVEN + given, of + phase))
                targets.append((kind * 2 + phase) * NUM_COUNTED + counted)
    return np.array(rows).T, np.array(targets)


_FACTORS, _TARGETS = _terms()


def _column(tenth: tuple[int, int]) -> int:
    return tenth[1]


def _lanes(rings: Ints) -> list[Ints]:
    return [np.flatnonzero(rings == ring) for ring in np.unique(rings)]


def _merged(starts_ns: Ints, ends_ns: Ints) -> tuple[Ints, Ints]:
    """Return spans one after the other: where they overlap the later is cut."""
    order = np.argsort(starts_ns, kind="stable")
    ends_ns = np.maximum.accumulate(ends_ns[order])
    starts_ns = starts_ns[order]
    starts_ns[1:] = np.maximum(starts_ns[1:], ends_ns[:-1])
    return np.minimum(starts_ns, ends_ns), ends_ns
