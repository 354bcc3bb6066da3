"""Present state in a view."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from inferscope.fold.snapshots import EngineView
from inferscope.fold.view import snapshot
from inferscope.readers import open_source
from inferscope.records import ON, QUEUED, ProbeHealth, Record, StepPlan
from tests.fold.scripts import Script


def view_of(script: Script, *, until_ms: float) -> EngineView:
    collector, _ = script.play(until_ms=until_ms)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    return view


def test_queued_prompt_tokens_are_those_not_computed() -> None:
    script = Script()
    core = script.ring()
    first = core.enter(QUEUED, "first", prompt_tokens=100)
    core.admitted(first)
    script.at(1)
    core.enter(QUEUED, "second", prompt_tokens=40)
    core.enter(QUEUED, "third", prompt_tokens=5)
    assert view_of(script, until_ms=1.5).queued_prompt_tokens == 45
    script.at(2)
    core.step(0, [(first, 100, 0)], start_ms=2, end_ms=9)
    script.at(10)
    core.preempted(first)
    # A preempted request computes its prompt again.
    assert view_of(script, until_ms=300).queued_prompt_tokens == 145


def test_an_unknown_length_makes_the_sum_unknown() -> None:
    script = Script()
    core = script.ring()
    core.enter(QUEUED, "first", prompt_tokens=100)
    core.enter(QUEUED, "second", prompt_tokens=None)
    assert view_of(script, until_ms=300).queued_prompt_tokens is None


def test_before_its_prompt_is_tokenised_a_request_counts_for_nothing() -> None:
    script = Script()
    front = script.ring("frontend")
    front.received("first")
    assert view_of(script, until_ms=300).queued_prompt_tokens == 0


def test_request_admitted_to_a_hung_step_is_running_and_the_fold_continues() -> None:
    script = Script()
    core = script.ring()
    index = core.queued("first")
    script.at(1)
    core.plan(0)
    script.at(2)
    core.admitted(index)
    before = view_of(script, until_ms=300)
    for ms in range(100, 20_000, 100):
        script.at(ms)
        core.health(through_ns=script.now_ns - (ms - 1) * 10**6)
    view = view_of(script, until_ms=20_000)
    assert (view.num_running, view.num_waiting) == (1, 0)
    assert view.folded_ns - before.folded_ns > 19 * 10**9
    assert view.through_ns == before.through_ns  # the state of the device is unknown


def test_what_a_probe_does_behind_the_device_is_a_part_of_its_share() -> None:
    script = Script()
    core, older = script.ring(), script.ring("worker")
    for second in range(1, 8):
        script.at(1000 * second)
        cost_ns = 9_000_000 * second
        core.write(
            ProbeHealth(
                script.now_ns, ON, 0, 0, cost_ns, script.now_ns, hidden_ns=6_000_000 * second
            )
        )
        older.write(ProbeHealth(script.now_ns, ON, 0, 0, 1_000_000 * second, script.now_ns))
    health = view_of(script, until_ms=7500).health
    assert health.probe_share is not None
    assert health.probe_hidden_share is not None
    assert round(health.probe_share, 3) in (0.009, 0.01)  # the newest second may not be whole
    assert round(health.probe_hidden_share / health.probe_share, 3) == 0.6


SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"


@pytest.mark.thorough
def test_the_history_by_second_is_that_of_the_recorded_plans() -> None:
    last: dict[int, StepPlan] = {}
    num_plans, waiting = Counter[int](), Counter[tuple[str, int]]()

    def listen(_: int, record: Record) -> None:
        if isinstance(record, StepPlan):
            second = record.t_ns // 10**9
            last[second] = record
            num_plans[second] += 1
            waiting[record.binding, second] += record.waiting

    source = open_source(SAMPLE, listen=listen)
    source.advance()
    (view,) = source.snapshot(320 * 10**9).engines
    source.close()
    series, newest = view.series, view.folded_ns // 10**9
    seconds = range(newest - len(series.running) + 1, newest + 1)
    planned = [at for at, second in enumerate(seconds) if second in last]
    assert len(planned) == len(last) > 10
    for at in planned:
        plan, second = last[seconds[at]], seconds[at]
        assert series.blocks_used[at] == plan.blocks_used
        assert series.blocks_cached[at] == plan.blocks_cached
        assert series.blocks_total[at] == plan.blocks_total
        for binding, means in series.waiting_by.items():
            mean = waiting[binding, second] / num_plans[second]
            assert means[at] == pytest.approx(mean)
    assert {binding for binding, _ in waiting} <= set(series.waiting_by)
    unplanned = set(range(len(series.running))) - set(planned)
    assert all(means[at] is None for means in series.waiting_by.values() for at in unplanned)
    assert sum(series.preempted) == view.num_preemptions > 0
    rows = [row for row in view.requests if not row.joined_late]
    assert sum(series.cached_tokens) == sum(row.cached_tokens or 0 for row in rows) > 0
