"""Join of counter samples with the steps in their windows."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from inferscope_jsonl.exporter import request_row
from inferscope_otlp.attributes import prefill_attributes
from inferscope_otlp.finished import Finished
from inferscope_prometheus.engine_counters import ReplicaCounters
from inferscope_prometheus.families import EngineSample, families
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest
from inferscope.fold.fold import Collector
from inferscope.fold.join.counter_shares import (
    BUCKET_NS,
    BUSY,
    ENERGY,
    READ,
    SM_ACTIVE,
    WRITE,
    CounterShares,
    SettledBucket,
)
from inferscope.fold.join.counters import LONGEST_WAIT_NS
from inferscope.fold.snapshots import CountersView, PhaseUse
from inferscope.fold.view import snapshot
from inferscope.fold.work_totals import NUM_COLUMNS, WorkTotals
from inferscope.records import TICK_NS
from inferscope.text.lines import text_of
from inferscope.text.panels.phases import format_counted
from inferscope.text.panels.request import request_detail
from tests.fold.scripts import MS, START_NS, Finals
from tests.fold.trains import DECODE, PREFILL, Train, counters_of, shares


def by_overlap(train: Train) -> tuple[float, float]:
    """Return every window split by the time of the phases in it."""
    active, busy = [0.0, 0.0], [0.0, 0.0]
    for sample in train.samples:
        begin, end = ((ns - START_NS) / MS for ns in (sample.start_ns, sample.end_ns))
        for start, stop, phase in train.steps:
            both = max(0.0, min(stop, end) - max(start, begin))
            active[phase] += both * sample.values["sm_active_share"]
            busy[phase] += both
    return active[0] / busy[0], active[1] / busy[1]


def test_regression_separates_phases_where_overlap_gives_both_the_same() -> None:
    train = Train().alternate(until_ms=12_000).sample(100, "sm_active_share", (0.9, 0.35))
    prefill, decode = shares(train.play()[0])
    assert prefill == pytest.approx(0.9, rel=0.1)
    assert decode == pytest.approx(0.35, rel=0.1)
    prefill, decode = by_overlap(train)
    assert prefill == pytest.approx(decode, rel=0.05)
    assert decode > 1.5 * 0.35


def test_short_samples_are_assigned_to_the_steps_in_their_windows() -> None:
    train = Train().alternate(until_ms=2000, prefill_ms=20.3, decode_ms=6.4, gap_ms=1.1)
    train.sample(0.5, "sm_active_share", (0.9, 0.35), source="pm")
    collector, finals = train.play()
    prefill, decode = shares(collector)
    assert prefill == pytest.approx(0.9, rel=0.01)
    assert decode == pytest.approx(0.35, rel=0.03)
    counters = finals.requests[10].counters
    assert counters.prefill["sm_active_ns"] == pytest.approx(0.9 * 20.3 * MS, rel=0.03)
    assert counters.decode["sm_active_ns"] == pytest.approx(0.35 * 6.4 * MS, rel=0.05)


def test_engine_busy_samples_show_launch_gaps_within_steps() -> None:
    train = Train().alternate(until_ms=1500, prefill_ms=20, decode_ms=6, gap_ms=1)
    train.sample(0.5, "busy_share", (1.0, 0.6), source="pm")
    prefill, decode = shares(train.play()[0], BUSY)
    assert prefill == pytest.approx(1.0, rel=0.02)
    assert decode == pytest.approx(0.6, rel=0.03)


def test_bytes_of_long_windows_are_the_models_scaled_to_the_counted_sum() -> None:
    train = Train().alternate(until_ms=3000)
    train.sample(100, "dram_read_bytes", (7e6, 2e6), is_share=False)
    for sample in train.samples:
        sample.values["dram_write_bytes"] = sample.values["dram_read_bytes"] / 4
    collector, finals = train.play()
    counters = counters_of(collector)
    whole = sum(sample.values["dram_read_bytes"] for sample in train.samples)
    assert counters.totals[:, READ].sum() == pytest.approx(whole, rel=0.05)
    assert counters.totals[:, WRITE].sum() == pytest.approx(whole / 4, rel=0.05)
    final = finals.requests[40]
    modelled = final.prefill_work.hbm_read_bytes, final.decode_work.hbm_read_bytes
    read_bytes = final.counters.prefill["hbm_read_bytes"], final.counters.decode["hbm_read_bytes"]
    assert modelled[0]
    assert modelled[1]
    assert read_bytes[0] / read_bytes[1] == pytest.approx(modelled[0] / modelled[1], rel=0.02)
    assert final.counters.provenance["hbm_read_bytes"].method == "apportioned"


def test_peak_share_counts_both_directions_and_the_model_divides_them() -> None:
    train = Train().alternate(until_ms=2000).sample(100, "dram_share", (0.5, 0.8))
    for sample in train.samples:
        sample.values["dram_peak_bytes_per_s"] = 1e12
    counters = counters_of(train.play()[0])
    whole = sum(
        sample.values["dram_share"] * (sample.end_ns - sample.start_ns) * 1e3
        for sample in train.samples
    )
    given = counters.totals[:, [READ, WRITE]].sum()
    assert given == pytest.approx(whole, rel=0.06)
    assert counters.totals[:, READ].sum() > counters.totals[:, WRITE].sum() > 0


def test_energy_is_divided_over_phases_and_idle_time_and_always_apportioned() -> None:
    watts = (600.0, 350.0)
    train = Train()
    at, step, rng = 1.0, 0, np.random.default_rng(1)
    while at < 20_000:
        request = train.ask(f"r{step}", at)
        for rows, lasts, phase in (
            ([(request, 64, 0)], rng.uniform(10, 60), PREFILL),
            ([(request, 1, 64)], rng.uniform(5, 60), DECODE),
        ):
            train.run(step, rows, at, at + lasts, phase)
            at, step = at + lasts, step + 1
        train.core.finished(request)
        at += rng.uniform(0, 60)
    energy_uj = tuple(each * 1e3 for each in watts)  # per millisecond
    train.sample(100, "energy_uj", energy_uj, source="nvml", is_share=False, idle=100.0 * 1e3)
    collector, finals = train.play()
    prefill, decode = shares(collector, ENERGY)
    assert prefill * 1e3 == pytest.approx(watts[0], rel=0.05)
    assert decode * 1e3 == pytest.approx(watts[1], rel=0.05)
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0]
    (found,) = (
        family
        for family in families([EngineSample(view, {0: ReplicaCounters()}, None)])
        if family.name == "inferscope_apportioned_error_ratio"
    )
    ((sample),) = found.samples
    assert sample.labels["counted"] == "energy_joules"
    assert sample.value == view.counters.errors["energy_uj"] < 0.1
    provenance = finals.requests[-5].counters.provenance["energy_uj"]
    assert provenance.method == "apportioned"
    assert provenance.error is not None
    assert provenance.error < 0.1


def test_one_request_alone_under_short_samples_is_measured() -> None:
    train = Train()
    request = train.ask("alone", 1)
    train.run(0, [(request, 64, 0)], 1, 60, PREFILL)
    for step in range(1, 30):
        train.run(step, [(request, 1, 63 + step)], 52 + 8 * step, 59 + 8 * step, DECODE)
    train.core.finished(request)
    train.sample(0.5, "sm_active_share", (0.8, 0.4), source="pm", first_ms=0.25)
    final = train.play()[1].only()
    assert final.counters.prefill["sm_active_ns"] == pytest.approx(0.8 * 59 * MS, rel=0.01)
    assert final.counters.decode["sm_active_ns"] == pytest.approx(0.4 * 7 * 29 * MS, rel=0.01)
    assert final.counters.provenance["sm_active_ns"].method == "measured"


def test_requests_that_share_steps_are_apportioned_and_sum_to_the_phase() -> None:
    train = Train()
    requests = [train.ask(f"r{at}", 1) for at in range(3)]
    train.run(0, [(each, 64, 0) for each in requests], 1, 40, PREFILL)
    for step in range(1, 20):
        rows = [(each, 1, 63 + step) for each in requests]
        train.run(step, rows, 32 + 8 * step, 39 + 8 * step, DECODE)
    for each in requests:
        train.core.finished(each)
    train.sample(0.5, "sm_active_share", (0.8, 0.4), source="pm")
    collector, finals = train.play()
    decode = [final.counters.decode["sm_active_ns"] for final in finals.requests]
    assert sum(decode) == pytest.approx(0.4 * 7 * 19 * MS, rel=0.01)
    assert sum(decode) == pytest.approx(counters_of(collector).totals[DECODE, SM_ACTIVE], rel=1e-6)
    for final in finals.requests:
        assert final.counters.provenance["sm_active_ns"].method == "apportioned"


def test_phases_that_never_differ_get_no_figure() -> None:
    train = Train().alternate(until_ms=9_000, prefill_ms=15, decode_ms=10)
    train.sample(100, "sm_active_share", (0.9, 0.35), first_ms=1)  # four rounds in each window
    collector, finals = train.play()
    assert not counters_of(collector).totals.any()
    assert counters_of(collector).reason()
    assert all("sm_active_ns" not in final.counters.prefill for final in finals.requests)


def test_doubled_and_late_samples_change_nothing() -> None:
    def train() -> Train:
        return (
            Train().alternate(until_ms=2000).sample(1, "sm_active_share", (0.9, 0.3), source="pm")
        )

    plain = train()
    noisy = train()
    for sample in noisy.samples[::7]:
        begin, end = ((ns - START_NS) / MS for ns in (sample.start_ns, sample.end_ns))
        noisy.count(begin, end, sample.values, source="pm")
    noisy.count(100, 101, {"sm_active_share": 1.0}, source="pm", written_ms=1500)
    expected, collector = plain.play()[0], noisy.play()[0]
    assert (counters_of(collector).totals == counters_of(expected).totals).all()
    assert counters_of(collector).found.num_doubled > 100
    assert counters_of(collector).found.num_late == 1


def test_a_gap_in_samples_does_not_count_as_zero() -> None:
    train = Train().alternate(until_ms=3000).sample(1, "sm_active_share", (0.9, 0.3), source="pm")
    hole = range(START_NS + 1000 * MS, START_NS + 1400 * MS)
    train.samples = [sample for sample in train.samples if sample.start_ns not in hole]
    collector, finals = train.play()
    prefill, decode = shares(collector)
    assert (prefill, decode) == (pytest.approx(0.9, rel=0.03), pytest.approx(0.3, rel=0.1))
    of = {
        bool(final.counters.prefill)
        for final in finals.requests
        if final.arrived_ns in hole and final.delivered_ns in hole
    }
    assert of == {False}


def test_no_request_waits_longer_than_half_a_second_for_samples() -> None:
    train = Train().alternate(until_ms=2000).sample(100, "sm_active_share", (0.9, 0.3))
    train.samples = [each for each in train.samples if each.end_ns <= START_NS + 1500 * MS]
    _, finals = train.play()
    assert len(finals.requests) == len(train.steps) // 2
    order = [final.delivered_ns for final in finals.requests]
    assert order == sorted(order)
    assert not finals.requests[-1].counters.prefill


@pytest.mark.parametrize("first_ms", [0, 63])
def test_requests_wait_until_a_tick_half_a_second_after_their_end_at_most(first_ms: float) -> None:
    class Clocked(Finals):
        def __init__(self) -> None:
            super().__init__()
            self.waits_ns: list[int] = []

        def on_request(self, final: FinalRequest) -> None:
            super().on_request(final)
            self.waits_ns.append(collector.engines["engine"].now_ns - final.delivered_ns)

    train = Train().alternate(until_ms=4000)
    train.sample(100, "sm_active_share", (0.9, 0.3), first_ms=first_ms)
    for late_ns in (0, 10_000 * MS):  # the second sampler reports too late
        finals = Clocked()
        collector = Collector(finals)
        train.samples = [replace(each, t_ns=each.t_ns + late_ns) for each in train.samples]
        train.play_into(collector)
        assert len(finals.requests) == len(train.steps) // 2
        assert max(finals.waits_ns) <= LONGEST_WAIT_NS + TICK_NS


def test_a_later_foreign_share_does_not_change_earlier_windows() -> None:
    """Settle any number of windows at once."""
    train = Train().alternate(until_ms=4000, prefill_ms=20, decode_ms=6, gap_ms=26)
    train.sample(100, "energy_uj", (5.0, 5.0), is_share=False, source="nvml")
    of_others = 0.0
    for at, sample in enumerate(train.samples):
        share = sample.values["foreign_busy_share"] = 0.3 if at % 5 == 2 else 0.0
        of_others += share * (sample.end_ns - sample.start_ns)
    (device,) = train.play()[0].devices()
    assert device.seconds_by_ns["foreign"] == pytest.approx(of_others, rel=0.1)


def test_samples_of_another_device_or_of_a_whole_divided_one_are_not_joined() -> None:
    train = (
        Train()
        .alternate(until_ms=1500)
        .sample(100, "energy_uj", (5.0, 5.0), is_share=False, source="nvml", device="GPU-other")
    )
    collector, finals = train.play()
    assert not counters_of(collector).totals.any()
    assert "sampler" in counters_of(collector).reason()
    assert not any(final.counters.prefill for final in finals.requests)


def test_a_mig_instance_is_not_charged_with_the_whole_devices_power() -> None:
    train = Train(instance="MIG-7").alternate(until_ms=1500)
    train.sample(100, "energy_uj", (5.0, 5.0), is_share=False, source="nvml")
    assert not counters_of(train.play()[0]).is_on


def test_use_of_the_device_by_other_processes_is_foreign_and_in_no_phase() -> None:
    train = Train().alternate(until_ms=4000, prefill_ms=20, decode_ms=6, gap_ms=26)
    train.sample(100, "sm_active_share", (0.9, 0.3), idle=0.5)
    train.sample(100, "energy_uj", (5.0, 5.0), is_share=False, source="nvml")
    for sample in train.samples:
        if sample.source == "nvml":
            sample.values["foreign_busy_share"] = 0.25
    collector, finals = train.play()
    (device,) = collector.devices()
    assert sum(device.seconds_by_ns.values()) == device.wall_ns
    assert device.seconds_by_ns["foreign"] == pytest.approx(0.25 * 4000 * MS, rel=0.1)
    assert not any(final.counters.prefill for final in finals.requests[5:])
    assert "other processes" in counters_of(collector).reason()


def test_without_a_sampler_nothing_waits_and_nothing_is_foreign() -> None:
    train = Train().alternate(until_ms=500)
    collector, finals = train.play()
    assert len(finals.requests) == len(train.steps) // 2
    assert "foreign" not in collector.devices()[0].seconds_by_ns
    assert not counters_of(collector).is_on


def test_the_digest_differs_if_counters_differ() -> None:
    def digest(share: float) -> str:
        train = Train().alternate(until_ms=1500)
        return train.sample(1, "sm_active_share", (share, 0.3), source="pm").play()[0].digest()

    assert digest(0.9) == digest(0.9) != digest(0.8)


def test_a_slot_is_not_reused_until_the_buckets_of_its_last_request_are_settled() -> None:
    """Start and end many requests: no value of one is assigned to the next in its slot."""

    def train() -> Train:
        train = Train()
        for step in range(900):  # successive requests: each is alone
            request = train.ask(f"r{step}", 1 + 4 * step)
            train.run(step, [(request, 8 + step % 5, 0)], 1 + 4 * step, 4 + 4 * step, PREFILL)
            train.core.finished(request)
        return train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")

    collector, finals = train().play()
    active_ns = [final.counters.prefill["sm_active_ns"] for final in finals.requests[:-100]]
    assert active_ns == pytest.approx([0.9 * 3 * MS] * len(active_ns), rel=0.2)
    assert sum(active_ns) == pytest.approx(0.9 * 3 * MS * len(active_ns), rel=0.01)
    table = collector.engines["engine"].lives.table
    assert len(table.by_slot) == 256  # they are free again
    assert len({*table._free}) == len(table._free) == 255


def test_a_request_that_ends_as_a_bucket_begins_waits_only_for_earlier_buckets() -> None:
    work, free = WorkTotals(8), deque[int]()
    accounts = CounterShares(work, free)
    accounts.grow(8)
    none = [0] * NUM_COLUMNS
    accounts.reach(7)
    accounts.reach(8)
    before = accounts.leave(1, 8 * BUCKET_NS - 1, none, none)
    since = accounts.leave(2, 8 * BUCKET_NS, none, none)
    accounts.settle([SettledBucket(*[[0.0] * 10] * 4)])
    assert accounts.is_settled(before)
    assert not accounts.is_settled(since)
    accounts.take([before, since])
    assert not free  # the journal may still refer to them
    accounts.settle([SettledBucket(*[[0.0] * 10] * 4)])
    assert sorted(free) == [1, 2]


@pytest.mark.parametrize("is_sampled", [True, False])
def test_prefill_flops_per_second_are_shown_with_and_without_samples(
    is_sampled: bool,
) -> None:
    train = Train().alternate(until_ms=1500, gap_ms=1)
    if is_sampled:
        train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    collector, finals = train.play()
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0]
    rows = [request_row(each)["by_phase"]["prefill"] for each in finals.requests]
    took_ns = sum(request_row(each)["compute_ns"]["prefill"] for each in finals.requests)
    assert took_ns
    assert view.prefill_flops_s == pytest.approx(
        sum(row["flops"] for row in rows) / took_ns * 1e9, rel=1e-3
    )
    assert collector.engines["engine"].lives.counters.is_on is is_sampled


def test_exported_rows_contain_counters_and_their_methods() -> None:
    train = Train().alternate(until_ms=1500, gap_ms=1)
    train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    collector, finals = train.play()
    row = request_row(finals.requests[10])
    assert row["by_phase"]["prefill"]["sm_active_ns"] == pytest.approx(18 * MS, rel=0.05)
    assert row["by_phase"]["prefill"]["energy_uj"] is None
    assert row["provenance"]["sm_active_ns"]["source"] == "pm"
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0]
    assert view.counters.use["prefill"].sm_share == pytest.approx(0.9, rel=0.02)
    assert view.counters.use["decode"].power_w is None
    assert "energy_uj" not in view.counters.totals
    assert format_counted(view.counters).startswith("SM 9")


def test_a_requests_detail_shows_its_counters_and_their_methods() -> None:
    train = Train().alternate(until_ms=1500, gap_ms=1)
    train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    for counted, is_known in ((train, True), (Train().alternate(until_ms=300), False)):
        view = snapshot(counted.play()[0], window_ns=60_000 * MS, mode="ended").engines[0]
        row = next(row for row in view.requests if row.request_id == "r4")
        drawn = "\n".join(text_of(line) for line in request_detail(row, view, 160, 40))
        assert ("ms SM 9" in drawn) is is_known
        how = row.counters.provenance.get("sm_active_ns")
        assert (how is not None) is is_known
        assert how is None or f"SM {how.method} (pm)" in drawn
        assert "HBM" not in drawn


def test_the_screen_shows_bytes_of_decode_and_a_dash_for_unknown_prefill() -> None:
    use = {"decode": PhaseUse(0.3, None, 2.9e12, 0.1e12, None)}
    assert format_counted(CountersView(use=use)).endswith("HBM -/3.00 TB/s")


def test_the_view_states_the_reason_for_missing_counters() -> None:
    collector, finals = Train().alternate(until_ms=300).play()
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0]
    assert format_counted(view.counters).startswith("SM -, HBM -: no samples of this device")
    row = request_row(finals.requests[0])
    assert row["by_phase"]["decode"]["sm_active_ns"] is None
    assert "sm_active_ns" not in row["provenance"]


def test_host_samples_show_the_cpu_use_of_an_engines_processes() -> None:
    train = Train().alternate(until_ms=500)
    for pid, cpu_ns in ((1.0, 150e6), (77.0, 900e6)):  # the second is not of this engine
        values = {"pid": pid, "cpu_ns": cpu_ns, "rss_bytes": 1e9}
        train.count(300, 400, values, source="host", device="")
    collector, _ = train.play()
    use = counters_of(collector).host_use
    assert use["cpu_cores"] == pytest.approx(1.5)
    assert use["rss_bytes"] == 1e9
    assert not counters_of(collector).is_on


def test_metrics_have_families_of_counted_quantities_only() -> None:
    def exported(train: Train) -> dict[str, dict[tuple[str, ...], float]]:
        view = snapshot(train.play()[0], window_ns=60_000 * MS, mode="ended").engines[0]
        look = EngineSample(view, {0: ReplicaCounters()}, None, 0)
        return {
            family.name: {
                tuple(sample.labels.values())[5:]: sample.value for sample in family.samples
            }
            for family in families([look])
        }

    counted = Train().alternate(until_ms=1500)
    counted.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    samples = exported(counted)["inferscope_gpu_sm_active_seconds"]
    assert [key[1] for key in samples] == ["prefill", "decode"]
    assert samples["1234", "prefill"] > samples["1234", "decode"] > 0
    assert not {"inferscope_energy_joules", "inferscope_gpu_hbm_bytes"} & exported(counted).keys()
    assert "inferscope_gpu_sm_active_seconds" not in exported(Train().alternate(until_ms=300))


def test_spans_contain_the_counters_of_a_phase_and_their_methods() -> None:
    train = Train().alternate(until_ms=1500, gap_ms=1)
    train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    finals = train.play()[1].requests
    attributes = prefill_attributes(Finished(finals[10], None, None, None, {}))
    assert attributes["inferscope.gpu.sm_active"] == pytest.approx(0.018, rel=0.05)
    assert attributes["inferscope.counters.method.sm_active_ns"] in ("measured", "apportioned")
    assert "inferscope.energy.joules" not in attributes
    how = finals[10].counters.provenance["sm_active_ns"]
    for error in (None, 0.04):
        known = {"sm_active_ns": replace(how, error=error)}
        request = replace(finals[10], counters=replace(finals[10].counters, provenance=known))
        attributes = prefill_attributes(Finished(request, None, None, None, {}))
        assert attributes.get("inferscope.counters.error.sm_active_ns") == error
