"""A scripted source, and a ring to write its samples to."""

from __future__ import annotations

from pathlib import Path

from inferscope.records import SAMPLER_ROLE, CounterSample
from inferscope.ring.layout import Identity
from inferscope.ring.writer import RingWriter
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import Unavailable, facts, sample
from tests.probe.fakes import FakeClock

PERIOD = 100_000_000


class ToySource:
    """Counts its own reads, unless it is to fail."""

    name = "toy"
    period_ns = PERIOD

    def __init__(self) -> None:
        self.lost = ""
        self.broken = False
        self.num_opened = self.num_closed = self.num_reads = 0
        self._from_ns = 0

    def open(self, now_ns: int) -> list[CounterSample]:
        if self.lost:
            raise Unavailable(self.lost)
        self.num_opened += 1
        self._from_ns = now_ns
        return [facts(self.name, "GPU-1", now_ns, {"name": "toy"})]

    def read(self, now_ns: int) -> list[CounterSample]:
        if self.lost:
            raise Unavailable(self.lost)
        if self.broken:
            raise ZeroDivisionError("a fault of ours")
        self.num_reads += 1
        start_ns, self._from_ns = self._from_ns, now_ns
        values = {"busy_share": 0.5, "power_w": float("nan")}
        return [sample(self.name, "GPU-1", start_ns=start_ns, end_ns=now_ns, values=values)]

    def close(self) -> None:
        self.num_closed += 1


def make_tape(folder: Path, clock: FakeClock, capacity: int = 1 << 20) -> tuple[SamplerRing, Path]:
    me = Identity(SAMPLER_ROLE, SAMPLER_ROLE, 0, 1, "host", "boot", clock.now_ns, clock.now_ns)
    ring = RingWriter(folder / "sampler.ring", me, capacity=capacity)
    return SamplerRing(ring, clock), ring.path
