"""A request of a core that is not observed has no ledger, and its times at the front end stay."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_jsonl import JsonlExporter
from inferscope_otlp.attributes import root_attributes
from inferscope_otlp.finished import EngineResource, Finished
from inferscope_prometheus.engine_counters import EngineCounters

from inferscope.fold.final_records import (
    CORE_NOT_OBSERVED,
    NOT_SEEN_BY_CORE,
    SEVERAL_CORES,
    WORKER_NOT_OBSERVED,
    FinalRequest,
)
from inferscope.fold.view import finished_row, snapshot
from inferscope.records import (
    CLOSED,
    FAILED,
    OFF,
    ON,
    OVER_BUDGET,
    UNSUPPORTED,
    ProbeHealth,
)
from tests.fold.scripts import MS, START_NS, Ring, Script

SECOND_NS = 10**9


def front_end_serves(script: Script, front: Ring, name: str = "a", *, from_ms: float = 1) -> None:
    """Report a request of three tokens, 40 ms from arrival to end, at the front end."""
    script.at(from_ms)
    asked = front.received(name)
    front.tokenised(asked)
    for number in range(3):
        script.at(from_ms + 20 + 10 * number)
        front.emitted([asked])
    front.last_byte(asked)


def with_a_token() -> tuple[Script, tuple[Ring, int], tuple[Ring, int]]:
    """Report a request until its first token; return its ring and index at core and front end."""
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    script.at(1)
    asked, mine = front.received("a"), core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=2, end_ms=12)
    front.emitted([asked])
    return script, (core, mine), (front, asked)


def row_of(final: FinalRequest) -> dict[str, Any]:
    out = io.BytesIO()
    JsonlExporter(out).on_request(final)
    return dict(json.loads(out.getvalue()))


def test_without_a_core_ring_a_request_has_no_ledger_and_the_front_ends_times() -> None:
    script = Script()
    front_end_serves(script, script.ring("frontend"))
    collector, finals = script.play(until_ms=900)
    final = finals.only()
    assert (final.ledger_ns, final.ttft_ledger_ns, final.blame) == ({}, {}, ())
    assert final.ledger_missing == CORE_NOT_OBSERVED
    assert not final.joined_late
    assert final.first_token_ns == START_NS + 21 * MS
    assert final.delivered_ns - final.arrived_ns == 40 * MS
    row = row_of(final)
    assert row["ledger_ns"] is row["ttft_ledger_ns"] is row["cached_tokens"] is None
    assert row["ledger_missing"] == "core not observed"
    assert row["compute_ns"] == {"prefill": None, "decode": None}
    assert set(row["by_phase"]["decode"].values()) == {None}
    assert row["tbt_ns"] == [10 * MS, 10 * MS]
    (view,) = snapshot(collector, window_ns=SECOND_NS, mode="live").engines
    assert view.ledger_missing == CORE_NOT_OBSERVED
    assert view.ledger_ns == {}
    assert view.ttft.num == view.e2e.num == 1


@pytest.mark.parametrize("state", [OFF, FAILED, OVER_BUDGET, UNSUPPORTED])
@pytest.mark.parametrize("is_closed_after", [False, True])
def test_a_core_with_a_probe_that_is_off_is_not_observed(state: int, is_closed_after: bool) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    core.keyframe(state=state)
    script.at(1)
    if is_closed_after and state == UNSUPPORTED:
        core.keyframe(state=CLOSED)
    front_end_serves(script, front)
    _, finals = script.play(until_ms=900)
    assert finals.only().ledger_missing == CORE_NOT_OBSERVED


def test_a_request_that_the_core_reported_keeps_its_ledger_whatever_becomes_of_the_core() -> None:
    script, (core, mine), (front, asked) = with_a_token()
    core.finished(mine, "length")
    script.at(13)
    core.keyframe(state=FAILED)
    front.last_byte(asked)
    _, finals = script.play(until_ms=900)
    final = finals.only()
    assert not final.ledger_missing
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


@pytest.mark.parametrize("state", [OFF, FAILED, OVER_BUDGET, UNSUPPORTED])
@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("writes_on", [False, True])
def test_a_request_of_a_core_that_is_observed_no_more_ends_with_its_last_byte(
    state: int, is_running: bool, writes_on: bool
) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    script.at(1)
    asked, mine = front.received("a"), core.queued("a")
    alone = core.queued("of no front end")
    if is_running:
        core.admitted(mine)
        core.step(0, [(mine, 8, 0), (alone, 8, 0)], start_ms=2, end_ms=12)
    script.at(13)
    core.health(state=state)
    for number in range(8):
        script.at(20 + 40 * number)
        front.emitted([asked])
    front.last_byte(asked)
    for second in range(1, 9):
        script.at(1000 * second)
        front.health()
        if writes_on:
            core.keyframe(state=state)
    collector, finals = script.play(until_ms=15_000)
    final = finals.only()
    assert (final.finish, final.joined_late, final.ledger_ns) == ("stop", True, {})
    assert final.ledger_missing == CORE_NOT_OBSERVED
    assert final.delivered_ns - final.arrived_ns == 299 * MS
    assert final.first_token_ns == START_NS + 20 * MS
    assert not collector.engines["engine"].lives.table.alive()


@pytest.mark.parametrize("state", [FAILED, OVER_BUDGET])
def test_a_probe_that_failed_at_the_front_end_loses_no_engine(state: int) -> None:
    script = Script()
    front = script.ring("frontend")
    script.at(1)
    front.received("a")
    script.at(2)
    front.health(state=state)
    collector, finals = script.play(until_ms=15_000)
    assert not finals.requests
    assert not collector.engines["engine"].lives.table.alive()


@pytest.mark.parametrize("state", [OFF, FAILED, OVER_BUDGET, UNSUPPORTED])
def test_requests_of_a_core_that_closes_unobserved_are_not_lost(state: int) -> None:
    script = Script()
    core = script.ring()
    script.at(1)
    core.queued("a")
    script.at(2)
    core.keyframe(state=state)
    script.at(3)
    core.health(state=CLOSED)
    collector, finals = script.play(until_ms=900)
    assert not finals.requests
    assert not collector.engines["engine"].lives.table.alive()


def test_a_core_that_is_switched_on_again_records_its_requests_further() -> None:
    script, (core, mine), (front, asked) = with_a_token()
    script.at(20)
    core.keyframe(state=OFF)
    script.at(800)
    front.emitted([asked])
    core.keyframe(state=ON)
    core.step(9, [(mine, 1, 9)], start_ms=810, end_ms=820)
    front.emitted([asked])
    core.finished(mine, "length")
    script.at(821)
    front.last_byte(asked)
    collector, finals = script.play(until_ms=1500)
    final = finals.only()
    assert (final.finish, final.joined_late, final.ledger_missing) == ("length", True, "")
    assert final.output_tokens == 3
    assert collector.engines["engine"].lives.num_dropped == 0


def test_a_core_that_is_observed_and_has_no_record_of_a_request_leaves_it_joined_late() -> None:
    script = Script()
    script.ring()
    front_end_serves(script, script.ring("frontend"))
    _, finals = script.play(until_ms=900)
    final = finals.only()
    assert final.joined_late
    assert final.ledger_missing == NOT_SEEN_BY_CORE


@pytest.mark.parametrize("end", ["last byte", "stop", "rejected"])
def test_a_request_that_an_observed_core_never_reports_has_no_ledger(end: str) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    script.at(1)
    asked, other = front.received("a"), core.queued("another")
    front.tokenised(asked)
    if end in ("last byte", "stop"):
        script.at(20)
        front.emitted([asked])
    script.at(30)
    core.finished(other, "stop")
    if end in ("stop", "rejected"):
        front.finished(asked, end)
    front.last_byte(asked)
    _, finals = script.play(until_ms=900)
    final = next(final for final in finals.requests if final.request_id == "a")
    assert final.finish == ("stop" if end == "last byte" else end)
    assert (final.ledger_ns, final.ttft_ledger_ns, final.blame) == ({}, {}, ())
    assert final.ledger_missing == NOT_SEEN_BY_CORE


def test_a_request_that_ends_before_it_is_sent_to_the_core_was_at_the_front_end() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    core.health()
    script.at(1)
    asked = front.received("a")
    script.at(5)
    front.finished(asked, "rejected")
    front.last_byte(asked)
    _, finals = script.play(until_ms=900)
    assert finals.only().ledger_ns == {"frontend": 4 * MS}


def test_a_request_in_flight_shows_no_cause_either_until_a_core_reports_it() -> None:
    script = Script()
    front = script.ring("frontend")
    script.at(1)
    front.received("a")
    script.at(50)
    front.health()
    collector, _ = script.play(until_ms=600)
    (view,) = snapshot(collector, window_ns=SECOND_NS, mode="live").engines
    (row,) = view.requests
    assert (row.ledger_ns, row.interference_share) == ({}, None)
    assert row.ledger_missing == CORE_NOT_OBSERVED
    lives = collector.engines["engine"].lives
    assert lives.ledger_of(lives.table.alive()[0], collector.now_ns) == {}


def test_what_is_unsupported_is_in_the_view_once() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    for ring in (core, front):
        report = ProbeHealth(
            script.now_ns, ON, 0, 0, 0, script.now_ns, unsupported=("pauses: gone",)
        )
        ring.write(report)
    collector, _ = script.play(until_ms=300)
    (view,) = snapshot(collector, window_ns=SECOND_NS, mode="live").engines
    assert view.health.unsupported == ("pauses: gone",)


STATES = st.sampled_from([ON, OFF, FAILED, OVER_BUDGET, UNSUPPORTED, None])


@given(before=STATES, after=STATES, is_reported=st.booleans())
def test_no_ledger_is_all_front_end_unless_the_core_was_there_to_report(
    before: int | None, after: int | None, is_reported: bool
) -> None:
    script = Script()
    core = None if before is None else script.ring()
    front = script.ring("frontend")
    if core is not None:
        core.keyframe(state=before or ON)
    script.at(1)
    if core is not None and is_reported and before == ON:
        mine = core.queued("a")
        core.finished(mine, "stop")
    if core is not None and after is not None:
        core.keyframe(state=after)
    front_end_serves(script, front, from_ms=2)
    _, finals = script.play(until_ms=900)
    for final in finals.requests:
        if set(final.ledger_ns) == {"frontend"}:
            assert final.joined_late
            assert core is not None
            assert (before if after is None else after) == ON
        elif not final.ledger_ns:
            assert final.ledger_missing


def test_exporters_report_no_cause_and_count_no_wait_of_such_a_request() -> None:
    script = Script()
    front_end_serves(script, script.ring("frontend"))
    _, finals = script.play(until_ms=900)
    final = finals.only()
    numbers = EngineCounters()
    numbers.on_request(final)
    counts = numbers.by_replica[0]
    assert sum(counts.cause_ns.values()) == 0
    assert sum(counts.histograms["request_queue_seconds"].counts) == 0
    assert sum(counts.histograms["request_duration_seconds"].counts) == 1
    finished = Finished(final, None, None, None, {})
    attributes = root_attributes(finished, EngineResource("engine"), "text_completion", None)
    assert attributes["inferscope.ledger_missing"] == "core not observed"
    assert not [name for name in attributes if name.startswith("inferscope.ledger.")]
    assert "inferscope.gpu_seconds" not in attributes


def test_a_row_of_such_a_request_has_unknowns_in_place_of_zeros() -> None:
    script = Script()
    front_end_serves(script, script.ring("frontend"))
    _, finals = script.play(until_ms=900)
    row = finished_row(finals.only())
    assert (row.cached_tokens, row.interference_share, row.ledger_ns) == (None, None, {})


def test_steps_of_a_core_that_cannot_be_observed_are_of_no_request_and_not_unjoined() -> None:
    script = Script()
    core, worker = script.ring(), script.ring("worker")
    core.keyframe(state=UNSUPPORTED)
    front = script.ring("frontend")
    for step in range(4):
        script.at(12 + 10 * step)
        worker.span(step, 2 + 10 * step, 12 + 10 * step)
        worker.health()
    front_end_serves(script, front, from_ms=52)
    collector, finals = script.play(until_ms=9_000)
    assert len(finals.steps) == 4
    assert all(step.unattributed_ns == step.measured_ns for step in finals.steps)
    assert collector.engines["engine"].num_unjoined == 0
    assert finals.only().ledger_missing == CORE_NOT_OBSERVED


def core_serves(script: Script, core: Ring, name: str = "a", *, from_ms: float = 1) -> None:
    """Report a request of two steps at the core, without their execution."""
    script.at(from_ms)
    mine = core.queued(name)
    core.admitted(mine)
    for step in range(2):
        number = round(from_ms) + step
        core.plan(number)
        script.at(from_ms + 10 * (step + 1))
        core.slices(number, [(mine, 1 if step else 8, 8 * step)])
        core.emitted([mine])
    core.finished(mine, "length")


@pytest.mark.parametrize("state", [None, ON, OFF, FAILED, OVER_BUDGET, UNSUPPORTED])
def test_without_the_times_of_its_steps_a_request_has_no_ledger(state: int | None) -> None:
    script = Script()
    core = script.ring()
    workers = [] if state is None else [script.ring("worker", rank) for rank in range(2)]
    for worker in workers:
        worker.keyframe(state=state or ON)
    core_serves(script, core)
    for ms in range(100, 3000, 100):
        script.at(ms)
        core.health()
        for worker in workers:
            worker.health(state=state or ON)
    collector, finals = script.play(until_ms=3000)
    final = finals.only()
    assert (final.ledger_ns, final.ledger_missing) == ({}, WORKER_NOT_OBSERVED)
    assert (final.finish, final.output_tokens, final.joined_late) == ("length", 2, False)
    row = row_of(final)
    assert row["ledger_ns"] is None
    assert row["ledger_missing"] == "worker not observed"
    (view,) = snapshot(collector, window_ns=SECOND_NS, mode="live").engines
    assert view.ledger_missing == WORKER_NOT_OBSERVED


def test_one_worker_that_reports_is_enough_for_a_ledger() -> None:
    script = Script()
    core, worker, other = script.ring(), script.ring("worker"), script.ring("worker", 1)
    other.keyframe(state=UNSUPPORTED)
    script.at(1)
    mine = core.queued("a")
    core.admitted(mine)
    script.at(12)
    worker.span(0, 2, 12)
    core.slices(0, [(mine, 8, 0)])
    core.emitted([mine])
    core.finished(mine, "length")
    _, finals = script.play(until_ms=1000)
    assert not finals.only().ledger_missing
    assert finals.only().ledger_ns["prefill_own"] == 10 * MS


def test_an_engine_that_is_started_again_with_workers_has_ledgers_again() -> None:
    script = Script()
    old = script.ring()
    core_serves(script, old)
    for ms in range(100, 1000, 100):
        script.at(ms)
        old.health()
    old.keyframe(state=CLOSED)
    script.at(1000)
    core = script.ring()
    script.ring("worker")
    script.at(1300)
    core.finished(core.queued("b"), "rejected")
    core.health()
    _, finals = script.play(until_ms=1500)
    assert [(final.request_id, final.ledger_missing) for final in finals.requests] == [
        ("a", WORKER_NOT_OBSERVED),
        ("b", ""),
    ]


def test_two_processes_that_report_as_one_core_leave_no_ledgers() -> None:
    script = Script()
    cores = [script.ring(), script.ring()]
    for number, core in enumerate(cores):
        mine = core.queued(f"at once {number}")
        core.admitted(mine)
        core.step(0, [(mine, 8, 0)], start_ms=1 + 30 * number, end_ms=21 + 30 * number)
        core.finished(mine)
    collector, finals = script.play(until_ms=900)
    assert {final.ledger_missing for final in finals.requests} == {SEVERAL_CORES}
    (view,) = snapshot(collector, window_ns=SECOND_NS, mode="live").engines
    assert view.ledger_missing == SEVERAL_CORES


def test_a_core_that_follows_another_has_ledgers() -> None:
    script = Script()
    first = script.ring()
    mine = first.queued("before")
    first.admitted(mine)
    first.step(0, [(mine, 8, 0)], start_ms=1, end_ms=21)
    first.finished(mine)
    script.at(30)
    first.keyframe(state=CLOSED)
    script.at(40)
    second = script.ring()
    mine = second.queued("after")
    second.admitted(mine)
    second.step(0, [(mine, 8, 0)], start_ms=50, end_ms=70)
    second.finished(mine)
    _, finals = script.play(until_ms=900)
    assert [final.ledger_missing for final in finals.requests] == ["", ""]
