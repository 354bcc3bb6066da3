"""Engines on several devices: counters of each device, which sum to the engine's."""

from __future__ import annotations

import pytest
from inferscope_prometheus.engine_counters import ReplicaCounters
from inferscope_prometheus.families import EngineSample, families
from inferscope_prometheus.page import page

from inferscope.fold.snapshots import EngineView
from inferscope.fold.view import snapshot
from inferscope.records import EngineInfo
from inferscope.text.panels.phases import format_counted
from tests.daemon.running import Scrape
from tests.fold.scripts import MS, START_NS
from tests.fold.trains import DECODE, GPU, PREFILL, SHAPE, Train

OTHER = "GPU-5678"
SM = {GPU: (0.9, 0.5), OTHER: (0.1, 0.05)}
"""Shares of SMs in a prefill and in a decode, by device."""
MEMORY_BYTES = {GPU: 70e9, OTHER: 10e9}
WATTS = {GPU: 600.0, OTHER: 150.0}


def two_ranks(*, until_ms: float = 1500, instances: tuple[str, str] = ("", "")) -> Train:
    """Run an engine of two tensor ranks, each on a device or on a MIG instance of one device."""
    train = Train(instance=instances[0])
    worker = train.script.ring("worker", 1, ranks=2)
    uuid = (GPU if any(instances) else OTHER)[4:]
    worker.write(
        EngineInfo(
            START_NS, "made-up", shape=SHAPE, device="NVIDIA", device_uuid=uuid,
            mig_uuid=instances[1], ranks=(1, 0, 0, 0), sizes=(2, 1, 1, 1),
        )
    )  # fmt: skip
    train.alternate(until_ms=until_ms, gap_ms=1)
    records, train.script.entries = train.script.entries, []
    for number, record in records:
        train.script.entries.append((number, record))
        if number == train.core.number and type(record).__name__ == "StepSpan":
            train.script.entries.append((worker.number, record))
    return train


def sampled(train: Train, names: dict[str, str], *, other_until_ms: float = 1e9) -> Train:
    """Sample each device under a name."""
    for device, name in names.items():
        before = len(train.samples)
        train.sample(0.5, "sm_active_share", SM[device], source="pm", device=name)
        for sample in train.samples[before:]:
            sample.values["memory_used_bytes"] = MEMORY_BYTES[device]
            sample.values["power_w"] = WATTS[device]
    train.samples = [
        each
        for each in train.samples
        if each.device_uuid == names[GPU] or each.end_ns < START_NS + other_until_ms * MS
    ]
    return train


def view_of(train: Train) -> EngineView:
    (view,) = snapshot(train.play()[0], window_ns=60_000 * MS, mode="live").engines
    return view


def scraped(view: EngineView) -> Scrape:
    return Scrape(
        page(families([EngineSample(view, {0: ReplicaCounters()}, None)]), is_open=False).decode()
    )


@pytest.fixture(scope="module")
def view() -> EngineView:
    return view_of(sampled(two_ranks(), {GPU: GPU, OTHER: OTHER}))


def test_gauges_of_each_device_are_its_own(view: EngineView) -> None:
    scrape = scraped(view)
    for device, num_bytes in MEMORY_BYTES.items():
        # A GPU's ID is exported as its driver writes it only if it is complete: these are short.
        gpu = device[4:]
        assert scrape.one("inferscope_gpu_memory_used_bytes", gpu=gpu) == num_bytes
        share = scrape.one("inferscope_gpu_sm_active_ratio", gpu=gpu)
        assert min(SM[device]) <= share <= max(SM[device])
    assert {labels["gpu"] for labels, _ in scrape.all("inferscope_gpu_memory_used_bytes")} == {
        labels["gpu"] for labels, _ in scrape.all("inferscope_gpu_phase_seconds_total")
    }


def test_counters_of_the_devices_sum_to_the_engine_s_and_each_is_over_its_own_time(
    view: EngineView,
) -> None:
    scrape = scraped(view)
    name = "inferscope_gpu_sm_active_seconds_total"
    for at, phase in ((PREFILL, "prefill"), (DECODE, "decode")):
        whole_ns = view.counters.totals["sm_active_ns"][phase]
        assert scrape.total(name, phase=phase) == pytest.approx(whole_ns / 1e9, rel=1e-6)
        for device, shares in SM.items():
            active_s = scrape.one(name, phase=phase, gpu=device[4:])
            phase_s = scrape.one("inferscope_gpu_phase_seconds_total", phase=phase, gpu=device[4:])
            assert active_s / phase_s == pytest.approx(shares[at], rel=0.05)


def test_the_screen_reports_the_power_of_all_and_the_mean_of_the_sms(view: EngineView) -> None:
    assert "  750 W" in format_counted(view.counters)
    for at, phase in ((PREFILL, "prefill"), (DECODE, "decode")):
        mean = sum(shares[at] for shares in SM.values()) / 2
        assert view.counters.use[phase].sm_share == pytest.approx(mean, rel=0.05)


def test_silent_sampler_has_no_gauges_and_constant_counters() -> None:
    train = sampled(two_ranks(until_ms=4000), {GPU: GPU, OTHER: OTHER}, other_until_ms=1500)
    scrape = scraped(view_of(train))
    for name in ("inferscope_gpu_memory_used_bytes", "inferscope_gpu_sm_active_ratio"):
        assert [labels["gpu"] for labels, _ in scrape.all(name)] == [GPU[4:]]
    counted = "inferscope_gpu_sm_active_seconds_total"
    assert {labels["gpu"] for labels, _ in scrape.all(counted)} == {GPU[4:], OTHER[4:]}


def test_instances_of_one_device_are_reported_separately() -> None:
    train = two_ranks(instances=("MIG-7", "MIG-8"))
    scrape = scraped(view_of(sampled(train, {GPU: "MIG-7", OTHER: "MIG-8"})))
    memory = scrape.all("inferscope_gpu_memory_used_bytes")
    assert {labels["gpu"]: num for labels, num in memory} == {
        "MIG-7": MEMORY_BYTES[GPU],
        "MIG-8": MEMORY_BYTES[OTHER],
    }


def test_gauges_of_a_source_that_ends_are_absent_and_another_s_of_that_device_stay() -> None:
    train = sampled(two_ranks(until_ms=4000), {GPU: GPU, OTHER: OTHER})
    for sample in train.samples:
        if sample.device_uuid == OTHER and sample.end_ns >= START_NS + 1500 * MS:
            del sample.values["sm_active_share"]
    scrape = scraped(view_of(train))
    sms = scrape.all("inferscope_gpu_sm_active_ratio")
    memory = scrape.all("inferscope_gpu_memory_used_bytes")
    assert {labels["gpu"] for labels, _ in sms} == {GPU[4:]}
    assert {labels["gpu"] for labels, _ in memory} == {GPU[4:], OTHER[4:]}
