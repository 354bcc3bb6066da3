"""Queue time of requests that arrive during a step, whenever their arrival is written.

An engine's loop accepts requests between two steps. So a request that arrives while a step runs is
written after that step's slices and span, with an `at_ns` inside it, or without one.
"""

from __future__ import annotations

import random

import pytest

from inferscope.fold.final_records import FinalRequest
from inferscope.records import TOKENISED, RequestEvent
from tests.fold.scripts import MS, START_NS, Finals, Ring, Script, assert_all_closes
from tests.fold.test_cuts import assert_cuts_do_not_show


def blamed_ns(final: FinalRequest, cause: str) -> dict[str | None, int]:
    return {one.request_id: one.ns for one in final.blame if one.cause == cause}


def serve_after(script: Script, core: Ring, victim: int, *, others: list[int]) -> None:
    """Admit the victim to a step of 10 ms that starts at 103 ms, and end all requests."""
    script.at(103)
    core.plan(1)
    core.admitted(victim)
    script.at(113)
    core.span(1, 103, 113)
    core.slices(1, [*((index, 1, 400) for index in others), (victim, 8, 0)])
    core.emitted([*others, victim])
    script.at(114)
    for index in (*others, victim):
        core.finished(index)


def tokenised_during_a_step() -> tuple[Script, Ring, Ring, tuple[int, int]]:
    """Tokenise the victim at 30 ms in a step that began at 2 ms; return both requests' indices."""
    script = Script()
    core, front_end = script.ring(), script.ring("frontend")
    big = core.queued("big")
    core.admitted(big)
    script.at(2)
    core.plan(0)
    script.at(28)
    seen = front_end.received("victim")
    script.at(30)
    front_end.tokenised(seen)
    return script, core, front_end, (big, seen)


def only(finals: Finals, request_id: str) -> FinalRequest:
    [final] = [one for one in finals.requests if one.request_id == request_id]
    return final


def test_all_members_of_the_step_at_arrival_are_blamed_though_it_is_written_later() -> None:
    script = Script()
    core = script.ring()
    big, small = core.queued("big"), core.queued("small")
    for index in (big, small):
        core.admitted(index)
    core.step(0, [(big, 400, 0), (small, 1, 5)], start_ms=2, end_ms=102)
    script.at(102.5)
    victim = core.queued("victim", at_ms=30)
    serve_after(script, core, victim, others=[big, small])
    collector, finals = script.play(until_ms=400)
    assert_all_closes(collector, finals)
    final = only(finals, "victim")
    assert final.ledger_ns["queue"] == 72 * MS
    assert final.ledger_ns["queue_idle"] == 1 * MS
    shares_ns = blamed_ns(final, "queue")
    assert set(shares_ns) == {"big", "small"}
    assert sum(shares_ns.values()) == 72 * MS
    assert shares_ns["big"] > shares_ns["small"] > 0


@pytest.mark.parametrize("queued_ms", [102.5, 30.5])
def test_a_tokenised_request_waits_in_the_queue(queued_ms: float) -> None:
    # Real cores read their inbox between two steps, and write QUEUED with the time of that.
    script, core, front_end, (big, seen) = tokenised_during_a_step()
    script.at(102)
    core.span(0, 2, 102)
    core.slices(0, [(big, 400, 0)])
    core.emitted([big])
    script.at(102.5)
    victim = core.queued("victim", at_ms=queued_ms)
    serve_after(script, core, victim, others=[big])
    front_end.emitted([seen], at_ns=START_NS + 114 * MS)
    script.at(115)
    front_end.last_byte(seen)
    collector, finals = script.play(until_ms=400)
    assert_all_closes(collector, finals)
    final = only(finals, "victim")
    assert final.ledger_ns["frontend"] == 2 * MS
    assert final.ledger_ns["queue"] == 72 * MS
    assert blamed_ns(final, "queue") == {"big": 72 * MS}
    assert final.queued_ns == START_NS + 30 * MS


def test_a_front_end_that_reports_after_the_core_leaves_the_queue_its_time() -> None:
    script = Script()
    core, front_end = script.ring(), script.ring("frontend")
    big = core.queued("big")
    core.admitted(big)
    core.step(0, [(big, 400, 0)], start_ms=2, end_ms=102)
    script.at(102.5)
    victim = core.queued("victim")
    script.at(102.7)
    seen = front_end.received("victim", at_ms=28)
    tokenised = RequestEvent(script.now_ns, seen, TOKENISED, START_NS + 30 * MS, prompt_tokens=8)
    front_end.write(tokenised)
    serve_after(script, core, victim, others=[big])
    front_end.emitted([seen], at_ns=START_NS + 114 * MS)
    script.at(115)
    front_end.last_byte(seen)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=400), random.Random(0))
    assert_all_closes(collector, finals)
    final = only(finals, "victim")
    assert (final.arrived_ns, final.queued_ns) == (START_NS + 28 * MS, START_NS + 30 * MS)
    assert (final.ledger_ns["frontend"], final.ledger_ns["queue"]) == (2 * MS, 72 * MS)
    assert blamed_ns(final, "queue") == {"big": 72 * MS}


def test_a_request_in_the_queue_of_a_step_that_still_runs_is_shown_as_waiting() -> None:
    script, _, front_end, _ = tokenised_during_a_step()
    script.at(60)
    front_end.health()
    collector, _ = script.play(until_ms=70)
    engine = collector.engines["engine"]
    request = engine.lives.table.by_id["victim"]
    states = engine.lives.table.ledger.state.copy()
    for slot, state in engine.states().items():
        states[slot] = state
    assert states[request.slot] == 2  # WAITING: the screen counts it as queued


def test_a_step_is_swept_when_the_engine_falls_idle_after_it() -> None:
    script = Script()
    core = script.ring()
    big = core.queued("big")
    core.admitted(big)
    core.step(0, [(big, 400, 0)], start_ms=2, end_ms=102)
    core.finished(big)
    collector, finals = script.play(until_ms=402)
    assert_all_closes(collector, finals)
    assert only(finals, "big").ledger_ns["prefill_own"] > 0


def test_the_last_step_of_a_recording_is_swept_at_its_end() -> None:
    script = Script()
    core = script.ring()
    big = core.queued("big")
    core.admitted(big)
    core.step(0, [(big, 400, 0)], start_ms=2, end_ms=102)
    core.finished(big)
    core.health()
    collector, finals = script.play()
    assert not finals.requests
    collector.end()
    assert [request.request_id for request in finals.requests] == ["big"]
