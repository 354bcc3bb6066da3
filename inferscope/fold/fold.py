"""Fold of all engines: ordered records in, final steps and requests out, snapshots on request.

    for ring, sequence, record in source: collector.fold(ring, sequence, record)

It is a function of its records alone. It reads no clock, no file and no cache: only Ticks advance
time. The digest covers everything final, so equal digests show that two folds of the same records
gave the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from inferscope.clock_skew import SkewedClock
from inferscope.cost import CostBook
from inferscope.fold.engine import EngineFold
from inferscope.fold.final_records import DeviceTime, RunTotals, Sink
from inferscope.fold.retention import ALL, Retention
from inferscope.fold.samplers import SamplerFold
from inferscope.records import SAMPLER_ROLE, Missed, Record, RingOpened, Tick

Ints = NDArray[np.int64]

READER = 0
"""Ring number of records that readers write."""
_END_OF_TIME_NS = 1 << 62
_OF_READERS = frozenset((Tick, RingOpened, Missed))


class Collector:
    """Fold of the records of any number of rings.

    Attributes:
        engines: engine folds by engine ID, in order of appearance.
        samplers: state of the device samplers.
        now_ns: newest folded time.
        real_offset_ns: wall clock minus monotonic clock at the newest Tick.
    """

    def __init__(
        self, *sinks: Sink, keep: Retention = ALL, books: Mapping[str, CostBook] | None = None
    ) -> None:
        """Start without engines.

        Args:
            sinks: receivers of final steps and requests, called in this order.
            keep: what to retain for views.
            books: cost models of an earlier pass, by engine ID; other engines learn theirs.
        """
        self.engines: dict[str, EngineFold] = {}
        self.samplers = SamplerFold()
        self.now_ns = 0
        self.real_offset_ns: int | None = None
        self.num_records = 0
        self.num_lost = 0
        self.num_late = 0
        self.num_unknown = 0
        self._sinks = list(sinks)
        self._keep = keep
        self._books = books or {}
        self._takers: dict[int, Callable[[Record], None]] = {}
        """Handler of a ring's records, by ring."""
        self._losers: dict[int, Callable[[], None]] = {}
        """Handler of lost frames, by ring."""
        self._hash = hashlib.blake2b(digest_size=16)

    def fold(self, ring: int, record: Record) -> None:
        """Fold one record, in fold order: by time, then ring, then sequence.

        Args:
            ring: number of the ring in its RingOpened; READER for the reader's own records.
            record: the record.
        """
        take = self._takers.get(ring)
        if take is not None and type(record) not in _OF_READERS:
            t_ns = record.t_ns
            if self.now_ns <= t_ns < _END_OF_TIME_NS:
                self.now_ns = t_ns
            elif 0 <= t_ns < self.now_ns:
                self.num_late += 1
            else:
                self.num_unknown += 1
                return
            self.num_records += 1
            take(record)
        elif isinstance(record, Tick):
            if not 0 <= record.t_ns < _END_OF_TIME_NS:
                return
            self.now_ns = max(self.now_ns, record.t_ns)
            self.real_offset_ns = record.real_ns - record.t_ns
            self.samplers.tick(record.t_ns)
            self._hand_samples_on()
            for each in self.engines.values():
                for dropped in each.tick(record.t_ns):
                    del self._losers[dropped.ring]
                    self._takers[dropped.ring] = partial(self._take_again, dropped)
        elif isinstance(record, RingOpened):
            self._open(record)
        elif isinstance(record, Missed):
            self.num_lost += record.num_frames
            lose = self._losers.get(record.ring)
            if lose is not None:
                lose()

    def end(self) -> None:
        """Pass the requests that wait for counters to the sinks: no more records come."""
        for engine in self.engines.values():
            engine.end()

    def unknown(self) -> None:
        """Count a frame of an unknown type."""
        self.num_unknown += 1

    def digest(self) -> str:
        """Return the digest of all final steps and requests, and of the record counts.

        It is empty unless `keep` includes it.
        """
        if not self._keep.digest:
            return ""
        counts = f"{self.num_records} {self.num_lost} {self.num_late} {self.num_unjoined}"
        for engine in self.engines.values():
            engine.joins.settle()
        now = self._hash.copy()
        now.update(counts.encode())
        return now.hexdigest()

    @property
    def num_unjoined(self) -> int:
        """Return the number of steps with inconsistent or missing records."""
        return sum(engine.num_unjoined for engine in self.engines.values())

    def totals(self) -> RunTotals:
        """Return the fold's record counts, probe cost and digest."""
        cost_ns = sum(engine.probe_cost_ns for engine in self.engines.values())
        return RunTotals(
            self.num_records,
            self.num_lost,
            self.num_late,
            self.num_unjoined,
            cost_ns,
            self.digest(),
            self.skewed_clocks(),
        )

    def skewed_clocks(self) -> tuple[SkewedClock, ...]:
        """Return the processes in time namespaces of their own."""
        return tuple(one for engine in self.engines.values() for one in engine.skewed_clocks)

    def devices(self) -> list[DeviceTime]:
        """Return the device time of each engine with steps, by use."""
        return [
            time
            for engine in self.engines.values()
            if engine.has_steps
            for time in engine.device_times()
        ]

    def _take_of_sampler(self, ring: int, record: Record) -> None:
        self.samplers.fold(ring, record)
        self._hand_samples_on()

    def _take_again(self, opened: RingOpened, record: Record) -> None:
        """Fold a record of a dropped ring: its process was stopped and has continued."""
        del self._takers[opened.ring]
        self._open(opened)
        self._takers[opened.ring](record)

    def _hand_samples_on(self) -> None:
        for placed in self.samplers.take():
            for engine in self.engines.values():
                if not engine.lives.counters.is_on:
                    engine.joins.settle()  # steps from here on are counted
                engine.lives.counters.sample(placed)

    def _open(self, opened: RingOpened) -> None:
        if opened.ring in self._takers:
            return  # a recording repeats it, in case the first one is damaged
        if opened.role == SAMPLER_ROLE:
            self.samplers.open(opened)
            self._takers[opened.ring] = partial(self._take_of_sampler, opened.ring)
            return  # samples are independent: a lost one affects no other
        engine = self.engines.get(opened.engine_id)
        if engine is None:
            # An array is a buffer, but its type does not declare that.
            mix: Callable[[bytes | Ints], None] | None = None
            if self._keep.digest:
                mix = self._hash.update  # type: ignore[assignment]
            engine = EngineFold(
                opened.engine_id,
                self._sinks,
                mix,
                self.samplers,
                keep=self._keep,
                book=self._books.get(opened.engine_id),
            )
            self.engines[opened.engine_id] = engine
        state = engine.open_ring(opened)
        self._takers[opened.ring] = partial(engine.fold, state)
        self._losers[opened.ring] = partial(engine.note_lost_frames, state)
