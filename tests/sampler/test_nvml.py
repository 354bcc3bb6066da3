from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pynvml
import pytest

from inferscope.records import COUNTERS, CounterSample
from inferscope.sampler import nvml as module
from inferscope.sampler.claims import Claims, NoClaims
from inferscope.sampler.nvml import NvmlSource
from inferscope.sampler.source import ASK_AGAIN_NS, Unavailable
from tests.sampler.conftest import Play
from tests.sampler.recorded_nvml import H200, Recording

PERIOD = 100_000_000
UUID = "GPU-6f2a1c3e-58d4-4b7a-9c1e-2f0d3b5a7e91"
STRANGER = 4_000_000
"""More than the kernel gives."""


def source(folder: Path, *, wanted: tuple[str, ...] = ()) -> NvmlSource:
    return NvmlSource(folder, NoClaims(), period_ns=PERIOD, wanted=wanted)


def replay(recording: Recording, folder: Path, *, turns: int) -> list[CounterSample]:
    """Return all samples of some turns, the facts first."""
    reader = source(folder)
    found = reader.open(0)
    for turn in range(1, turns):
        recording.turn = turn
        found += reader.read(turn * PERIOD)
    reader.close()
    return found


def with_values(samples: list[CounterSample]) -> list[CounterSample]:
    return [one for one in samples if one.values and "xid" not in one.values]


def test_recorded_device_is_read_in_our_keys_and_units(play: Play, tmp_path: Path) -> None:
    found = replay(play(), tmp_path, turns=8)
    opened, *samples = found
    assert opened.facts["name"] == "NVIDIA H200"
    assert opened.facts["driver"] == "580.95.05"
    assert not opened.values
    assert [(one.start_ns, one.end_ns) for one in samples] == [
        (turn * PERIOD, (turn + 1) * PERIOD) for turn in range(7)
    ]
    assert {word for one in samples for word in one.values} <= COUNTERS.keys()
    prefill = samples[2].values
    assert prefill["busy_share"] == 1.0
    assert prefill["copy_share"] == 0.61
    assert prefill["power_w"] == 692.0
    assert prefill["sm_clock_mhz"] == 1755
    assert prefill["throttle_bits"] == 4


def test_energy_is_what_the_drivers_counter_grew_by(play: Play, tmp_path: Path) -> None:
    recording = play()
    samples = with_values(replay(recording, tmp_path, turns=9))
    turns = recording.document["devices"][0]["turns"]
    grown_mj = turns[8]["energy_mj"] - turns[0]["energy_mj"]
    assert sum(one.values["energy_uj"] for one in samples) == grown_mj * 1000


def test_a_counter_that_began_anew_gives_no_energy(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.document["devices"][0]["turns"][2]["energy_mj"] = 5
    samples = with_values(replay(recording, tmp_path, turns=4))
    assert ["energy_uj" in one.values for one in samples] == [True, False, True]


def test_what_changes_slowly_is_asked_once_a_second(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.document["devices"][0]["turns"] *= 3
    for turn in recording.document["devices"][0]["turns"]:
        turn.pop("error", None)
    samples = with_values(replay(recording, tmp_path, turns=32))
    slow = [one for one in samples if "memory_used_bytes" in one.values]
    assert len(slow) == 3
    assert slow[0].values["memory_total_bytes"] == 150_754_820_096
    assert slow[0].values["power_limit_w"] == 700
    assert recording.calls["nvmlDeviceGetTemperature"] == 1 + 3


def test_what_a_device_refuses_is_absent_and_not_asked_again(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.unsupported = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"}
    for one in with_values(replay(recording, tmp_path, turns=6)):
        assert not {"busy_share", "copy_share", "power_w"} & one.values.keys()
        assert "energy_uj" in one.values
    assert recording.calls["nvmlDeviceGetPowerUsage"] == 1


def test_lost_device_is_reported_once_and_so_is_its_return(play: Play, tmp_path: Path) -> None:
    recording = play()
    second = copy.deepcopy(recording.document["devices"][0])
    second["uuid"] = "GPU-other"
    for turn in second["turns"]:
        turn.pop("error", None)
    recording.document["devices"].append(second)
    found = replay(recording, tmp_path, turns=14)
    of_first = [one for one in found if one.device_uuid == UUID]
    (lost,) = [one for one in of_first if one.reason]
    assert "GPU is lost" in lost.reason
    assert len([one for one in of_first if one.facts]) == 2
    assert len(with_values(of_first)) == 11
    assert len(with_values([one for one in found if one.device_uuid == "GPU-other"])) == 13


def test_a_device_that_another_sampler_lets_go_of_is_taken_over(play: Play, tmp_path: Path) -> None:
    recording = play()
    second = copy.deepcopy(recording.document["devices"][0])
    second["uuid"] = "GPU-other"
    recording.document["devices"].append(second)
    theirs, ours = Claims(tmp_path), Claims(tmp_path)
    theirs.take("GPU-other")
    reader = NvmlSource(tmp_path, ours, period_ns=PERIOD)
    (first, refused) = reader.open(0)
    assert first.facts
    assert "samples GPU" in refused.reason
    recording.turn = 1
    theirs.close()
    assert {one.device_uuid for one in reader.read(PERIOD)} == {UUID}
    found = [one for one in reader.read(ASK_AGAIN_NS) if one.device_uuid == "GPU-other"]
    assert [bool(one.facts) for one in found] == [True]
    assert {one.device_uuid for one in reader.read(ASK_AGAIN_NS + PERIOD)} == {UUID, "GPU-other"}
    reader.close()
    ours.close()


def test_a_source_without_a_device_left_is_reported(play: Play, tmp_path: Path) -> None:
    recording = play()
    with pytest.raises(Unavailable, match="GPU is lost"):
        replay(recording, tmp_path, turns=14)


def test_an_error_of_the_device_is_a_fact_of_its_window(play: Play, tmp_path: Path) -> None:
    found = replay(play(), tmp_path, turns=10)
    (xid,) = [one for one in found if "xid" in one.values]
    assert xid.values == {"xid": 79.0}
    assert (xid.device_uuid, xid.start_ns, xid.end_ns) == (UUID, 8 * PERIOD, 9 * PERIOD)


def process_values(
    play: Play, folder: Path, monkeypatch: pytest.MonkeyPatch, *, sees_host: bool
) -> dict[str, float]:
    """Return the values about a process of no engine after a second."""
    monkeypatch.setattr(module, "sees_host", lambda: sees_host)
    recording = play()
    recording.processes = {STRANGER: 2 << 30, os.getpid(): 1 << 20}
    recording.use = {STRANGER: 40}
    recording.document["devices"][0]["turns"] = [recording.document["devices"][0]["turns"][1]] * 12
    return with_values(replay(recording, folder, turns=12))[9].values


def test_process_of_no_engine_is_foreign_in_the_host_namespace(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = process_values(play, tmp_path, monkeypatch, sees_host=True)
    assert values["num_processes"] == 1  # the sampler itself is none
    assert values["num_foreign"] == 1
    assert values["foreign_memory_bytes"] == 2 << 30
    assert values["foreign_busy_share"] == 0.4


def test_no_process_is_foreign_outside_the_host_namespace(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = process_values(play, tmp_path, monkeypatch, sees_host=False)
    assert values["num_processes"] == 1
    assert not [word for word in values if "foreign" in word]


def test_a_divided_devices_power_is_never_an_instances(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.document["devices"][0]["mig"] = ["MIG-one", "MIG-two"]
    recording.document["devices"][0]["turns"] = [recording.document["devices"][0]["turns"][1]] * 12
    found = replay(recording, tmp_path, turns=12)
    assert found[0].facts["mig"] == "MIG-one MIG-two"
    instances = [one for one in found if one.device_uuid.startswith("MIG")]
    assert {word for one in instances for word in one.values} == {
        "memory_used_bytes",
        "memory_total_bytes",
    }
    whole = with_values([one for one in found if one.device_uuid == UUID])
    assert all("power_w" in one.values and "busy_share" not in one.values for one in whole)


def test_devices_are_chosen_by_index_or_uuid(play: Play, tmp_path: Path) -> None:
    play()
    assert [one.device_uuid for one in source(tmp_path, wanted=("0",)).open(0)] == [UUID]
    assert [one.device_uuid for one in source(tmp_path, wanted=("GPU-6f2a",)).open(0)] == [UUID]
    with pytest.raises(Unavailable, match="no device among 1"):
        source(tmp_path, wanted=("1",)).open(0)


def test_without_a_driver_or_a_binding_there_is_one_line(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording.of(H200)
    recording.is_loaded = False
    play(recording)
    with pytest.raises(Unavailable, match=r"no NVIDIA driver is loaded|AMD's"):
        source(tmp_path).open(0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unavailable, match=r'pip install "inferscope-llm\[gpu\]"'):
        source(tmp_path).open(0)


def test_the_recording_states_that_it_is_none() -> None:
    assert "synthetic" in Recording.of(H200).document
    assert pynvml.NVML_ERROR_GPU_IS_LOST == 15
