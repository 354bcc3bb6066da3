"""Merge of rings into fold order, with Ticks between their records.

Records within a ring are in order already; across rings they are merged by (time, ring, sequence).
A Tick is inserted for every 200 ms of monotonic time. The grid is the same for every reader, so
that all folds of a stream evaluate deadlines at the same places.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right

import msgspec

from inferscope.fold import READER
from inferscope.records import TICK_NS, Clock, Missed, Record, Tick, encode

RECORD_BYTES = 100
"""Memory of a waiting record besides its payload, in bytes: most payloads are small."""
_END_OF_TIME_NS = 1 << 62
_MOST_TICKED_NS = 60_000_000_000
"""Time covered by Ticks at the beginning and at the end of a long silence."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """Record with its position in the fold."""

    t_ns: int
    ring: int
    sequence: int
    record: Record
    payload: bytes


class Merger:
    """Merger of the records of many rings into fold order."""

    def __init__(self) -> None:
        self._waiting: list[Item] = []
        self._last_ns: dict[int, int] = {}
        self._next_tick_ns: int | None = None
        self._real_offset_ns = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory of the waiting records: payloads and fixed cost."""
        return sum(len(item.payload) + RECORD_BYTES for item in self._waiting)

    def add(self, ring: int, sequence: int, record: Record, payload: bytes) -> None:
        """Add a record; time within a ring never runs backwards."""
        t_ns, last_ns = record.t_ns, self._last_ns.get(ring, 0)
        if t_ns < last_ns:
            t_ns = last_ns
        self._last_ns[ring] = t_ns
        self._waiting.append(Item(t_ns, ring, sequence, record, payload))

    def miss(self, ring: int, num_frames: int, reason: str) -> None:
        """Note frames missing between a ring's last record and its next one."""
        t_ns = self._last_ns[ring] = self._last_ns.get(ring, 0) + 1
        missed = Missed(t_ns, ring, num_frames, reason)
        self._waiting.append(Item(t_ns, READER, ring, missed, encode(missed)))

    def take(self, until_ns: int | None) -> list[Item]:
        """Return the items due by a time in order, Ticks included; None returns all."""
        waiting = self._waiting
        if len(self._last_ns) > 1:  # the records of a single ring are in order
            waiting.sort(key=_place)
        if until_ns is None:
            due, self._waiting = waiting, []
        else:
            num = bisect_right(waiting, until_ns, key=_time)
            due, self._waiting = waiting[:num], waiting[num:]
        out: list[Item] = []
        at = 0
        while at < len(due):
            self._take_clocks(due[at : at + 1])
            self._tick_until(due[at].t_ns, out)
            end = bisect_left(due, self._next_tick_ns or 0, at, key=_time)
            self._take_clocks(due[at:end])
            out += due[at:end]
            at = end
        if until_ns is not None:
            self._tick_until(until_ns, out)
        return out

    def _take_clocks(self, items: list[Item]) -> None:
        for clock in [item.record for item in items if type(item.record) is Clock]:
            offset_ns = clock.real_ns - clock.at_ns
            if abs(offset_ns) < _END_OF_TIME_NS:  # else a Tick could not hold its wall time
                self._real_offset_ns = offset_ns

    def _tick_until(self, t_ns: int, out: list[Item]) -> None:
        if self._next_tick_ns is None:
            self._next_tick_ns = (t_ns // TICK_NS + 1) * TICK_NS
        if t_ns - self._next_tick_ns > 2 * _MOST_TICKED_NS:
            # All deadlines have passed within the first part of a silence as long as this.
            self._tick_until(self._next_tick_ns + _MOST_TICKED_NS, out)
            self._next_tick_ns = ((t_ns - _MOST_TICKED_NS) // TICK_NS + 1) * TICK_NS
        while self._next_tick_ns <= t_ns:
            at_ns = self._next_tick_ns
            tick = Tick(at_ns, at_ns + self._real_offset_ns)
            out.append(Item(at_ns, READER, 0, tick, encode(tick)))
            self._next_tick_ns = at_ns + TICK_NS


_place = operator.attrgetter("t_ns", "ring", "sequence")
_time = operator.attrgetter("t_ns")
