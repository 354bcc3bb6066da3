"""Delay rows of steps that run through the stages of a pipeline."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from inferscope.cost.book import CostBook
from inferscope.cost.fit import features
from inferscope.cost.step_table import StepTable
from inferscope.fold.final_records import FinalStep
from tests.fold.scripts import MS, Finals, Ring, Script, assert_all_closes

STAGE_MS = 4.0
NUM_STEPS = 200
NUM_REQUESTS = 4


def rows_of(finals: Finals) -> Counter[str]:
    """Return the nanoseconds of all requests by cause."""
    rows: Counter[str] = Counter()
    for final in finals.requests:
        rows.update(final.ledger_ns)
    return rows


def played(num_stages: int, *, slow_from: int = NUM_STEPS, num_batches: int = 1) -> Finals:
    """Fold steps of a pipeline whose last stage takes twice as long from a step on.

    With several batches in flight, a step starts as soon as the first stage is free and its batch's
    previous step has ended.
    """
    script = Script()
    core = script.ring()
    stages = [script.ring("worker", rank) for rank in range(num_stages)]
    for stage, ring in enumerate(stages):
        ring.keyframe(stage=stage)
    mine = [core.queued(f"r{n}") for n in range(NUM_REQUESTS)]
    script.at(1)
    for index in mine:
        core.admitted(index)
    script.at(1.5)
    free_ms = [2.0] * num_stages
    ended_ms = [2.0] * num_batches
    steps = []
    for step in range(NUM_STEPS):
        batch = step % num_batches
        start_ms = at_ms = max(free_ms[0], ended_ms[batch])
        spans = []
        for stage in range(num_stages):
            at_ms = max(at_ms, free_ms[stage])
            is_slow = step >= slow_from and stage == num_stages - 1
            end_ms = at_ms + STAGE_MS * (2 if is_slow else 1)
            spans.append((at_ms, end_ms))
            free_ms[stage] = at_ms = end_ms
        ended_ms[batch] = at_ms
        size = NUM_REQUESTS // num_batches
        steps.append(
            (start_ms, spans, mine[batch * size : (batch + 1) * size], step // num_batches)
        )
    # A worker reports a step at its end; the core plans a step when it starts.
    order: list[tuple[float, int, int, Ring]] = []
    for step, (start_ms, spans, _, _) in enumerate(steps):
        order.append((start_ms, 0, step, core))
        order += [(end_ms, 1, step, stages[at]) for at, (_, end_ms) in enumerate(spans)]
    for at_ms, kind, step, ring in sorted(order, key=lambda entry: entry[:3]):
        script.at(at_ms)
        _, spans, members, turn = steps[step]
        if kind == 0:
            core.plan(step)
            core.slices(
                step, [(index, 1 if turn else 8, 7 + turn if turn else 0) for index in members]
            )
            continue
        ring.span(step, *spans[stages.index(ring)])
        if ring is stages[-1]:
            core.emitted(members)
    for index in mine:
        core.finished(index)
    collector, finals = script.play(until_ms=at_ms + 2_000)
    assert_all_closes(collector, finals)
    assert len(finals.steps) == NUM_STEPS * num_stages
    return finals


@pytest.mark.thorough
@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_healthy_pipeline_has_no_slowdown(num_stages: int, num_batches: int) -> None:
    finals = played(num_stages, num_batches=num_batches)
    rows = rows_of(finals)
    assert rows["slowdown"] < 0.02 * sum(rows.values())
    assert rows["rank_wait"] < 0.02 * sum(rows.values())
    residuals = [abs(step.model_residual) for step in finals.steps[-100:]]
    assert max(residuals) < 0.05


@pytest.mark.thorough
@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_excess_of_one_slow_stage_is_slowdown_or_rank_wait(
    num_stages: int, num_batches: int
) -> None:
    """With two batches in two stages, each also waits for the slow stage to end the other's."""
    finals = played(num_stages, slow_from=100, num_batches=num_batches)
    healthy_ns = round(STAGE_MS * num_stages * 1e6)
    excess_ns = 0
    spans: dict[int, list[FinalStep]] = {}
    for step in finals.steps:
        spans.setdefault(step.step, []).append(step)
    for ranks in spans.values():
        delay_ns = max(rank.end_ns for rank in ranks) - min(rank.start_ns for rank in ranks)
        excess_ns += (delay_ns - healthy_ns) * len(ranks[0].request_ids)
    rows = rows_of(finals)
    assert rows["slowdown"] + rows["rank_wait"] == pytest.approx(excess_ns, rel=0.1)


def test_slow_stage_is_not_learned_as_healthy() -> None:
    """One of four stages takes twice as long, the step 1.25 times, for two refreshes of the fit."""
    mode = CostBook().mode("eager")
    batch = StepTable.of(np.array([1]), np.array([50]), np.array([1]))
    for step in range(1_500):
        last_ns = 2_000_000 if step >= 300 else 1_000_000
        stages_ns = [1_000_000, 1_000_000, 1_000_000, last_ns]
        modelled_ns = mode.model.steps_ns(batch).item()
        measured_ns = sum(stages_ns)
        mode.observe(
            features(batch),
            measured_ns=np.array([measured_ns]),
            modelled_ns=np.array([modelled_ns]),
            stages_ns=[stages_ns],
        )
    assert mode.healthy_ratio == pytest.approx(1.0, abs=0.05)
    assert mode.residual == pytest.approx(0.25, abs=0.05)


def test_a_step_that_no_rank_reported_is_no_time_in_which_a_request_was_left_out() -> None:
    script = Script()
    core = script.ring()
    first, last = (script.ring("worker", rank) for rank in range(2))
    for number, stage in enumerate((first, last)):
        stage.keyframe(stage=number)
    batches = [core.queued(name) for name in ("mine", "other")]
    for index in batches:
        core.admitted(index)
    lost = 2
    events = []
    for step in range(6):  # they alternate: each is planned once its last step has ended
        start_ms = 1 + 10 * step
        events += [(start_ms + 0.2, "plan", step), (start_ms + 10, "first", step)]
        events += [(start_ms + 19.9, "last", step)]
    for at_ms, what, step in sorted(events):
        script.at(at_ms)
        index, start_ms = batches[step % 2], 1 + 10 * step
        if what == "plan":
            core.plan(step)
            core.slices(step, [(index, 1, 7 + step // 2) if step > 1 else (index, 8, 0)])
        elif what == "first" and step != lost:
            first.span(step, start_ms + 0.3, start_ms + 10)
        elif what == "last":
            if step != lost:
                last.span(step, start_ms + 10, start_ms + 19.9)
            core.emitted([index])
    for index in batches:
        core.finished(index)
    collector, finals = script.play(until_ms=1_500)
    assert_all_closes(collector, finals)
    [final] = [final for final in finals.requests if final.request_id == "mine"]
    assert final.is_partial
    assert final.ledger_ns["not_scheduled"] < 1 * MS  # its gaps while the other is computed
    assert final.ledger_ns["cpu_gap"] > 19 * MS
