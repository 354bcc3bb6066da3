from __future__ import annotations

import random

import numpy as np
import pytest

from inferscope.attribution.blame_shares import BlameShare
from inferscope.fold.fold import READER
from inferscope.fold.slots import SlotMap
from inferscope.fold.view import snapshot
from inferscope.records import (
    CLOSED,
    FAILED,
    FINISHED,
    OFF,
    ON,
    WAITING,
    Clock,
    Keyframe,
    RequestEvent,
    Tick,
)
from tests.fold.scripts import MS, START_NS, Ring, Script, assert_all_closes
from tests.fold.test_cuts import assert_cuts_do_not_show


def serve(
    core: Ring, index: int, *, from_ms: float, num_tokens: int = 3, first_step: int = 0
) -> float:
    """Serve one request alone, one step every 10 ms; return the time of its last token."""
    core.script.at(from_ms)
    core.admitted(index)
    for n in range(num_tokens):
        rows = [(index, 1, 8 + n)] if n else [(index, 8, 0)]
        start_ms = from_ms + 1 + 10 * n
        core.step(first_step + n, rows, start_ms=start_ms, end_ms=start_ms + 9)
    return from_ms + 10 * num_tokens


def test_a_request_seen_from_both_edges_closes_at_the_front_end() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    script.at(2)
    mine = core.queued("a")
    script.at(5)
    core.admitted(mine)
    for n in range(3):
        core.step(
            n, [(mine, 1, 8 + n) if n else (mine, 8, 0)], start_ms=6 + 10 * n, end_ms=15 + 10 * n
        )
        script.at(15.5 + 10 * n)
        front.emitted([asked])
    script.at(35.2)
    core.finished(mine)
    script.at(37)
    front.last_byte(asked)
    collector, finals = script.play(until_ms=300)
    final = finals.only()
    assert (final.arrived_at, final.delivered_at, final.finish) == ("http", "http", "stop")
    assert final.first_token_ns == START_NS + 15.5 * MS
    assert final.delivered_ns == START_NS + 37 * MS
    assert final.ttft_ledger_ns["frontend"] == 2 * MS
    assert final.ttft_ledger_ns["output"] == 0.5 * MS
    assert_all_closes(collector, finals)


def test_the_adapter_is_the_engines_word_before_a_headers() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    for name, header, adapter in (("a", "asked", "loaded"), ("b", "asked", ""), ("c", "", "")):
        attributes = {"adapter": header} if header else None
        asked = front.received(name, attributes=attributes)
        mine = core.queued(name, adapter=adapter)
        serve(core, mine, from_ms=100 * len(script.entries))
        core.finished(mine)
        front.last_byte(asked)
    _, finals = script.play(until_ms=10_000_000)
    adapters = {request.request_id: request.adapter for request in finals.requests}
    assert adapters == {"a": "loaded", "b": "asked", "c": ""}


def test_preemptions_keep_their_times_and_the_last_may_never_end() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=5)
    for since_ms, until_ms in ((10, 20), (30, None)):
        script.at(since_ms)
        core.preempted(mine)
        if until_ms is not None:
            script.at(until_ms)
            core.resumed(mine)
    script.at(40)
    core.finished(mine, "client_cancel")
    collector, finals = script.play(until_ms=300)
    final = finals.only()
    assert final.preempted_ns == (
        (START_NS + 10 * MS, START_NS + 20 * MS),
        (START_NS + 30 * MS, final.delivered_ns),
    )
    assert len(final.preempted_ns) == final.num_preemptions
    spent_ns = sum(until_ns - since_ns for since_ns, until_ns in final.preempted_ns)
    assert final.ledger_ns["preempted"] == spent_ns
    assert_all_closes(collector, finals)


def test_request_counts_from_receipt_when_the_front_end_reports_after_the_core() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    script.at(2)
    mine = core.queued("a")
    core.health()
    script.at(4)
    core.health()
    asked = front.received("a", at_ms=1)
    serve(core, mine, from_ms=5, num_tokens=1)
    front.emitted([asked])
    core.finished(mine)
    script.at(20)
    front.last_byte(asked)
    core.health()
    collector, finals = script.play_in_report_order()
    final = finals.only()
    assert final.arrived_ns == START_NS + MS
    assert final.ledger_ns["frontend"] == MS
    assert not final.joined_late
    assert (final.arrived_at, final.delivered_at, final.output_tokens) == ("http", "http", 1)
    assert_all_closes(collector, finals)


def test_tokens_are_not_counted_twice_when_the_front_end_is_met_after_the_first() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    mine = core.queued("a")
    serve(core, mine, from_ms=1, num_tokens=2)
    core.health()
    asked = front.received("a", at_ms=0)
    front.emitted([asked])
    front.emitted([asked])
    core.finished(mine)
    front.last_byte(asked)
    core.health()
    collector, finals = script.play_in_report_order()
    assert finals.only().output_tokens == 2
    assert_all_closes(collector, finals)


def test_requests_in_flight_are_lost_exactly_once_when_the_process_dies() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = [front.received(str(n)) for n in range(5)]
    mine = [core.queued(str(n)) for n in range(4)]
    assert len(asked) == 5
    serve(core, mine[0], from_ms=1)
    script.at(40)
    core.plan(7)
    collector, finals = script.play(until_ms=9_000)
    assert sorted(final.request_id for final in finals.requests) == list("01234")
    assert {final.finish for final in finals.requests} == {"engine_lost"}
    assert all(final.ledger_ns["engine_lost"] > 4_000 * MS for final in finals.requests)
    assert not collector.engines["engine"].lives.table.alive()
    assert_all_closes(collector, finals)


def test_a_ring_that_shuts_down_ends_its_requests_at_once() -> None:
    script = Script()
    core = script.ring()
    core.queued("a")
    script.at(10)
    core.health(state=CLOSED)
    _, finals = script.play(until_ms=400)
    assert finals.only().finish == "engine_lost"


NUM_STEPS, PERIOD_MS, RUN_MS = 30, 20, 19
"""Steps of a core that writes no record after them: number, period and duration."""


def run_to_the_end(core: Ring, *, at_replica: int = 0) -> None:
    """Run a request in many steps; one is queued, one preempted, one in no step."""
    script, names = core.script, ("runs", "preempted", "admitted")
    runs, preempted, admitted = (core.queued(f"{name} {at_replica}") for name in names)
    core.queued(f"queued {at_replica}")
    for index in (runs, preempted, admitted):
        core.admitted(index)
    script.at(0.5)
    core.preempted(preempted)
    for step in range(NUM_STEPS):
        start_ms = 1 + PERIOD_MS * step
        rows = [(runs, 1, 7 + step) if step else (runs, 8, 0)]
        core.step(step, rows, start_ms=start_ms, end_ms=start_ms + RUN_MS)


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_request_waited_for_before_its_engine_was_lost_keeps_its_cause(
    is_closed: bool,
) -> None:
    script = Script()
    core = script.ring()
    run_to_the_end(core)
    if is_closed:
        core.health(state=CLOSED)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=9_000), random.Random(0))
    assert_all_closes(collector, finals)
    assert {final.finish for final in finals.requests} == {"engine_lost"}
    assert len({final.ledger_ns.get("engine_lost", 0) for final in finals.requests}) == 1
    rows = {final.request_id[:-2]: dict(final.ledger_ns) for final in finals.requests}
    for name, row in rows.items():
        lost_ns = row.pop("engine_lost", 0)
        assert (lost_ns > 5_000 * MS) is not is_closed, name
        assert sum(row.values()) == NUM_STEPS * PERIOD_MS * MS, name
    busy_ns, idle_ns = NUM_STEPS * RUN_MS * MS, NUM_STEPS * MS
    held_ns = round((NUM_STEPS * PERIOD_MS - 0.5) * MS)
    assert rows["queued"] == {"queue": busy_ns, "queue_idle": idle_ns}
    assert rows["preempted"] == {"preempted": held_ns, "cpu_gap": round(0.5 * MS)}
    assert rows["admitted"] == {"not_scheduled": busy_ns, "cpu_gap": idle_ns}
    blame = {final.request_id: final.blame for final in finals.requests}
    assert blame["queued 0"] == (BlameShare("queue", "runs 0", busy_ns),)


def test_of_two_replicas_the_wait_for_the_lost_one_keeps_its_cause() -> None:
    script = Script()
    lost, other = script.ring(rank=0), script.ring(rank=1)
    other.keyframe(dp_rank=1)
    run_to_the_end(lost)
    for ms in range(1_000, 9_000, 500):
        script.at(ms)
        other.health()
    collector, finals = script.play()
    assert_all_closes(collector, finals)
    [row] = [final.ledger_ns for final in finals.requests if final.request_id == "queued 0"]
    assert (row["queue"], row["queue_idle"]) == (NUM_STEPS * RUN_MS * MS, NUM_STEPS * MS)


def test_a_prompt_that_was_tokenised_when_all_were_lost_was_at_the_front_end() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    front.received("a")
    for ms in range(0, 3_001, 500):
        script.at(ms)
        core.health()
        front.health()
    collector, finals = script.play(until_ms=12_000)
    assert_all_closes(collector, finals)
    row = finals.only().ledger_ns
    assert row["frontend"] == 3_000 * MS
    assert set(row) == {"frontend", "engine_lost"}


def test_a_step_that_its_process_did_not_survive_is_lost_with_it() -> None:
    script = Script()
    core = script.ring()
    run_to_the_end(core)
    begun_ms = NUM_STEPS * PERIOD_MS + 1
    script.at(begun_ms)
    core.plan(NUM_STEPS)
    core.slices(NUM_STEPS, [(0, 1, 8)])
    script.at(3_000)
    core.health(through_ns=START_NS + begun_ms * MS)
    collector, finals = script.play(until_ms=12_000)
    assert_all_closes(collector, finals)
    for final in finals.requests:
        before_ns = sum(final.ledger_ns.values()) - final.ledger_ns["engine_lost"]
        assert before_ns == begun_ms * MS


def test_a_token_left_at_its_records_time_not_when_that_was_written() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    mine = core.queued("a")
    core.admitted(mine)
    for n in range(2):
        core.step(n, [(mine, 1, 8) if n else (mine, 8, 0)], start_ms=1 + 9 * n, end_ms=9 + 9 * n)
        script.at(12 + 9 * n)  # the first one after the next step has begun
        front.emitted([asked], at_ns=START_NS + (9 + 9 * n) * MS + 1)
    core.finished(mine)
    front.last_byte(asked)
    collector, finals = script.play(until_ms=300)
    final = finals.only()
    assert final.first_token_ns == START_NS + 9 * MS + 1
    assert final.tbt_ns == [9 * MS]
    assert final.ttft_ledger_ns.get("output", 0) == 1
    assert_all_closes(collector, finals)


@pytest.mark.parametrize(
    ("end_s", "state", "reason", "finish"),
    [
        (7.1, None, "stop", "engine_lost"),
        (2.1, None, "length", "engine_lost"),  # before the crash was detected
        (7.1, None, "client_cancel", "client_cancel"),
        (7.1, FAILED, "stop", "stop"),  # the probe was lost, the front end was not
    ],
)
def test_core_continues_after_its_front_end_is_lost_and_the_request_is_undelivered(
    end_s: float, state: int | None, reason: str, finish: str
) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    front.received("a")
    mine = core.queued("a")
    serve(core, mine, from_ms=1)
    if state is not None:
        front.health(state=state)
    for second in range(1, 9):
        script.at(1000 * second)
        core.health()
        if second == int(end_s):
            core.step(3, [(mine, 1, 11)], start_ms=1e3 * end_s, end_ms=1e3 * end_s + 10)
            core.finished(mine, reason)
    collector, finals = script.play(until_ms=8_500)
    final = finals.only()
    assert (final.finish, final.delivered_at) == (finish, "engine")
    assert_all_closes(collector, finals)


def test_the_front_end_does_not_keep_requests_of_a_dead_core() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    front.received("a")
    core.queued("a")
    for second in range(1, 8):
        script.at(1000 * second)
        front.health()
    collector, finals = script.play()
    assert finals.only().finish == "engine_lost"
    assert_all_closes(collector, finals)


def test_a_client_that_leaves_first_is_ended_by_the_engine() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    mine = core.queued("a")
    serve(core, mine, from_ms=1, num_tokens=1)
    front.emitted([asked])
    script.at(12)
    front.last_byte(asked)
    for second in range(1, 8):  # the front end reports nothing more of it, and is alive
        script.at(1000 * second)
        core.health()
    core.finished(mine, "client_cancel")
    collector, finals = script.play(until_ms=7_300)
    final = finals.only()
    assert (final.finish, final.delivered_at) == ("client_cancel", "engine")
    assert final.delivered_ns == START_NS + 7_000 * MS
    assert_all_closes(collector, finals)


def test_a_request_that_only_the_front_end_rejected_is_final() -> None:
    script = Script()
    script.ring()
    front = script.ring("frontend")
    asked = front.received("a")
    script.at(1)
    front.finished(asked, "rejected")
    front.last_byte(asked)
    collector, finals = script.play(until_ms=300)
    assert finals.only().finish == "rejected"
    assert finals.only().ledger_ns == {"frontend": MS}
    assert_all_closes(collector, finals)


@pytest.mark.parametrize("is_swept_between", [True, False])
def test_a_rejection_reported_by_both_counts_once(is_swept_between: bool) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    script.at(1)
    front.finished(asked, "rejected")
    front.last_byte(asked)
    if is_swept_between:
        script.at(2)
        core.health()
    script.at(3)
    mine = core.queued("a", at_ms=0.5)
    core.finished(mine, "rejected")
    collector, finals = script.play(until_ms=300)
    assert finals.only().finish == "rejected"
    assert not collector.engines["engine"].lives.table.alive()


def test_a_client_that_leaves_before_the_core_knows_it_is_final_and_its_echo_ignored() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    script.at(1)
    front.last_byte(asked)
    script.at(2)
    core.health()
    mine = core.queued("a", at_ms=0.5)
    script.at(3)
    core.finished(mine, "client_cancel")
    core.health()
    _, finals = script.play(until_ms=300)
    assert finals.only().finish == "client_cancel"


def test_an_id_used_again_is_another_request() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    for n in range(3):
        asked = front.received("same", external_id="twice")
        mine = core.queued("same")
        last_ms = serve(core, mine, from_ms=100 * n + 1, first_step=3 * n)
        front.emitted([asked])
        core.plan(3 * n + 3)  # holds the sweep back until the id has come again
        script.at(last_ms + 1)
        core.finished(mine)
        front.last_byte(asked)
    collector, finals = script.play(until_ms=9_000)
    assert [final.finish for final in finals.requests] == ["stop"] * 3
    assert [final.output_tokens for final in finals.requests] == [1, 1, 1]
    assert {final.external_id for final in finals.requests} == {"twice"}
    assert_all_closes(collector, finals)


def test_an_engine_started_again_under_its_name_does_not_inherit_requests() -> None:
    script = Script()
    old = script.ring()
    old.queued("request-1")
    script.at(1000)
    new = script.ring()
    mine = new.queued("request-1")
    serve(new, mine, from_ms=1001)
    new.finished(mine)
    collector, finals = script.play(until_ms=2000)
    assert sorted(final.finish for final in finals.requests) == ["engine_lost", "stop"]
    assert_all_closes(collector, finals)


def test_a_front_end_that_outlives_its_core_ends_no_request_twice() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("a")
    serve(core, core.queued("a"), from_ms=1)
    front.emitted([asked])
    for ms in range(1000, 10_000, 1000):
        script.at(ms)
        front.health()
    front.keyframe()  # its client still waits, and the request is listed
    front.emitted([asked])
    front.last_byte(asked)
    collector, finals = script.play(until_ms=20_000)
    assert finals.only().finish == "engine_lost"
    assert_all_closes(collector, finals)


def test_no_request_is_lost_to_a_process_that_starts_later() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = front.received("request-1")
    script.at(300)  # a Tick after the front end's first record, and before the core's
    mine = core.queued("request-1")
    serve(core, mine, from_ms=301)
    front.emitted([asked])
    core.finished(mine)
    front.last_byte(asked)
    script.at(1000)
    for role in ("core", "frontend"):
        script.ring(role)
    collector, finals = script.play(until_ms=2000)
    assert finals.only().finish == "stop"
    assert finals.only().delivered_at == "http"
    assert_all_closes(collector, finals)


def test_switching_the_probe_off_and_on_loses_no_request() -> None:
    script = Script()
    core = script.ring()
    stays, leaves = core.queued("stays"), core.queued("leaves")
    serve(core, stays, from_ms=1)
    core.keyframe(state=OFF)
    core.health(state=OFF)
    core.forget(leaves)
    script.at(20_000)
    core.keyframe(state=ON)
    core.health()
    core.step(9, [(stays, 1, 30)], start_ms=20_001, end_ms=20_010)
    core.finished(stays)
    collector, finals = script.play(until_ms=20_500)
    final = finals.only()
    assert (final.request_id, final.finish, final.joined_late) == ("stays", "stop", True)
    engine = collector.engines["engine"]
    assert not engine.lives.table.alive()
    assert engine.lives.num_dropped == 2  # switched off; "stays" was reported again
    assert_all_closes(collector, finals)


def test_an_engine_switched_off_is_still_alive() -> None:
    script = Script()
    core = script.ring()
    core.keyframe(state=OFF)
    core.health(state=OFF)
    collector, _ = script.play(until_ms=60_000)
    assert snapshot(collector, window_ns=10**9, mode="live").engines[0].is_alive


def test_requests_that_ended_in_a_gap_leave_no_slot_behind() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    asked = [front.received(str(n)) for n in range(3)]
    mine = [core.queued(str(n)) for n in range(3)]
    script.at(5)
    core.health()
    front.health()
    script.at(10)
    core.finished(mine[1])  # its last byte goes with the gap of the front end
    script.miss(front)
    front.forget(asked[1])
    script.at(20)
    front.keyframe()
    script.at(30)
    script.miss(core)
    core.forget(mine[2])
    core.keyframe()
    script.at(40)
    front.last_byte(asked[2])
    core.finished(mine[0])
    front.last_byte(asked[0])
    collector, finals = script.play(until_ms=500)
    assert sorted(final.request_id for final in finals.requests) == ["0", "1", "2"]
    assert all(final.joined_late for final in finals.requests)
    assert not collector.engines["engine"].lives.table.alive()


def test_late_reader_lists_current_requests_without_a_ttft() -> None:
    script = Script()
    script.at(100)
    core, front = script.ring(), script.ring("frontend")
    core._ids, core._next = {0: "a", 1: "b"}, 2
    front._ids, front._next = {0: "a", 1: "b"}, 2
    core.live([0])
    core.live([1], state=WAITING)
    front.live([0, 1])
    script.at(101)
    core.admitted(1)
    core.step(50, [(0, 1, 20), (1, 8, 0)], start_ms=102, end_ms=110)
    front.emitted([0, 1])
    script.at(111)
    for index in (0, 1):
        core.finished(index)
        front.last_byte(index)
    collector, finals = script.play(until_ms=500)
    by_id = {final.request_id: final for final in finals.requests}
    assert set(by_id) == {"a", "b"}
    assert all(final.joined_late for final in finals.requests)
    assert all(final.output_tokens == 1 for final in finals.requests)
    assert by_id["a"].first_token_ns is None
    assert by_id["b"].first_token_ns == START_NS + 110 * MS
    assert_all_closes(collector, finals)


def test_a_keyframe_in_several_records_drops_no_request() -> None:
    script = Script()
    core = script.ring()
    mine = [core.queued(str(n)) for n in range(4)]
    script.at(10)
    script.miss(core)
    core.write(Keyframe(core.now_ns, ON, -1))
    core.live(mine[:2])
    core.live(mine[2:])
    core.write(Clock(core.now_ns, core.now_ns))
    core.health()
    collector, _ = script.play(until_ms=400)
    assert len(collector.engines["engine"].lives.table.alive()) == 4


def test_a_request_that_its_engine_forgot_is_dropped_after_two_keyframes() -> None:
    script = Script()
    core = script.ring()
    forgotten = core.queued("a")
    core.forget(forgotten)
    script.at(10)
    core.keyframe()
    collector, _ = script.play(until_ms=300)
    assert len(collector.engines["engine"].lives.table.alive()) == 1
    script.at(400)
    core.keyframe()
    collector, finals = script.play(until_ms=900)
    assert not collector.engines["engine"].lives.table.alive()
    assert not finals.requests


def test_several_tokens_in_one_event_are_kept_as_such() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    serve(core, mine, from_ms=1, num_tokens=2)
    script.at(30)
    core.emitted([mine], [3])
    script.at(31)
    core.emitted([mine], [0])
    core.emitted([mine], [2])
    core.finished(mine)
    collector, finals = script.play(until_ms=300)
    final = finals.only()
    assert final.tokens_per_event == (1, 1, 3, 2)
    assert final.output_tokens == 7
    assert len(final.tbt_ns) == 3
    assert_all_closes(collector, finals)


def test_two_engines_with_the_same_ids_do_not_mix() -> None:
    script = Script()
    cores = [script.ring(engine_id=name) for name in ("one", "two")]
    for core in cores:
        script.at(0)
        mine = core.queued("a")
        serve(core, mine, from_ms=1)
        core.finished(mine)
    collector, finals = script.play(until_ms=300)
    assert [final.engine_id for final in finals.requests] == ["one", "two"]
    assert_all_closes(collector, finals)


@pytest.mark.thorough
def test_memory_stays_bounded_over_twenty_thousand_requests() -> None:
    script = Script()
    core = script.ring()
    core.queued("stays")
    for number in range(20_000):
        script.now_ns += MS // 10
        core.finished(core.queued(str(number)))
        if number % 50 == 49:
            core.health()
    collector, _ = script.play(until_ms=3_000)
    engine = collector.engines["engine"]
    table = engine.lives.table
    assert engine.lives.num_finished == 20_000
    assert len(table.alive()) == 1
    assert len(table.by_slot) <= 4096  # those of one window


def test_a_ring_that_numbers_requests_wildly_costs_no_memory() -> None:
    slots = SlotMap()
    indices = [0, 1 << 31, 3 << 30, 7, 1 << 20]
    for slot, index in enumerate(indices, 1):
        slots.put(index, slot)
    assert [slots.get(index) for index in indices] == [1, 2, 3, 4, 5]
    assert slots.slots(np.array(indices, dtype=np.uint32)).tolist() == [1, 2, 3, 4, 5]
    assert sorted(slots.known()) == sorted(indices)
    for index in indices:
        slots.drop(index)
    assert slots.known() == []


def test_an_end_that_the_core_reports_late_is_not_before_the_last_token() -> None:
    script = Script()
    core, front_end = script.ring(), script.ring("frontend")
    seen = front_end.received("a")
    front_end.tokenised(seen)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=11)
    core.step(1, [(mine, 1, 8)], start_ms=12, end_ms=22)
    script.at(23)
    front_end.emitted([seen])
    script.at(30)
    front_end.emitted([seen])
    script.at(31)
    front_end.last_byte(seen)
    script.at(700)
    script.entries.append((READER, Tick(script.now_ns, script.now_ns)))
    core.write(RequestEvent(script.now_ns, mine, FINISHED, START_NS + 25 * MS, reason="stop"))
    collector, finals = script.play_in_report_order()
    assert_all_closes(collector, finals)
    final = finals.only()
    assert final.last_token_ns == final.delivered_ns == START_NS + 30 * MS
