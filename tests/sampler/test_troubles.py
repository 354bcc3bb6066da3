"""What holds devices back: from the recorded driver through the fold to all who tell of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
from inferscope_jsonl import JsonlExporter
from inferscope_prometheus.engine_counters import ReplicaCounters
from inferscope_prometheus.families import EngineSample, families

from inferscope.fold.final_records import DeviceHealth
from inferscope.fold.fold import READER, Collector
from inferscope.fold.view import snapshot
from inferscope.records import (
    SAMPLER_ROLE,
    THROTTLES,
    XIDS,
    CounterSample,
    EngineInfo,
    RingOpened,
    Tick,
    throttle_words,
)
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.nvml import NvmlSource
from inferscope.sampler.source import Unavailable
from inferscope.text import panels
from inferscope.text.lines import text_of
from inferscope.text.panels.phases import format_device_health
from tests.fold.scripts import START_NS, Script
from tests.sampler.conftest import Play
from tests.sampler.recorded_nvml import Recording
from tests.tui.scenes import engine_view

PERIOD = 100_000_000
UUID = "GPU-6f2a1c3e-58d4-4b7a-9c1e-2f0d3b5a7e91"
SAMPLER = 99


def folded_from(folder: Path, recording: Recording, *, turns: int) -> list[CounterSample]:
    """Return all that the source tells over some turns, or until it is lost."""
    source = NvmlSource(folder, NoClaims(), period_ns=PERIOD)
    found = source.open(START_NS)
    for turn in range(1, turns):
        recording.turn = turn
        try:
            found += source.read(START_NS + turn * PERIOD)
        except Unavailable:
            break
    source.close()
    return found


def folded(samples: list[CounterSample], *, uuid: str = UUID[4:], mig_uuid: str = "") -> Collector:
    """Fold an engine's one step on a device, and what a sampler tells of devices."""
    script = Script()
    core = script.ring()
    info = EngineInfo(START_NS, "made-up", device="H", device_uuid=uuid, mig_uuid=mig_uuid)
    core.write(info)
    request = core.queued("r")
    core.admitted(request)
    core.step(0, [(request, 8, 0)], start_ms=1, end_ms=9)
    collector, _ = script.play(until_ms=20)
    opened = (SAMPLER_ROLE, SAMPLER_ROLE, 0, 2, "host", "boot", START_NS, 0)
    collector.fold(READER, RingOpened(START_NS, SAMPLER, *opened))
    for sample in samples:
        collector.fold(SAMPLER, msgspec.structs.replace(sample, t_ns=sample.end_ns + PERIOD))
    collector.fold(READER, Tick(collector.now_ns, collector.now_ns))
    return collector


def health_of(collector: Collector) -> DeviceHealth | None:
    (device,) = collector.devices()
    return device.health


def metrics(collector: Collector) -> dict[str, dict[tuple[str, ...], float]]:
    (view,) = snapshot(collector, window_ns=10 * PERIOD, mode="ended").engines
    look = EngineSample(view, {0: ReplicaCounters()}, None, 0)
    return {
        family.name: {tuple(each.labels.values())[5:]: each.value for each in family.samples}
        for family in families([look])
    }


def test_throttle_reasons_and_errors_reach_every_output(play: Play, tmp_path: Path) -> None:
    recording = play()
    turns = recording.document["devices"][0]["turns"][:10]
    capped_s = sum(turn["event_reasons"] == 4 for turn in turns[1:]) * PERIOD / 1e9
    collector = folded(folded_from(tmp_path, recording, turns=10))
    families = metrics(collector)
    throttle = families["inferscope_throttle_seconds"]
    assert throttle[UUID, "power_cap"] == capped_s == 0.4
    assert {reason for _, reason in throttle} == {*THROTTLES.values()} - {"idle"}
    assert sum(throttle.values()) == capped_s
    errors = families["inferscope_xid_errors"]
    assert errors[UUID, "fallen_off_the_bus"] == 1
    assert {reason for _, reason in errors} == {*XIDS.values()}
    assert sum(errors.values()) == 1
    out = BytesIO()
    JsonlExporter(out).close(collector.devices(), collector.totals())
    row = msgspec.json.decode(out.getvalue().splitlines()[0])
    assert row["throttle_ns"]["power_cap"] == capped_s * 1e9
    assert row["throttle_told_ns"] == 9 * PERIOD
    assert row["xids"] == {"fallen_off_the_bus": 1}


def test_unsampled_device_has_no_family_and_no_zero(play: Play, tmp_path: Path) -> None:
    samples = folded_from(tmp_path, play(), turns=10)
    for collector in (folded([]), folded(samples, uuid="another"), folded(samples, uuid="")):
        assert health_of(collector) is None
        assert (
            not {"inferscope_throttle_seconds", "inferscope_xid_errors"} & metrics(collector).keys()
        )
        out = BytesIO()
        JsonlExporter(out).close(collector.devices(), collector.totals())
        row = msgspec.json.decode(out.getvalue().splitlines()[0])
        assert row["throttle_ns"] is row["throttle_told_ns"] is row["xids"] is None


@pytest.mark.parametrize("refused", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_driver_without_error_reports_is_not_reported_as_free_of_errors(
    play: Play, tmp_path: Path, refused: str
) -> None:
    recording = play()
    recording.unsupported = {refused}
    samples = folded_from(tmp_path, recording, turns=8)
    assert samples[0].facts["xid"].startswith("unknown: the driver")
    collector = folded(samples)
    health = health_of(collector)
    assert health is not None
    assert health.xids is None
    assert "inferscope_xid_errors" not in metrics(collector)
    assert "inferscope_throttle_seconds" in metrics(collector)


def test_a_driver_without_reasons_has_errors_only(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.unsupported = {
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    }
    collector = folded(folded_from(tmp_path, recording, turns=8))
    assert health_of(collector) == DeviceHealth(xids={})
    assert "inferscope_throttle_seconds" not in metrics(collector)
    assert set(metrics(collector)["inferscope_xid_errors"].values()) == {0}


def test_last_xid_of_a_lost_device_is_reported(play: Play, tmp_path: Path) -> None:
    recording = play()
    turns = recording.document["devices"][0]["turns"]
    del turns[9]["xid"]
    turns[10]["xid"] = 79
    source = NvmlSource(tmp_path, NoClaims(), period_ns=PERIOD)
    found = source.open(START_NS)
    for turn in range(1, 11):
        recording.turn = turn
        found += source.read(START_NS + turn * PERIOD)
    recording.turn = 11
    with pytest.raises(Unavailable, match="GPU is lost"):
        source.read(START_NS + 11 * PERIOD)
    source.close()
    assert [one.values for one in found if "xid" in one.values] == [{"xid": 79.0}]
    assert len([one for one in found if "GPU is lost" in one.reason]) == 1


def test_error_belongs_to_its_device_only(play: Play, tmp_path: Path) -> None:
    recording = play()
    second = copy.deepcopy(recording.document["devices"][0])
    second["uuid"] = "GPU-other"
    recording.document["devices"].append(second)
    samples = folded_from(tmp_path, recording, turns=10)
    first, other = (health_of(folded(samples, uuid=uuid)) for uuid in (UUID[4:], "GPU-other"))
    assert first is not None
    assert other is not None
    assert (first.xids, other.xids) == ({"fallen_off_the_bus": 1}, {})
    assert first.throttle_ns == other.throttle_ns


def test_what_befalls_a_divided_device_befalls_its_instances(play: Play, tmp_path: Path) -> None:
    recording = play()
    recording.document["devices"][0]["mig"] = ["MIG-one", "MIG-two"]
    samples = folded_from(tmp_path, recording, turns=10)
    health = health_of(folded(samples, uuid="", mig_uuid="MIG-two"))
    assert health is not None
    assert health.xids == {"fallen_off_the_bus": 1}
    assert health.told_ns == 9 * PERIOD


def window(begin: float, end: float, bits: int) -> CounterSample:
    from_ns, to_ns = (START_NS + round(at * PERIOD) for at in (begin, end))
    values = {"throttle_bits": float(bits)}
    return CounterSample(to_ns, UUID, from_ns, to_ns, "nvml", values)


def test_overlapping_reports_count_once_and_gaps_not_at_all() -> None:
    samples = [
        window(0, 1, 0x20),
        window(0, 1, 0x20),
        window(0.5, 2, 0x24),
        window(4, 5, 0x1),
        window(3, 4, 0x20),
        window(7, 6, 0x20),
    ]
    health = health_of(folded(samples))
    assert health is not None
    assert health.told_ns == 3 * PERIOD
    assert health.throttle_ns is not None
    throttled = {word: ns / PERIOD for word, ns in health.throttle_ns.items() if ns}
    assert throttled == {"thermal": 2, "power_cap": 1}
    assert health.throttled_now == ()


def test_bits_and_errors_without_a_word_keep_their_numbers() -> None:
    assert throttle_words(0x1 | 0x40 | 1 << 40) == ["hardware_thermal", "bit_40"]
    at_ns = START_NS + PERIOD
    odd = [CounterSample(at_ns, UUID, START_NS, at_ns, "nvml", {"xid": x}) for x in (777.0, 777.0)]
    wrong = [
        CounterSample(at_ns, UUID, START_NS, at_ns, "nvml", {word: value})
        for word in ("xid", "throttle_bits")
        for value in (float("nan"), float("inf"), -1.0, 1e300)
    ]
    health = health_of(folded([*odd, *wrong, window(1, 2, 1 << 40)]))
    assert health is not None
    assert health.xids == {"xid_777": 2}
    assert health.throttle_ns is not None
    assert health.throttle_ns["bit_40"] == PERIOD


def test_the_screen_names_what_holds_a_device_back_now_and_its_errors() -> None:
    collector = folded([window(0, 1, 0x20), window(1, 2, 0x4 | 0x40)])
    (view,) = snapshot(collector, window_ns=10 * PERIOD, mode="live").engines
    assert format_device_health(view) == "throttled: power cap, hardware thermal"
    collector.fold(READER, Tick(collector.now_ns + 30 * PERIOD, 0))
    (view,) = snapshot(collector, window_ns=10 * PERIOD, mode="live").engines
    assert format_device_health(view) == ""
    (device,) = view.devices
    health = DeviceHealth(xids={"nvlink": 2, "gsp_error": 0}, throttled_now=("thermal",))
    drawn = replace(engine_view(), devices=(replace(device, health=health),))
    for width in (44, 60, 90, 160):
        lines = panels.device_time(drawn, width, 10)
        assert "throttled: thermal  Xid nvlink x2" in text_of(lines[-1])
