"""Simulated engine whose steps have known shares of its device, with its samplers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from inferscope.fold.fold import READER, Collector
from inferscope.fold.join.counter_shares import SM_ACTIVE
from inferscope.fold.join.counters import Counters
from inferscope.readers.merge import Merger
from inferscope.records import (
    ON,
    SAMPLER_ROLE,
    CounterSample,
    EngineInfo,
    Keyframe,
    Record,
    RingOpened,
    Shape,
    encode,
)
from inferscope.ring.layout import STARTS_KEYFRAME, Identity
from inferscope.ring.writer import RingWriter
from tests.fold.scripts import MS, START_NS, Finals, Script
from tests.fold.walls import Counted, Wall, reported

GPU = "GPU-1234"
SHAPE = Shape(4, 256, 4, 4, 64, 512, 1024, 16, 16, 16)
SAMPLER = 99
PREFILL, DECODE = 0, 1


@dataclass
class Train:
    """Engine whose steps have known SM shares, and a sampler of them."""

    script: Script = field(default_factory=Script)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Start and end in milliseconds, and phase."""
    device: str = GPU
    instance: str = ""

    def __post_init__(self) -> None:
        self.core = self.script.ring()
        self.introduce(0)
        self.samples: list[CounterSample] = []
        self.stamped: list[Record] = []
        """Samples stamped by a wall clock, and anchors for them."""

    def introduce(self, replica: int) -> None:
        """Write the description of the engine and its device."""
        info = EngineInfo(
            START_NS,
            "made-up",
            shape=SHAPE,
            device="NVIDIA",
            device_uuid=self.device[4:],
            mig_uuid=self.instance,
            ranks=(0, 0, replica, 0),
        )
        self.core.write(info)

    def beside(self, replica: int) -> Train:
        """Continue as another replica of the engine, on the same device."""
        self.script.at(0)
        self.core = self.script.ring(rank=replica)
        self.introduce(replica)
        return self

    def alternate(
        self, *, until_ms: float, prefill_ms: float = 20, decode_ms: float = 6, gap_ms: float = 0
    ) -> Train:
        """Prefill a new request, then decode one token of it, and so on."""
        at, step = 1.0, 0
        while at < until_ms:
            request = self.ask(f"r{step}", at)
            self.run(step, [(request, 64, 0)], at, at + prefill_ms, PREFILL)
            at += prefill_ms + gap_ms
            self.run(step + 1, [(request, 1, 64)], at, at + decode_ms, DECODE)
            self.core.finished(request)
            at, step = at + decode_ms + gap_ms, step + 2
        return self

    def ask(self, name: str, at: float) -> int:
        self.script.at(at)
        request = self.core.queued(name)
        self.core.admitted(request)
        return request

    def run(
        self, step: int, rows: list[tuple[int, int, int]], start: float, end: float, phase: int
    ) -> None:
        self.core.step(step, rows, start_ms=start, end_ms=end)
        self.steps.append((start, end, phase))

    def sample(
        self,
        period_ms: float,
        word: str,
        of_phase: tuple[float, float],
        *,
        source: str = "gpm",
        is_share: bool = True,
        idle: float = 0.0,
        first_ms: float = 0.0,
        device: str | None = None,
    ) -> Train:
        """Add samples at a rate by phase, in windows of one length."""
        until = self.steps[-1][1]
        edges = np.arange(first_ms, until + period_ms, period_ms).tolist()
        starts, stops, phases = np.array(self.steps, float).T
        rates = np.array(of_phase)[phases.astype(int)]
        for begin, end in itertools.pairwise(edges):
            both = np.clip(np.minimum(stops, end) - np.maximum(starts, begin), 0, None)
            total = float(both @ rates) + (end - begin - float(both.sum())) * idle
            value = total / (end - begin) if is_share else total
            self.count(begin, end, {word: value}, source=source, device=device)
        return self

    def count(
        self,
        begin: float,
        end: float,
        values: dict[str, float],
        *,
        source: str = "gpm",
        device: str | None = None,
        written_ms: float | None = None,
    ) -> None:
        """Write one sample."""
        from_ns, to_ns = (START_NS + round(at * MS) for at in (begin, end))
        t_ns = to_ns if written_ms is None else START_NS + round(written_ms * MS)
        self.samples.append(
            CounterSample(t_ns, device or self.device, from_ns, to_ns, source, values)
        )

    def stamp(self, wall: Wall, *, error_ns: int = 0, lag_ns: int = 0) -> Train:
        """Stamp all samples by a wall clock, and report them ten times a second.

        `error_ns` and `lag_ns` are those of `anchor`.
        """
        windows = [
            Counted(each.start_ns, each.end_ns, each.values["sm_active_share"])
            for each in self.samples
        ]
        self.samples, self.stamped = [], reported(wall, windows, error_ns=error_ns, lag_ns=lag_ns)
        return self

    def sampled(self) -> list[Record]:
        """Return the records of the sampler's ring."""
        return sorted([*self.samples, *self.stamped], key=lambda each: each.t_ns)

    def play(self) -> tuple[Collector, Finals]:
        """Fold engine and sampler, and advance by a second."""
        finals = Finals()
        collector = Collector(finals)
        self.play_into(collector)
        return collector, finals

    def play_into(self, collector: Collector) -> None:
        """Fold engine and sampler into a collector."""
        merger = Merger()
        collector.fold(READER, _opened(SAMPLER, SAMPLER_ROLE))
        for sequence, (number, record) in enumerate(self.script.entries):
            if isinstance(record, RingOpened):
                collector.fold(READER, record)
            else:
                merger.add(number, sequence, record, encode(record))
        for sequence, record in enumerate(self.sampled()):
            merger.add(SAMPLER, sequence, record, encode(record))
        items = merger.take(None)
        items += merger.take(items[-1].t_ns + 1000 * MS)
        for item in items:
            collector.fold(item.ring, item.record)

    def write(self, folder: Path) -> list[Path]:
        """Write all rings, including the sampler's, in the state after their processes exited."""
        records = [*self.script.entries]
        records.append((READER, _opened(SAMPLER, SAMPLER_ROLE)))
        records += [(SAMPLER, Keyframe(START_NS, ON, -1)), *((SAMPLER, r) for r in self.sampled())]
        writers: dict[int, RingWriter] = {}
        for number, record in records:
            if isinstance(record, RingOpened):
                me = Identity(
                    record.engine_id, record.role, record.rank, record.pid, "host", "boot",
                    START_NS, START_NS,
                )  # fmt: skip
                path = folder / f"{record.role}-{record.rank}.ring"
                writers[record.ring] = RingWriter(path, me, capacity=4 << 20)
            else:
                flags = STARTS_KEYFRAME if isinstance(record, Keyframe) else 0
                writers[number].write(record.CODE, encode(record), flags=flags)
        for writer in writers.values():
            writer.beat(0)
            writer.close()
        return [writer.path for writer in writers.values()]


def _opened(number: int, role: str) -> RingOpened:
    return RingOpened(START_NS, number, role, role, 0, 2, "host", "boot", START_NS, 0)


def counters_of(collector: Collector) -> Counters:
    return collector.engines["engine"].lives.counters


def shares(collector: Collector, counted: int = SM_ACTIVE) -> tuple[float, float]:
    counters = counters_of(collector)
    prefill, decode = counters.totals[:, counted] / counters.covered_totals[:, counted]
    return float(prefill), float(decode)
