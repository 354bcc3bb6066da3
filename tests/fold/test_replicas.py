"""Data-parallel replicas of one engine: a request waits for its own replica only."""

from __future__ import annotations

import pytest

from inferscope.fold.final_records import FinalRequest
from tests.fold.scripts import MS, Finals, Ring, Script, assert_all_closes


def two_replicas(script: Script) -> tuple[Ring, Ring]:
    first, second = script.ring(), script.ring(rank=1)
    second.keyframe(dp_rank=1)
    return first, second


def run(
    script: Script,
    core: Ring,
    step: int,
    rows: list[tuple[int, int, int]],
    *,
    start_ms: float,
    end_ms: float,
) -> None:
    """Report a step at its end: its records arrive while other rings are written."""
    script.at(end_ms)
    core.span(step, start_ms, end_ms)
    core.slices(step, rows)
    core.emitted([row[0] for row in rows])


def of(finals: Finals, request_id: str) -> FinalRequest:
    [final] = [one for one in finals.requests if one.request_id == request_id]
    return final


@pytest.mark.parametrize("other_start_ms", [1, 3])
def test_a_request_waits_for_no_replica_but_its_own(other_start_ms: int) -> None:
    script = Script()
    first, second = two_replicas(script)
    a, b = first.queued("a"), second.queued("b")
    first.admitted(a)
    second.admitted(b)
    script.at(10)
    victim = first.queued("victim")
    run(script, first, 0, [(a, 8, 0)], start_ms=2, end_ms=50)
    run(script, second, 0, [(b, 8, 0)], start_ms=other_start_ms, end_ms=90)
    first.finished(a)
    second.finished(b)
    script.at(91)
    first.admitted(victim)
    run(script, first, 1, [(victim, 8, 0)], start_ms=92, end_ms=100)
    first.finished(victim)
    collector, finals = script.play(until_ms=500)
    assert_all_closes(collector, finals)
    final = of(finals, "victim")
    assert final.ledger_ns["queue"] == 40 * MS
    assert final.ledger_ns["queue_idle"] == 41 * MS
    assert [(one.request_id, one.ns) for one in final.blame] == [("a", 40 * MS)]


def test_between_the_steps_of_its_replica_a_request_is_not_left_out_of_anothers() -> None:
    script = Script()
    first, second = two_replicas(script)
    a, b = first.queued("a"), second.queued("b")
    first.admitted(a)
    second.admitted(b)
    run(script, first, 0, [(a, 8, 0)], start_ms=2, end_ms=10)
    run(script, first, 1, [(a, 1, 8)], start_ms=30, end_ms=40)
    first.finished(a)
    run(script, second, 0, [(b, 8, 0)], start_ms=1, end_ms=60)
    second.finished(b)
    collector, finals = script.play(until_ms=500)
    assert_all_closes(collector, finals)
    assert of(finals, "a").ledger_ns["cpu_gap"] == 22 * MS
    assert "not_scheduled" not in of(finals, "a").ledger_ns


def test_a_request_tokenised_during_a_step_blames_the_replica_that_takes_it_in() -> None:
    script = Script()
    first, second = two_replicas(script)
    front_end = script.ring("frontend")
    a, b = first.queued("a"), second.queued("b")
    first.admitted(a)
    second.admitted(b)
    script.at(10)
    seen = front_end.received("victim")
    front_end.tokenised(seen)
    run(script, first, 0, [(a, 8, 0)], start_ms=1, end_ms=70)
    run(script, second, 0, [(b, 8, 0)], start_ms=2, end_ms=80)
    script.at(81)
    victim = second.queued("victim")
    second.admitted(victim)
    run(script, second, 1, [(victim, 8, 0)], start_ms=82, end_ms=90)
    second.finished(victim)
    front_end.emitted([seen])
    front_end.last_byte(seen)
    first.finished(a)
    second.finished(b)
    collector, finals = script.play(until_ms=500)
    assert_all_closes(collector, finals)
    final = of(finals, "victim")
    assert final.ledger_ns["queue"] == 70 * MS
    assert [(one.request_id, one.ns) for one in final.blame] == [("b", 70 * MS)]
