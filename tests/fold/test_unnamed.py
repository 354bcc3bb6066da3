"""Ranks on a host without their engine's core: their phases are reported, without requests."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from inferscope_jsonl.exporter import step_row
from inferscope_prometheus import PrometheusExporter

from inferscope.fold.fold import READER, Collector
from inferscope.fold.snapshots import EngineView, Snapshot
from inferscope.fold.view import snapshot
from inferscope.records import EngineInfo, RingOpened, Shape
from tests.daemon.running import Scrape
from tests.fold.scripts import MS, Finals, Ring, Script, assert_all_closes
from tests.fold.trains import SHAPE

NUM_STEPS = 20
PRICE = 3600.0
"""Price in dollars per hour: one dollar per second."""


@dataclass
class Fleet:
    """Engine of two tensor ranks on two hosts; the core is on the first."""

    script: Script = field(default_factory=Script)
    mixed: bool = True
    shape: Shape | None = None

    def __post_init__(self) -> None:
        script = self.script
        self.core = script.ring(ranks=2)
        self.ranks = [script.ring("worker", rank, ranks=2) for rank in range(2)]
        for ring in (self.core, *self.ranks) if self.shape is not None else ():
            place = {"ranks": (ring.rank, 0, 0, 0), "sizes": (2, 1, 1, 1)}
            ring.write(
                EngineInfo(script.now_ns, "made-up", device="gpu", shape=self.shape, **place)
            )
        old = self.core.queued("old")
        self.core.admitted(old)
        for step in range(NUM_STEPS):
            begin, end = 20.0 * step + 2, 20.0 * step + 12
            rows = [(old, 1, 8 + step)] if step else [(old, 8, 0)]
            if step % 5 == 4 and self.mixed:
                new = self.core.queued(f"r{step}")
                self.core.admitted(new)
                rows.append((new, 64, 0))
            self.run(step, rows, begin, end)
            if len(rows) > 1:
                self.core.finished(new)
        self.core.finished(old)
        script.at(20 * NUM_STEPS + 1000)
        for ring in (self.core, *self.ranks):
            ring.health()

    def run(self, step: int, rows: list[tuple[int, int, int]], begin: float, end: float) -> None:
        """Run a step; the second rank takes a fifth longer."""
        script = self.script
        script.at(begin)
        self.core.plan(step)
        prefill = sum(tokens for _, tokens, context in rows if tokens > 1 or not context)
        totals = {
            "prefill_tokens": prefill,
            "decode_tokens": sum(tokens for _, tokens, _ in rows) - prefill,
        }
        script.at(end + 3)
        self.ranks[0].span(step, begin, end, **totals)
        self.ranks[1].span(step, begin, begin + 1.2 * (end - begin), **totals)
        self.core.slices(step, rows)
        self.core.emitted([request for request, _, _ in rows])

    def on_host(self, rings: Collection[Ring]) -> Host:
        """Return a host whose collector folds some of the rings."""
        numbers = {ring.number for ring in rings}
        finals = Finals()
        collector = Collector(finals)
        for item in self.script.items(until_ms=3000):
            record = item.record
            ring = record.ring if isinstance(record, RingOpened) else item.ring
            if ring in numbers or (ring == READER and not isinstance(record, RingOpened)):
                collector.fold(item.ring, record)
        return Host(collector, finals)


@dataclass
class Host:
    """Collector of one host, and its final records."""

    collector: Collector
    finals: Finals

    @property
    def snapshot(self) -> Snapshot:
        return snapshot(self.collector, window_ns=60_000 * MS, mode="live")

    @property
    def view(self) -> EngineView:
        (view,) = self.snapshot.engines
        return view

    def scrape(self) -> Scrape:
        exporter = PrometheusExporter({"port": 0, "price_per_gpu_hour": PRICE})
        exporter.open()
        try:
            for step in self.finals.steps:
                exporter.on_step(step)
            for request in self.finals.requests:
                exporter.on_request(request)
            exporter.on_snapshot(self.snapshot)
            return Scrape(exporter._published.render(False).decode())
        finally:
            exporter.close()


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture(scope="module")
def hosts(fleet: Fleet) -> tuple[Host, Host]:
    first, second = fleet.ranks
    return fleet.on_host([fleet.core, first]), fleet.on_host([second])


def test_a_rank_without_its_core_reports_its_phases_and_is_no_loss(
    hosts: tuple[Host, Host],
) -> None:
    _, alone = hosts
    assert alone.collector.num_unjoined == 0
    assert_all_closes(alone.collector, alone.finals)
    assert [step.step for step in alone.finals.steps] == list(range(NUM_STEPS))
    (device,) = alone.view.devices
    assert device.seconds_by_ns["unattributed"] == 0
    busy_ns = device.seconds_by_ns["prefill"] + device.seconds_by_ns["decode"]
    assert busy_ns == NUM_STEPS * 12 * MS
    scrape = alone.scrape()
    assert scrape.one("inferscope_rank_step_seconds_total", rank="1") == pytest.approx(0.24)
    for reason in ("unjoined", "joined_late"):
        assert scrape.one("inferscope_records_dropped_total", reason=reason) == 0
    assert scrape.total("inferscope_requests_total") == 0
    assert scrape.total("inferscope_step_duration_seconds_count") == 0
    assert not scrape.all("inferscope_headroom_ratio")  # another host has the load


def test_the_fleet_s_device_seconds_are_the_sum_of_its_hosts_(
    fleet: Fleet, hosts: tuple[Host, Host]
) -> None:
    together = fleet.on_host([fleet.core, *fleet.ranks]).scrape()
    scrapes = [host.scrape() for host in hosts]
    seconds = "inferscope_gpu_phase_seconds_total"
    for name, phases in (
        (seconds, ("unattributed", "padding")),
        ("inferscope_rank_step_seconds_total", (None,)),
        ("inferscope_requests_total", (None,)),
        ("inferscope_tokens_total", ("prefill", "decode")),
    ):
        for phase in phases:
            labels = {} if phase is None else {"phase": phase}
            whole = together.total(name, **labels)
            parts = sum(scrape.total(name, **labels) for scrape in scrapes)
            assert parts == pytest.approx(whole), (name, phase)
    # A step of both phases is divided by the model, without the requests' contexts there.
    busy = [
        sum(scrape.total(seconds, phase=phase) for phase in ("prefill", "decode"))
        for scrape in (together, *scrapes)
    ]
    assert busy[1] + busy[2] == pytest.approx(busy[0])
    for phase in ("prefill", "decode"):
        whole = together.total(seconds, phase=phase)
        parts = sum(scrape.total(seconds, phase=phase) for scrape in scrapes)
        # Nor is the model fitted to steps there, as on the core's host from the first one on.
        assert parts == pytest.approx(whole, rel=0.1)


def test_phases_that_no_step_mixes_are_the_same_to_the_nanosecond() -> None:
    fleet = Fleet(mixed=False)
    second = fleet.ranks[1]
    (alone,) = fleet.on_host([second]).view.devices
    beside = fleet.on_host([fleet.core, *fleet.ranks])
    of_second = [step for step in beside.finals.steps if step.rank == 1]
    prefill_ns = sum(int(step.shares_ns[step.phases == 0].sum()) for step in of_second)
    assert alone.seconds_by_ns["prefill"] == prefill_ns == 12 * MS
    assert alone.seconds_by_ns["decode"] == (NUM_STEPS - 1) * 12 * MS


def test_ranks_on_another_host_do_not_make_those_here_compute_faster() -> None:
    """Count FLOPs of the whole model, with the second rank's seconds on the other host."""
    fleet = Fleet(mixed=False, shape=SHAPE)
    first, second = fleet.ranks
    together = fleet.on_host([fleet.core, first, second]).view.prefill_flops_s
    here = fleet.on_host([fleet.core, first]).view.prefill_flops_s
    assert together is not None
    # Of the prefill's 10 and 12 ms the first rank took 10, for half of what there was to compute.
    assert here == pytest.approx(together * 22 / 2 / 10)
    assert fleet.on_host([second]).view.prefill_flops_s is None


def test_device_hours_are_paid_for_on_both_hosts(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        (device,) = host.view.devices
        dollars = host.scrape().total("inferscope_cost_dollars_total")
        assert dollars == pytest.approx(device.wall_ns / 1e9, rel=1e-3)
    untenanted = hosts[1].scrape().total("inferscope_cost_dollars_total", tenant="none")
    assert untenanted == pytest.approx(0.24)


def test_exported_rows_have_phases_and_no_names(hosts: tuple[Host, Host]) -> None:
    rows = [json.loads(json.dumps(step_row(step))) for step in hosts[1].finals.steps]
    for row in rows:
        assert sum(share["ns"] for share in row["shares"]) == row["measured_ns"]
        assert {share["request"] for share in row["shares"]} == {None}
    assert [[share["phase"] for share in row["shares"]] for row in rows[:5]] == [
        ["prefill"],
        *[["decode"]] * 3,
        ["prefill", "decode"],
    ]
    assert [share["tokens"] for share in rows[4]["shares"]] == [64, 1]


def test_ranks_without_token_counts_report_their_time() -> None:
    script = Script()
    worker = script.ring("worker", 1, ranks=2)
    for step in range(NUM_STEPS):
        script.at(20 * step + 12)
        worker.span(step, 20 * step + 2, 20 * step + 12)
    script.at(20 * NUM_STEPS + 1000)
    worker.health()
    collector, finals = script.play(until_ms=2000)
    assert collector.num_unjoined == 0
    (device,) = collector.devices()
    assert device.seconds_by_ns["unattributed"] == NUM_STEPS * 10 * MS
    assert len(finals.steps) == NUM_STEPS
    scrape = Host(collector, finals).scrape()
    assert scrape.one("inferscope_rank_step_seconds_total", rank="1") == pytest.approx(0.2)


@pytest.mark.parametrize(("dp_rank", "num_unjoined"), [(0, 0), (1, NUM_STEPS)])
def test_a_core_of_another_replica_does_not_stand_for_the_ranks_beside_it(
    dp_rank: int, num_unjoined: int
) -> None:
    """Apply the core to its own replica only: there, missing records count as lost."""
    script = Script()
    core, worker = script.ring(), script.ring("worker", 1)
    core.keyframe(dp_rank=1)
    worker.keyframe(dp_rank=dp_rank)
    for step in range(NUM_STEPS):
        script.at(20 * step + 12)
        worker.span(step, 20 * step + 2, 20 * step + 12, prefill_tokens=0, decode_tokens=4)
    script.at(20 * NUM_STEPS + 1000)
    for ring in (core, worker):
        ring.health()
    collector, _ = script.play(until_ms=2000)
    assert collector.num_unjoined == num_unjoined
    decode_ns = sum(device.seconds_by_ns["decode"] for device in collector.devices())
    assert decode_ns == (NUM_STEPS - num_unjoined) * 10 * MS


@pytest.mark.parametrize(("prefill", "decode"), [(1 << 31, 1), (-1, 2), (0, 0), (1 << 40, 0)])
def test_damaged_counts_of_tokens_are_not_believed(prefill: int, decode: int) -> None:
    script = Script()
    worker = script.ring("worker", 1, ranks=2)
    script.at(12)
    worker.span(0, 2, 12, prefill_tokens=prefill, decode_tokens=decode)
    script.at(1000)
    worker.health()
    collector, _ = script.play(until_ms=2000)
    (device,) = collector.devices()
    assert device.seconds_by_ns["unattributed"] == 10 * MS


def test_many_steps_at_once_are_all_reported() -> None:
    script = Script()
    worker = script.ring("worker", 1, ranks=2)
    for step in range(600):
        script.at(0.1 * step + 0.1)
        worker.span(step, 0.1 * step, 0.1 * step + 0.1, prefill_tokens=0, decode_tokens=4)
    script.at(1000)
    worker.health()
    collector, finals = script.play(until_ms=2000)
    assert collector.num_unjoined == 0
    assert len(finals.steps) == 600
    (device,) = collector.devices()
    assert device.seconds_by_ns["decode"] == 60 * MS
