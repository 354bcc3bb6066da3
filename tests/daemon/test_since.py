"""A collector that comes to an engine at work: whatever it counts begins when it does."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from inferscope.daemon.engines import Engines
from inferscope.records import (
    ADMITTED,
    PREFILL,
    QUEUED,
    SAMPLER_ROLE,
    RequestEvent,
    StepSlices,
    StepSpan,
)
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import Identity
from inferscope.ring.writer import RingWriter
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import sample
from tests.daemon.rings import SECOND_NS, Ring, Time
from tests.fold.scripts import Finals

GPU = "GPU-1"
STEP_NS = SECOND_NS // 2
SM_SHARE = 0.5


class Host:
    """An engine that prefills all the time, and a sampler that can be switched on."""

    def __init__(self, folder: Path) -> None:
        self.time, self._num_steps = Time(), 0
        self._core = Ring(folder, self.time, device_uuid=GPU)
        home = folder / SAMPLER_ROLE
        home.mkdir()
        me = Identity(SAMPLER_ROLE, SAMPLER_ROLE, 0, 7, "host", boot_id(), self.time.now_ns, 0)
        self._tape = SamplerRing(
            RingWriter(home / "sampler-0-7.ring", me, capacity=1 << 20), self.time
        )
        self.is_sampled = False
        self._core.write_all()
        for kind in (QUEUED, ADMITTED):
            request_id = "r" if kind == QUEUED else ""
            now_ns = self.time.now_ns
            self._core.write(RequestEvent(now_ns, 0, kind, now_ns, request_id))

    def go_on(self, seconds: int, engines: Engines | None = None) -> None:
        """Advance the clock."""
        for _ in range(seconds * SECOND_NS // STEP_NS):
            start_ns = self.time.now_ns
            now_ns = self.time.now_ns = start_ns + STEP_NS
            step, self._num_steps = self._num_steps, self._num_steps + 1
            one = array("I", [0]).tobytes()
            self._core.write(
                StepSlices(
                    *(now_ns, step, 0, one, bytes([PREFILL]), array("I", [64]).tobytes()),
                    *(array("I", [64 * step]).tobytes(), b"", array("H", [1]).tobytes()),
                )
            )
            self._core.write(StepSpan(now_ns, step, 0, start_ns, start_ns + 1, now_ns))
            self._core.write_all()
            if self.is_sampled:
                window = {"start_ns": start_ns, "end_ns": now_ns}
                of = {"sm_active_share": SM_SHARE, "busy_share": 1.0}
                self._tape.put([sample("pm", GPU, values=of, **window)])
                of = {"foreign_busy_share": 0.0, "energy_uj": 3e8, "throttle_bits": 4.0}
                self._tape.put([sample("nvml", GPU, values=of, **window)])
            self._tape.tend(cost_ns=0)
            if engines is not None:
                engines.advance()


@pytest.mark.parametrize("is_sampled_before", [True, False])
def test_all_counts_begin_with_the_collector(tmp_path: Path, is_sampled_before: bool) -> None:
    host = Host(tmp_path)
    host.is_sampled = is_sampled_before
    host.go_on(30)
    began_ns = host.time.now_ns
    engines = Engines(tmp_path, sink=Finals(), clock=host.time)
    try:
        host.go_on(5, engines)
        host.is_sampled = True  # `collect` may have started it
        host.go_on(15, engines)
        (view,) = engines.snapshot().engines
    finally:
        engines.close()
    (device,) = view.devices
    watched_ns = host.time.now_ns - began_ns
    assert device.wall_ns == pytest.approx(watched_ns, abs=2 * SECOND_NS)
    assert sum(device.seconds_by_ns.values()) == device.wall_ns
    assert device.seconds_by_ns["foreign"] == 0
    prefill_ns = device.seconds_by_ns["prefill"]
    assert prefill_ns == pytest.approx(watched_ns, abs=2 * SECOND_NS)
    sampled_ns = prefill_ns if is_sampled_before else prefill_ns - 5 * SECOND_NS
    for totals in (view.counters.totals, view.counters.devices[GPU].totals):
        assert totals["sm_active_ns"]["prefill"] == pytest.approx(
            SM_SHARE * sampled_ns, abs=2 * SECOND_NS
        )
