"""A collector beside a sampler: its ring is in every engine's fold, and none of its engines."""

from __future__ import annotations

from pathlib import Path

from inferscope.daemon.engines import Engines
from inferscope.records import SAMPLER_ROLE
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import Identity
from inferscope.ring.writer import RingWriter
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import sample
from tests.daemon.rings import SECOND_NS, Ring, Time
from tests.fold.scripts import Finals


def test_an_engines_end_is_seen_though_its_sampler_goes_on(tmp_path: Path) -> None:
    time = Time()
    home = tmp_path / SAMPLER_ROLE
    home.mkdir()
    me = Identity(SAMPLER_ROLE, SAMPLER_ROLE, 0, 7, "host", boot_id(), time.now_ns, 0)
    tape = SamplerRing(RingWriter(home / "sampler-0-7.ring", me, capacity=1 << 18), time)
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    core = Ring(tmp_path, time)

    def go_on(seconds: int, *rings: Ring) -> None:
        for _ in range(2 * seconds):
            start_ns = time.now_ns
            time.now_ns += SECOND_NS // 2
            window = {"start_ns": start_ns, "end_ns": time.now_ns}
            tape.put([sample("gpm", "GPU-1", values={"busy_share": 1.0}, **window)])
            tape.tend(cost_ns=0)
            for ring in rings:
                ring.write_all()
            engines.advance()

    go_on(20, core)
    (view,) = engines.snapshot().engines
    assert (view.engine_id, view.is_alive) == ("made", True)
    assert len(set(engines.rings())) == 2
    (followed,) = engines._followed.values()
    assert followed._source.collector.samplers.num_samples > 30
    core.close()
    go_on(20)
    (view,) = engines.snapshot().engines
    assert not view.is_alive
    engines.close()
    tape.close(cost_ns=0)
