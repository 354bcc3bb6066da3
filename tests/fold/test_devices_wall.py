"""Wall time of a device, which begins with its engine's first record."""

from __future__ import annotations

from tests.fold.scripts import MS, Script


def test_time_before_an_engine_s_first_record_is_no_idle_time_of_its_device() -> None:
    """A sampler that was there before the engine is in the same recording."""
    script = Script()
    script.ring("sampler", engine_id="sampler")
    script.at(20_000)
    core = script.ring()
    only = core.queued("only")
    core.admitted(only)
    core.step(0, [(only, 8, 0)], start_ms=20_003, end_ms=20_013)
    script.at(20_020)
    core.step(1, [(only, 1, 8)], start_ms=20_022, end_ms=20_030)
    script.at(20_031)
    core.finished(only)
    collector, _ = script.play(until_ms=20_400)
    (time,) = collector.engines["engine"].device_times()
    assert time.wall_ns < 1000 * MS
    assert time.seconds_by_ns["idle_host_gap"] == (3 + 9 + 1) * MS
    assert sum(time.seconds_by_ns.values()) == time.wall_ns
