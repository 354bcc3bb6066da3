from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from inferscope.probe.clock import SystemClock
from inferscope.records import COUNTERS, CounterSample
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.gpm import SHORTEST_NS, GpmSource
from inferscope.sampler.nvml import NvmlSource
from inferscope.sampler.nvml_devices import open_nvml
from inferscope.sampler.source import Unavailable
from tests.probe.fakes import FakeClock
from tests.sampler.conftest import Play
from tests.sampler.recorded_nvml import Recording


def replay(recording: Recording, *, turns: int, turn_ns: int = SHORTEST_NS) -> list[CounterSample]:
    clock = FakeClock(0)
    source = GpmSource(NoClaims(), clock=clock, period_ns=10)
    found = source.open(0)
    for turn in range(1, turns):
        recording.turn = turn
        clock.now_ns = turn * turn_ns
        found += source.read(clock.now_ns)
    source.close()
    return found


def test_recorded_pairs_give_shares_of_their_windows(play: Play) -> None:
    opened, *samples = replay(play(), turns=8)
    assert opened.facts["name"] == "NVIDIA H200"
    assert [(one.start_ns, one.end_ns) for one in samples] == [
        (turn * SHORTEST_NS, (turn + 1) * SHORTEST_NS) for turn in range(7)
    ]
    prefill, decode = samples[2].values, samples[6].values
    assert prefill["sm_active_share"] == pytest.approx(0.914)
    assert decode["sm_active_share"] == pytest.approx(0.378)
    assert decode["dram_share"] == pytest.approx(0.813)
    assert prefill["tensor_share"] == pytest.approx(0.615)
    assert {word for one in samples for word in one.values} <= COUNTERS.keys()


def test_the_peak_that_memory_traffic_is_a_share_of_is_clock_times_width(play: Play) -> None:
    peak = replay(play(), turns=3)[-1].values["dram_peak_bytes_per_s"]
    assert peak == 2 * 3201e6 * 6144 / 8
    assert 4.8e12 < peak < 5.0e12  # an H200's datasheet says 4.8 TB/s


def test_pairs_closer_than_100_ms_are_not_asked_for(play: Play) -> None:
    recording = play()
    samples = replay(recording, turns=10, turn_ns=SHORTEST_NS // 2)[1:]
    assert [one.end_ns - one.start_ns for one in samples] == [SHORTEST_NS] * 4
    assert recording.calls["nvmlGpmMetricsGet"] == 4


def test_a_late_read_costs_the_next_one_nothing(play: Play) -> None:
    recording, clock = play(), FakeClock(0)
    source = GpmSource(NoClaims(), clock=clock, period_ns=SHORTEST_NS)
    source.open(0)
    found, late_ns = list[CounterSample](), (4_000_000, 0)
    for turn in range(1, 8):
        recording.turn = turn
        clock.now_ns = turn * source.period_ns + late_ns[turn % 2]
        found += source.read(clock.now_ns)
    source.close()
    assert len(found) == 7
    assert min(one.end_ns - one.start_ns for one in found) >= SHORTEST_NS


def test_a_metric_that_the_driver_refuses_is_absent(play: Play) -> None:
    samples = replay(play(), turns=8)[1:]
    assert ["sm_occupancy_share" in one.values for one in samples].count(False) == 1
    assert all("sm_active_share" in one.values for one in samples)


def test_each_instance_of_a_divided_device_is_sampled_by_itself(play: Play) -> None:
    recording = play()
    recording.document["devices"][0]["mig"] = ["MIG-one", "MIG-two"]
    found = replay(recording, turns=4)
    assert [one.device_uuid for one in found if one.facts] == ["MIG-one", "MIG-two"]
    first = [one for one in found if one.values and one.device_uuid == "MIG-one"]
    second = [one for one in found if one.values and one.device_uuid == "MIG-two"]
    assert len(first) == len(second) == 3
    for one, two in zip(first, second, strict=True):
        assert one.values["sm_active_share"] == pytest.approx(2 * two.values["sm_active_share"])
        assert "dram_peak_bytes_per_s" not in one.values  # that is the whole device's
    assert "nvmlGpmSampleGet" not in recording.calls


def test_device_without_gpm_names_the_alternative(play: Play) -> None:
    recording = play()
    recording.document["devices"][0] |= {"has_gpm": False, "name": "NVIDIA A100"}
    with pytest.raises(Unavailable, match=r"NVIDIA A100 has no GPM.*--counters dcgm"):
        replay(recording, turns=1)


def test_samples_are_given_back(play: Play) -> None:
    recording = play()
    replay(recording, turns=2)
    assert recording.calls["nvmlGpmSampleFree"] == recording.calls["nvmlGpmSampleAlloc"] == 2


def test_the_gpu_kit_times_the_calls_of_a_read_and_leaves_constants(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play()
    monkeypatch.syspath_prepend("benchmarks/gpu")
    stages = importlib.import_module("stages")
    spent = stages.Spent()
    timed = stages.TimedLibrary(open_nvml(), "nvml", spent)
    source = GpmSource(NoClaims(), clock=SystemClock(), period_ns=1, load=lambda: timed)
    row = stages.read_for(source, 0.15, spent)
    assert {name: one["num"] for name, one in row["calls"].items()} == {
        "nvmlGpmSampleGet": row["num_reads"],
        "nvmlGpmMetricsGet": row["num_reads"],
    }
    assert row["num_reads"] == 2
    timed_nvml = stages.TimedLibrary(open_nvml(), "nvml", spent)
    monkeypatch.setattr("inferscope.sampler.nvml.open_nvml", lambda: timed_nvml)
    row = stages.read_for(NvmlSource(tmp_path, NoClaims(), period_ns=10_000_000), 0.1, spent)
    assert "nvmlDeviceGetPowerUsage" in row["calls"]
    parts = sum(one["cpu_share"] for one in row["calls"].values())
    assert parts + row["python_share"] + row["other_threads_share"] == pytest.approx(
        row["cpu_share"], rel=0.01
    )
