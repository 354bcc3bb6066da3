"""Mapping of samples stamped by the wall clock to the host clock, by anchors of their ring.

    Clock ─► anchors ─────────┐
    CounterSample ─► windows ─┴─► mapped, or dropped if their time is unknown

A sampler writes an anchor after each decode and before the decoded samples, so that a sample need
not wait. A sample whose anchor is missing waits for the next one, half a second at most; so does a
sample whose clock offset differs from the newest anchor's. Only windows between two anchors since
the wall clock was last set can be mapped. Windows stamped before that are excluded. If the clock
was set back, they may seem to lie between the anchors, but they are detected: they are stamped
later than their successors, or would end after they were reported.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferscope.fold.clocks import WallClock
from inferscope.fold.join.windows import SampleWindows, as_recorded, in_order, only, read
from inferscope.records import Clock, CounterSample

_MOST_ERROR_NS = 1_000_000
"""Maximum error of a mapped window, about the length of windows and steps."""
_LONGEST_WAIT_NS = 500_000_000
_MOST_OFFSET_NS = 1 << 62
_OFFSET_ERROR_NS = 100_000
"""Error of the clock offset in a sample: small enough to detect that the wall clock was set."""


class MappedSample(NamedTuple):
    """Sample with its windows on the host clock."""

    record: CounterSample
    window: SampleWindows | None
    """Windows to join; None if there are none."""
    num_unplaced: int = 0
    """Number of its windows whose time is unknown."""
    error_ns: int | None = None
    """Maximum error of the other windows; None if they were stamped by the host clock."""


class WallClockMapper:
    """Mapper of one ring's wall clock stamps to the host clock."""

    def __init__(self) -> None:
        self._wall = WallClock()
        self._waiting: list[CounterSample] = []

    def anchor(self, clock: Clock) -> list[MappedSample]:
        """Add an anchor; return the samples that waited for it."""
        if clock.error_ns is None or clock.device_ns is not None or clock.at_ns > clock.t_ns:
            return []
        self._wall.anchor(clock.real_ns, clock.at_ns, clock.error_ns)
        waiting, self._waiting = self._waiting, []
        return [placed for record in waiting for placed in self.place(record)]

    def place(self, record: CounterSample) -> list[MappedSample]:
        """Return a mapped sample, or nothing if it has to wait."""
        offset_ns = record.real_offset_ns
        if offset_ns is None:
            return [MappedSample(record, read(record))]
        window = as_recorded(record)
        if window is None or not len(window.from_ns) or not abs(offset_ns) < _MOST_OFFSET_NS:
            return [MappedSample(record, None)]
        real_from_ns, real_to_ns = window.from_ns + offset_ns, window.to_ns + offset_ns
        backwards = np.flatnonzero(np.diff(real_from_ns) < 0)
        num_before = int(backwards[-1]) + 1 if len(backwards) else 0
        mapping = self._wall.now
        if (
            mapping is None
            or int(real_to_ns[num_before:].max()) > mapping.last_device_ns
            or not mapping.fits(record.t_ns + offset_ns, record.t_ns, _OFFSET_ERROR_NS)
        ):
            self._waiting.append(record)
            return []
        begins, ends = mapping.between(real_from_ns), mapping.between(real_to_ns)
        error_ns = np.maximum(begins.error_ns, ends.error_ns)
        is_placed = begins.is_between & ends.is_between & (error_ns <= _MOST_ERROR_NS)
        is_placed &= ends.host_ns - error_ns <= record.t_ns
        is_placed[:num_before] = False
        num_unplaced = len(is_placed) - int(np.count_nonzero(is_placed))
        placed = only(window._replace(from_ns=begins.host_ns, to_ns=ends.host_ns), is_placed)
        if placed is None:
            return [MappedSample(record, None, num_unplaced)]
        return [
            MappedSample(record, in_order(placed), num_unplaced, int(error_ns[is_placed].max()))
        ]

    def give_up(self, now_ns: int) -> list[MappedSample]:
        """Release the samples that have waited too long; return them without windows."""
        since_ns = now_ns - _LONGEST_WAIT_NS
        late = [record for record in self._waiting if record.t_ns < since_ns]
        if not late:
            return []
        self._waiting = [record for record in self._waiting if record.t_ns >= since_ns]
        return [MappedSample(record, None, _num_windows(record)) for record in late]


def _num_windows(record: CounterSample) -> int:
    window = as_recorded(record)
    return 0 if window is None else len(window.from_ns)
