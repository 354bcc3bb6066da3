"""A rank that is slower than those beside it, through the fold, as a finding and as a metric."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from inferscope_prometheus.cost_allocation import CostAllocation
from inferscope_prometheus.engine_counters import EngineCounters, ReplicaCounters
from inferscope_prometheus.tenants import Tenants

from inferscope.fold.fold import Collector
from inferscope.insight.findings import RunSummarizer
from inferscope.insight.findings.ranks import slow_rank
from inferscope.insight.findings.run_summary import RunSummary
from tests.fold.scripts import Finals, Script

NUM_STEPS = 30


def ran(
    took_ms: Sequence[float], *, ranks: int | None = None
) -> tuple[RunSummary, ReplicaCounters]:
    """Return a run with these step times of its ranks, and its Prometheus counters."""
    script = Script()
    num_tensor = ranks or len(took_ms)
    core = script.ring(ranks=num_tensor)
    workers = [script.ring("worker", rank, ranks=num_tensor) for rank in range(len(took_ms))]
    mine = core.queued("a")
    script.at(1)
    core.admitted(mine)
    for number in range(NUM_STEPS):
        begins_ms = 2 + 40 * number
        script.at(begins_ms)
        core.plan(number)
        core.slices(number, [(mine, 8 if not number else 1, 0 if not number else 7 + number)])
        for worker, ms in sorted(zip(workers, took_ms, strict=True), key=lambda one: one[1]):
            script.at(begins_ms + ms)
            worker.span(number, begins_ms, begins_ms + ms)
        core.emitted([mine])
    script.at(2 + 40 * NUM_STEPS)
    core.finished(mine)
    watch, finals, numbers = (
        RunSummarizer(),
        Finals(),
        EngineCounters(CostAllocation(Tenants(most=3))),
    )
    collector = Collector(watch, finals)
    for item in script.items(until_ms=3000 + 40 * NUM_STEPS):
        collector.fold(item.ring, item.record)
        watch.on_record(item.ring, item.record)
    assert len(finals.steps) == NUM_STEPS * len(took_ms)
    for step in finals.steps:
        numbers.on_step(step)
    return watch.runs["engine"], numbers.by_replica[0]


def test_a_rank_that_is_slower_by_a_fifth_is_named() -> None:
    run, counts = ran([10, 12])
    found = slow_rank(run)
    assert found is not None
    assert found.title == "Rank 1 is slow, and the others wait for it"
    evidence = {number.name: number.value for number in found.evidence}
    assert (evidence["rank"], evidence["dp_rank"]) == (1, 0)
    assert evidence["step_mean_ns"] == pytest.approx(12e6)
    assert evidence["step_mean_of_others_ns"] == pytest.approx(10e6)
    assert found.lost_share == pytest.approx(run.requests.share_of_life("rank_wait"))
    assert found.lost_share > 0
    assert "20% more" in found.sentences[0]
    assert counts.rank_ns == {0: 10_000_000 * NUM_STEPS, 1: 12_000_000 * NUM_STEPS}


@pytest.mark.parametrize("took_ms", [[10, 10.5], [10], [10, 10, 10.9, 10]])
def test_ranks_that_are_alike_are_no_finding(took_ms: list[float]) -> None:
    assert slow_rank(ran(took_ms)[0]) is None


def test_stages_of_a_pipeline_are_not_compared() -> None:
    assert slow_rank(ran([10, 10, 13, 13], ranks=2)[0]) is None
    found = slow_rank(ran([10, 10, 13, 16], ranks=2)[0])
    assert found is not None
    assert found.title.startswith("Rank 3 ")
