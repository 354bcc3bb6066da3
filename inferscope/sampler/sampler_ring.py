"""The sampler's ring: samples in writing order, interleaved with keyframes.

    keyframe ┬ Keyframe, EngineInfo, facts or reason of each source and device, Clock
             └ samples … ProbeHealth … samples …

It has the format of an engine's ring, so the same code reads, records and replays both.
"""

from __future__ import annotations

import threading

from msgspec.structs import replace

from inferscope import __version__
from inferscope.probe import KEYFRAME_NS
from inferscope.probe import Clock as TimeSource
from inferscope.records import (
    CLOSED,
    ON,
    SAMPLER_ROLE,
    Clock,
    CounterSample,
    EngineInfo,
    Keyframe,
    ProbeHealth,
    Record,
    encode,
)
from inferscope.ring import STARTS_KEYFRAME, RingWriter
from inferscope.sampler.clock_reading import read_both

CLOCK_NS = 2_000_000_000


class SamplerRing:
    """Writer of the sampler's ring, safe for several threads.

    Attributes:
        num_errors: number of times a source was lost.
    """

    def __init__(self, ring: RingWriter, clock: TimeSource) -> None:
        self.num_errors = 0
        self._ring: RingWriter | None = ring
        self._clock = clock
        self._lock = threading.Lock()
        self._last_ns = 0
        self._keyframe_due_ns = 0
        self._clock_due_ns = 0
        self._states: dict[tuple[str, str], CounterSample] = {}
        """Newest facts or reason, by source and device UUID; keyframes repeat them."""
        self._through_ns: dict[str, int] = {}
        """End of the newest window of each source, by its name."""

    def put(self, samples: list[CounterSample]) -> None:
        """Write samples, facts and reasons, stamped with the time of writing.

        Samples with wall-clock stamps are preceded by a clock anchor, by which readers map them.
        """
        with self._lock:
            if any(sample.real_offset_ns is not None for sample in samples):
                self._write_clock()
            for sample in samples:
                key = (sample.source, sample.device_uuid)
                if sample.reason:
                    self._through_ns.pop(sample.source, None)
                    self._states[key] = sample
                elif sample.facts:
                    self._states.pop((sample.source, ""), None)
                    self._states[key] = sample
                else:
                    self._through_ns[sample.source] = sample.end_ns
                self._write(sample)

    def tend(self, *, cost_ns: int) -> None:
        """Write the heartbeat, a keyframe or clock anchor if due, and the sampler's health."""
        with self._lock:
            ring = self._ring
            if ring is None:
                return
            now_ns = self._now()
            ring.beat(now_ns)
            ring.inspect()
            if now_ns >= self._keyframe_due_ns or ring.wants_keyframe:
                self._restate(ring)
            elif now_ns >= self._clock_due_ns:
                self._write_clock()
            self._report(ring, ON, cost_ns)

    def close(self, *, cost_ns: int) -> None:
        """Write the shutdown record and close the ring, which stays on disk; safe to call twice."""
        with self._lock:
            ring, self._ring = self._ring, None
            if ring is None:
                return
            self._report(ring, CLOSED, cost_ns)
            ring.beat(0)
            ring.close()

    def _restate(self, ring: RingWriter) -> None:
        now_ns = self._now()
        self._keyframe_due_ns = now_ns + KEYFRAME_NS
        keyframe = Keyframe(now_ns, ON, ring.last_keyframe)
        ring.write(keyframe.CODE, encode(keyframe), flags=STARTS_KEYFRAME)
        self._write(EngineInfo(now_ns, SAMPLER_ROLE, version=__version__))
        for state in self._states.values():
            self._write(state)
        self._write_clock()
        ring.bytes_since_keyframe = 0

    def _write_clock(self) -> None:
        """Write an anchor of the wall clock to the monotonic clock."""
        now = read_both(self._clock)
        self._write(Clock(0, now.real_ns, error_ns=now.error_ns, host_ns=now.host_ns))
        self._clock_due_ns = self._last_ns + CLOCK_NS

    def _report(self, ring: RingWriter, state: int, cost_ns: int) -> None:
        through_ns = min(self._through_ns.values(), default=0)
        health = ProbeHealth(
            self._now(), state, ring.sequence, self.num_errors, cost_ns, through_ns
        )
        ring.write(health.CODE, encode(health))

    def _write(self, record: Record) -> None:
        if self._ring is not None:
            self._ring.write(record.CODE, encode(replace(record, t_ns=self._now())))

    def _now(self) -> int:
        """Return the monotonic time, never less than an earlier one of this ring."""
        self._last_ns = max(self._last_ns, self._clock.monotonic_ns())
        return self._last_ns
