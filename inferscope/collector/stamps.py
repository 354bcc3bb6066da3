"""Samples that are stamped by the wall clock, put on ours by the anchors of their ring.

    Clock ─► anchors ─────────┐
    CounterSample ─► windows ─┴─► placed, or nobody knows where they were and they are left out

A sampler writes an anchor behind each decode and before what it has decoded, so that a sample need
not wait. One whose anchor is missing waits for the next, half a second at most, and so does one
that tells another distance of the clocks than the newest anchor. What can be placed: windows
between two anchors of the newest stretch. What was stamped before the wall clock was set is out of
that; what only seems to be in it, since the clock was set back, gives itself away: it is stamped
later than what follows it, or would have ended after it was told.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferscope.collector.clocks import WallClock
from inferscope.collector.counter_windows import SampleWindows, as_recorded, in_order, only, read
from inferscope.records import Clock, CounterSample

_MOST_ERROR_NS = 1_000_000
"""Windows are at most as long, and steps not much longer: what may be off by more says nothing."""
_LONGEST_WAIT_NS = 500_000_000
_MOST_OFFSET_NS = 1 << 62
_OFFSET_ERROR_NS = 100_000
"""Of the distance of the clocks that a sample tells: enough to see that the wall clock was set."""


class Placed(NamedTuple):
    """A sample with its windows on our clock."""

    record: CounterSample
    window: SampleWindows | None
    """None where there is none to join."""
    num_unplaced: int = 0
    """Of its windows, those of which nobody knows when they were."""
    error_ns: int | None = None
    """How far off the others can be, None where they were on our clock from the start."""


class Stamps:
    """The stamps of one ring."""

    def __init__(self) -> None:
        self._wall = WallClock()
        self._waiting: list[CounterSample] = []

    def anchor(self, clock: Clock) -> list[Placed]:
        """Take an anchor; return the samples that waited for it."""
        if clock.error_ns is None or clock.device_ns is not None or clock.at_ns > clock.t_ns:
            return []
        self._wall.anchor(clock.real_ns, clock.at_ns, clock.error_ns)
        waiting, self._waiting = self._waiting, []
        return [placed for record in waiting for placed in self.place(record)]

    def place(self, record: CounterSample) -> list[Placed]:
        """Return a sample, or nothing where it has to wait."""
        offset_ns = record.real_offset_ns
        if offset_ns is None:
            return [Placed(record, read(record))]
        told = as_recorded(record)
        if told is None or not len(told.from_ns) or not abs(offset_ns) < _MOST_OFFSET_NS:
            return [Placed(record, None)]
        real_from_ns, real_to_ns = told.from_ns + offset_ns, told.to_ns + offset_ns
        backwards = np.flatnonzero(np.diff(real_from_ns) < 0)
        num_before = int(backwards[-1]) + 1 if len(backwards) else 0
        stretch = self._wall.now
        if (
            stretch is None
            or int(real_to_ns[num_before:].max()) > stretch.last_device_ns
            or not stretch.fits(record.t_ns + offset_ns, record.t_ns, _OFFSET_ERROR_NS)
        ):
            self._waiting.append(record)
            return []
        begins, ends = stretch.between(real_from_ns), stretch.between(real_to_ns)
        error_ns = np.maximum(begins.error_ns, ends.error_ns)
        is_placed = begins.is_between & ends.is_between & (error_ns <= _MOST_ERROR_NS)
        is_placed &= ends.host_ns - error_ns <= record.t_ns
        is_placed[:num_before] = False
        num_unplaced = len(is_placed) - int(np.count_nonzero(is_placed))
        placed = only(told._replace(from_ns=begins.host_ns, to_ns=ends.host_ns), is_placed)
        if placed is None:
            return [Placed(record, None, num_unplaced)]
        return [Placed(record, in_order(placed), num_unplaced, int(error_ns[is_placed].max()))]

    def give_up(self, now_ns: int) -> list[Placed]:
        """Return the samples that have waited too long."""
        since_ns = now_ns - _LONGEST_WAIT_NS
        late = [record for record in self._waiting if record.t_ns < since_ns]
        if not late:
            return []
        self._waiting = [record for record in self._waiting if record.t_ns >= since_ns]
        return [Placed(record, None, _num_windows(record)) for record in late]


def _num_windows(record: CounterSample) -> int:
    told = as_recorded(record)
    return 0 if told is None else len(told.from_ns)
