"""An engine and a sampler that make a GPU up, until standard input ends; their rings are marked so.

Steps last as long as they really take; what is counted in them is invented: SMs active and bytes by
phase, energy by phase and idle time, a throttled clock, an Xid.

    python -m tests.dashboards.synthetic_gpu NAME

It prints the address of a page on which it counts its requests itself, as vLLM does.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from inferscope.probe import EngineInfo, Probe
from inferscope.probe.clock import SystemClock
from inferscope.probe.identity import identity
from inferscope.records import (
    DECODE,
    PREFILL,
    RECOMPUTED,
    SAMPLER_ROLE,
    VERIFY,
    CounterSample,
    Shape,
)
from inferscope.ring.discovery import ring_directory
from inferscope.ring.writer import RingWriter
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import facts, sample
from tests.metrics_page.page_server import serving

UUID = "5f0e7e71-c000-4000-8000-000000000001"
GPU = f"GPU-{UUID}"
SHAPE = Shape(4, 256, 4, 4, 64, 512, 1024, 16, 16, 16)
PROMPT, CACHED = 64, 16
TENANTS = ("one", "two", "two")
"""In turn."""
SM_SHARE = {None: 0.0, "prefill": 0.9, "decode": 0.35}
WATTS = {None: 100.0, "prefill": 600.0, "decode": 350.0}
BUSY_SHARE = {None: 0.0, "prefill": 0.95, "decode": 0.95}
BYTES_PER_S = {None: 0.0, "prefill": 0.4e12, "decode": 2.4e12}
READ_SHARE = 0.8
PEAK_BYTES_PER_S = 4e12
PIECE_NS = 1_000_000
"""The windows of what is sampled within steps."""
PERIOD_NS = 100_000_000
"""Between two tellings."""
PAGE = """\
# TYPE vllm:request_success_total counter
vllm:request_success_total{model_name="made-up"} %d
"""
THROTTLED = 0x4
"""NVML's bit for a clock held down by the power cap."""


Span = tuple[int, int, str | None]
"""Start, end and phase, None for an idle device."""


class Sampler:
    """Counters of a synthetic device's activity."""

    def __init__(self, folder: Path, name: str) -> None:
        clock = SystemClock()
        me = identity(SAMPLER_ROLE, 0, engine=f"{SAMPLER_ROLE}-{name}", synthetic=True)
        home = folder / me.engine_id
        home.mkdir(parents=True)
        self._tape = SamplerRing(RingWriter(home / "sampler-0-1.ring", me, capacity=1 << 24), clock)
        self._now = clock.monotonic_ns
        self._spans: list[Span] = []
        self._since_ns = self._through_ns = now_ns = self._now()
        known = {"name": "a made-up GPU", "xid": "told"}
        self._tape.put([facts("nvml", GPU, now_ns, known), facts("pm", GPU, now_ns, {})])

    def saw(self, end_ns: int, phase: str | None) -> None:
        """Count what was done since the last call."""
        self._spans.append((self._through_ns, end_ns, phase))
        self._through_ns = end_ns
        if end_ns - self._since_ns >= PERIOD_NS:
            self._tape.put([self._within_steps(end_ns), self._over_steps(end_ns)])
            self._since_ns, self._spans = end_ns, []
            self._tape.tend(cost_ns=0)

    def error(self, number: int) -> None:
        """Record an Xid."""
        end_ns = self._now()
        window = {"start_ns": end_ns - PERIOD_NS, "end_ns": end_ns}
        self._tape.put([sample("nvml", GPU, values={"xid": float(number)}, **window)])

    def _within_steps(self, end_ns: int) -> CounterSample:
        """Return short windows, none of them in two steps."""
        cut = [piece for span in self._spans for piece in _pieces(*span)]
        starts_ns, ends_ns = (array("q", [each[at] for each in cut]).tobytes() for at in (0, 1))
        columns: dict[str, list[float]] = {
            "sm_active_share": [SM_SHARE[phase] for _, _, phase in cut],
            "busy_share": [BUSY_SHARE[phase] for _, _, phase in cut],
            "dram_read_bytes": [READ_SHARE * _moved(*piece) for piece in cut],
            "dram_write_bytes": [(1 - READ_SHARE) * _moved(*piece) for piece in cut],
        }
        values = {word: sum(column) for word, column in columns.items() if "bytes" in word}
        values["sm_active_share"] = self._mean(SM_SHARE)
        series = {word: array("f", column).tobytes() for word, column in columns.items()}
        return CounterSample(
            *(end_ns, GPU, self._since_ns, end_ns, "pm", values),
            starts_ns=starts_ns, ends_ns=ends_ns, series=series,
        )  # fmt: skip

    def _over_steps(self, end_ns: int) -> CounterSample:
        """Return what only a longer window tells."""
        lasted_ns = end_ns - self._since_ns
        values = {
            "energy_uj": self._mean(WATTS) * lasted_ns / 1e3,
            "dram_share": self._mean(BYTES_PER_S) / PEAK_BYTES_PER_S,
            "dram_peak_bytes_per_s": PEAK_BYTES_PER_S,
            "memory_used_bytes": 60e9,
            "foreign_busy_share": 0.0,
            "throttle_bits": float(THROTTLED),
        }
        return sample("nvml", GPU, start_ns=self._since_ns, end_ns=end_ns, values=values)

    def _mean(self, of_phase: dict[str | None, float]) -> float:
        whole = sum((to_ns - from_ns) * of_phase[phase] for from_ns, to_ns, phase in self._spans)
        return whole / (self._through_ns - self._since_ns)


def _pieces(from_ns: int, to_ns: int, phase: str | None) -> Iterator[Span]:
    for at_ns in range(from_ns, to_ns, PIECE_NS):
        yield at_ns, min(to_ns, at_ns + PIECE_NS), phase


def _moved(from_ns: int, to_ns: int, phase: str | None) -> float:
    return BYTES_PER_S[phase] * (to_ns - from_ns) / 1e9


class Engine:
    """Serves one request after another, some of them with mishaps."""

    def __init__(self, folder: Path, name: str) -> None:
        me = identity("core", 0, engine=name, synthetic=True)
        home = folder / me.engine_id
        home.mkdir(parents=True)
        ring = RingWriter(home / "core-0-1.ring", me, capacity=1 << 24)
        info = EngineInfo(
            0,
            "made-up",
            "1.0",
            model="made-up",
            shape=SHAPE,
            device="made-up H200",
            device_uuid=UUID,
        )
        self.probe = Probe(ring, None, info)
        self.probe._keeper.begin("synthetic")
        self._sampler = Sampler(folder, name)
        self._draws = random.Random(1)
        self._num_steps = self.num_requests = 0

    def serve_one(self) -> None:
        """Prefill, decode, verify drafts; be preempted or left now and then; rest."""
        number = self.num_requests
        self.num_requests += 1
        probe = self.probe
        tenant = {"tenant": TENANTS[number % len(TENANTS)]}
        index = probe.queued(f"synthetic-{number}", prompt_tokens=PROMPT, attributes=tenant)
        probe.admitted(index, cached_tokens=CACHED)
        self._step(index, PREFILL, PROMPT - CACHED, CACHED)
        for at in range(self._draws.randint(1, 4)):
            self._step(index, DECODE, 1, PROMPT + at)
        self._step(index, VERIFY, 4, PROMPT + 4, accepted=self._draws.randint(0, 3))
        if number % 4 == 0:
            probe.preempted(index)
            self._rest(0.005)
            probe.resumed(index)
            self._step(index, PREFILL, PROMPT, 0, flags=RECOMPUTED, padded=2 * PROMPT)
        probe.finished(index, "client_cancel" if number % 5 == 0 else "stop")
        if number % 20 == 0:
            self._sampler.error(31)
        self._rest(self._draws.uniform(0.0, 0.03))

    def close(self) -> None:
        """Write the shutdown record."""
        self.probe.close()

    def _rest(self, rest_s: float) -> None:
        time.sleep(rest_s)
        self._sampler.saw(time.monotonic_ns(), None)

    def _step(
        self,
        index: int,
        phase: int,
        tokens: int,
        context: int,
        *,
        accepted: int | None = None,
        flags: int = 0,
        padded: int = 0,
    ) -> None:
        number, probe = self._num_steps, self.probe
        self._num_steps += 1
        now_ns = time.monotonic_ns()
        probe.plan(
            number, start_ns=now_ns, end_ns=now_ns, waiting=0, running=1,
            blocks_used=8, blocks_total=100,
        )  # fmt: skip
        self._sampler.saw(time.monotonic_ns(), None)
        probe.start(number)
        time.sleep(self._draws.uniform(0.005, 0.03))
        probe.stop(number, padded_tokens=padded)
        self._sampler.saw(time.monotonic_ns(), "prefill" if phase == PREFILL else "decode")
        drafted = {} if accepted is None else {"proposed": [3], "accepted": [accepted]}
        probe.slices(
            number, requests=[index], phases=[phase], tokens=[tokens], contexts=[context],
            flags=[flags], sampled=[1], **drafted,
        )  # fmt: skip
        probe.emitted([index], [1 + (accepted or 0)], step=number)


def main() -> None:
    """Serve until standard input ends."""
    is_over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=listen, daemon=True).start()
    with serving("") as page:
        sys.stdout.write(f"{page.url}\n")
        sys.stdout.flush()
        engine = Engine(ring_directory(), sys.argv[1])
        while not is_over.is_set():
            engine.serve_one()
            page.content = PAGE % engine.num_requests
        engine.close()


if __name__ == "__main__":
    main()
