"""Partition of each request's ledger: the part up to its first token, and the part after it."""

from __future__ import annotations

import random

from inferscope.fold.final_records import FinalRequest
from tests.fold.scripts import MS, START_NS, Finals, Script, assert_all_closes
from tests.fold.test_cuts import assert_cuts_do_not_show


def of(finals: Finals, request_id: str) -> FinalRequest:
    [final] = [one for one in finals.requests if one.request_id == request_id]
    return final


def streamed(attributes: dict[str, str], *, edge_ms: float) -> FinalRequest:
    """Serve a request of three steps whose first token reaches its client during the second."""
    script = Script()
    core, front_end = script.ring(), script.ring("frontend")
    seen = front_end.received("a", attributes=attributes)
    front_end.tokenised(seen)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=11)
    core.step(1, [(mine, 1, 8)], start_ms=12, end_ms=22)
    core.step(2, [(mine, 1, 9)], start_ms=23, end_ms=33)
    core.finished(mine)
    script.at(40)
    front_end.emitted([seen], at_ns=START_NS + round(edge_ms * MS))
    front_end.emitted([seen], [2])
    front_end.last_byte(seen)
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    return of(finals, "a")


def test_a_first_token_on_its_way_is_output_and_cuts_the_step_that_runs_meanwhile() -> None:
    final = streamed({"stream": "true"}, edge_ms=15)
    assert final.ttft_ledger_ns["prefill_own"] == 10 * MS
    assert final.ttft_ledger_ns["output"] == 4 * MS
    assert not any(cause.startswith("decode") for cause in final.ttft_ledger_ns)
    decode_ns = sum(ns for cause, ns in final.ledger_ns.items() if cause.startswith("decode"))
    assert decode_ns == 17 * MS


def test_an_answer_in_one_piece_has_no_token_on_its_way() -> None:
    final = streamed({"stream": "false"}, edge_ms=40)
    decode_ns = sum(ns for cause, ns in final.ledger_ns.items() if cause.startswith("decode"))
    assert decode_ns == 20 * MS


def test_a_first_token_that_leaves_inside_the_next_step_was_on_its_way_before_it() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("mine", attributes={"stream": "false"})
    core.admitted(mine)
    script.at(1)
    core.plan(0)
    core.slices(0, [(mine, 8, 0)])
    script.at(10)
    core.span(0, 1, 10)
    script.at(10.5)
    core.plan(1)
    core.slices(1, [(mine, 1, 8)])
    script.at(14)
    core.emitted([mine])
    script.at(20)
    core.span(1, 13, 20)
    core.emitted([mine])
    script.at(20.5)
    core.finished(mine)
    collector, finals = assert_cuts_do_not_show(script.items(until_ms=1_000), random.Random(0))
    assert_all_closes(collector, finals)
    row = finals.only().ledger_ns
    assert (row["cpu_gap"], row["output"]) == (1 * MS, 3.5 * MS)


def test_a_step_without_an_execution_marks_its_requests_and_is_no_output() -> None:
    script = Script()
    core = script.ring()
    a, b = core.queued("a"), core.queued("b")
    core.admitted(a)
    core.step(0, [(a, 8, 0)], start_ms=1, end_ms=11)
    script.at(12)
    core.plan(1)
    core.slices(1, [(a, 1, 8)])  # its span is lost
    script.at(62)
    core.emitted([a])
    core.admitted(b)
    core.step(2, [(a, 1, 9), (b, 8, 0)], start_ms=63, end_ms=73)
    core.finished(a)
    core.finished(b)
    collector, finals = script.play(until_ms=400)
    assert_all_closes(collector, finals)
    final = of(finals, "a")
    assert final.is_partial
    assert not of(finals, "b").is_partial
    assert final.ledger_ns["cpu_gap"] == (1 + 1 + 50 + 1) * MS
    assert "output" not in final.ledger_ns


def test_two_rows_of_one_request_are_one_player() -> None:
    script = Script()
    core = script.ring()
    a, b = core.queued("a"), core.queued("b")
    for index in (a, b):
        core.admitted(index)
    core.step(0, [(a, 8, 0), (a, 1, 8), (b, 1, 9)], start_ms=1, end_ms=11)
    core.finished(a)
    core.finished(b)
    collector, finals = script.play(until_ms=300)
    assert_all_closes(collector, finals)
    for final in finals.requests:
        in_step = {c: ns for c, ns in final.ledger_ns.items() if c.startswith(("prefill", "dec"))}
        assert sum(in_step.values()) + final.ledger_ns.get("slowdown", 0) == 10 * MS
        assert all(one.request_id != final.request_id for one in final.blame)


def test_the_wait_for_a_slow_rank_takes_nothing_of_earlier_cold_steps() -> None:
    script = Script()
    core = script.ring()
    workers = [script.ring("worker", rank, ranks=2) for rank in range(2)]
    a = core.queued("a")
    core.admitted(a)
    start = 1
    for step, (ends, is_cold) in enumerate([((101, 101), True), ((121, 221), False)]):
        script.at(start)
        core.plan(step)
        for worker, end_ms in zip(workers, ends, strict=True):
            script.at(end_ms)
            worker.span(step, start, end_ms, cold=is_cold)
        core.slices(step, [(a, 1, 8 + step)])
        core.emitted([a])
        start = ends[1]
    core.finished(a)
    collector, finals = script.play(until_ms=600)
    assert_all_closes(collector, finals)
    assert of(finals, "a").ledger_ns["rank_wait"] == 100 * MS
