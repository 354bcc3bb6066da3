"""Slices reported at a step's dispatch, before its outputs are known."""

from __future__ import annotations

import pytest

from inferscope.fold.final_records import FinalRequest
from inferscope.fold.fold import Collector
from tests.fold.scripts import Finals, Ring, Script, assert_all_closes

Rows = list[tuple[int, int, int]]


def begun(script: Script, *, is_split: bool) -> tuple[Ring, Ring, Rows]:
    """Open an engine with two running requests, with or without a separate worker process."""
    core = script.ring()
    worker = script.ring("worker") if is_split else core
    script.at(1)
    both = [core.queued("a"), core.queued("b")]
    for index in both:
        core.admitted(index)
    core.step(0, [(index, 8, 0) for index in both], start_ms=2, end_ms=9)
    return core, worker, [(index, 1, 8) for index in both]


def facts(final: FinalRequest) -> tuple[object, ...]:
    return (
        final.request_id,
        final.finish,
        final.is_partial,
        final.ledger_ns,
        final.delivered_ns,
        list(final.token_times_ns),
    )


@pytest.mark.parametrize("is_split", [False, True])
def test_an_engine_killed_within_a_step_ends_as_if_it_had_not_reported_the_members(
    is_split: bool,
) -> None:
    found: list[tuple[Collector, Finals]] = []
    for is_early in (False, True):
        script = Script()
        core, worker, rows = begun(script, is_split=is_split)
        if is_split:
            script.at(9)
            worker.span(0, 2, 9)
        script.at(10)
        core.plan(1)
        if is_early:
            core.slices(1, rows)
        found.append(script.play(until_ms=30_000))
    (late, late_finals), (early, early_finals) = found
    assert [final.finish for final in late_finals.requests] == ["engine_lost"] * 2
    assert list(map(facts, early_finals.requests)) == list(map(facts, late_finals.requests))
    assert early.num_unjoined == late.num_unjoined == 0


def test_slices_of_an_earlier_step_may_come_behind_those_of_a_later_one() -> None:
    """Report the earlier step's slices with drafts, after its outputs; the later ones are plain."""
    script = Script()
    core, _, rows = begun(script, is_split=False)
    script.at(10)
    core.plan(1)
    script.at(12)
    core.plan(2)
    core.slices(2, [(index, 1, 9) for index, _, _ in rows])
    script.at(20)
    core.span(1, 10, 20)
    core.slices(1, rows)
    script.at(21)
    core.plan(3)
    core.slices(3, [(index, 1, 10) for index, _, _ in rows])
    script.at(30)
    core.span(2, 20, 30)
    script.at(31)
    core.plan(4)
    script.at(40)
    core.span(3, 30, 40)
    for index, _, _ in rows:
        core.finished(index)
    collector, finals = script.play(until_ms=2_000)
    assert_all_closes(collector, finals)
    assert collector.num_unjoined == 0
    assert {step.step: len(step.request_ids) for step in finals.steps} == dict.fromkeys(range(4), 2)


def test_a_step_without_slices_is_decided_by_one_planned_after_its_end() -> None:
    script = Script()
    core, _, rows = begun(script, is_split=False)
    script.at(10)
    core.plan(1)
    script.at(20)
    core.span(1, 10, 20)
    script.at(21)
    core.plan(2)
    core.slices(2, rows)
    collector, _ = script.play()
    assert collector.num_unjoined == 1
    assert [pending.step for pending in collector.engines["engine"].joins.pending()] == [2]


def test_a_step_without_outputs_is_counted_and_its_requests_are_partial() -> None:
    script = Script()
    core, _, rows = begun(script, is_split=False)
    script.at(10)
    core.plan(1)
    core.slices(1, rows)
    core.step(2, rows, start_ms=20, end_ms=29)
    for index, _, _ in rows:
        core.finished(index)
    collector, finals = script.play(until_ms=2_000)
    assert collector.num_unjoined == 1
    assert [final.is_partial for final in finals.requests] == [True, True]
    assert [step.step for step in finals.steps] == [0, 2]


def test_a_step_launched_ahead_of_a_long_one_is_awaited_until_its_turn() -> None:
    """Report complete records of the worker between two steps of 700 ms."""
    script = Script()
    core, worker, rows = begun(script, is_split=True)
    script.at(9)
    worker.span(0, 2, 9)
    for step, at_ms in ((1, 10), (2, 11), (3, 711)):  # each planned while the one before runs
        script.at(at_ms)
        core.plan(step)
        core.slices(step, [(index, 1, 7 + step) for index, _, _ in rows])
        if step > 1:
            script.at(at_ms + 699)
            worker.span(step - 1, at_ms - 1, at_ms + 699)
            script.at(at_ms + 699.5)
            worker.health()
            core.health()
    script.at(2110)
    worker.span(3, 1410, 2110)
    for index, _, _ in rows:
        core.finished(index)
    collector, finals = script.play(until_ms=4_000)
    assert_all_closes(collector, finals)
    assert collector.num_unjoined == 0
    assert {step.step: len(step.request_ids) for step in finals.steps} == dict.fromkeys(range(4), 2)
