"""Ranks that hang, each in a different way, and ranks that are only slow."""

from __future__ import annotations

import pytest

from inferscope.fold.view import snapshot
from tests.fold.scripts import MS, START_NS, Ring, Script

LONG_MS = 20_000


class Pair:
    """Core that plans, and two workers that have executed a step of one request."""

    def __init__(self) -> None:
        self.script = Script()
        self.core = self.script.ring()
        self.workers = [self.script.ring("worker", rank, ranks=2) for rank in (0, 1)]
        self.request = self.core.queued("r")
        self.core.admitted(self.request)
        self.core.plan(0)
        self.script.at(10)
        for worker in self.workers:
            worker.span(0, 0, 10)
        self.core.slices(0, [(self.request, 8, 0)])

    def step(self) -> None:
        """Plan the next step."""
        self.script.at(20)
        self.core.plan(1)

    def live(self, *reports: tuple[Ring, float | None], until_ms: float = LONG_MS) -> None:
        """Report ten times a second from each process: the start of its running step, or none."""
        for ms in range(100, int(until_ms), 100):
            self.script.at(ms)
            for ring, since_ms in reports:
                through_ns = None if since_ms is None else START_NS + round(since_ms * MS)
                ring.health(through_ns=through_ns)

    def overdue_s(self) -> dict[int, float]:
        """Return how long the others wait for each rank, in seconds."""
        collector, _ = self.script.play(until_ms=LONG_MS)
        (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
        return {each.rank: each.overdue_ns / 1e9 for each in view.ranks}


def test_stopped_rank_is_overdue() -> None:
    pair = Pair()
    pair.step()
    pair.workers[0].span(1, 21, 30)
    pair.live((pair.core, None), (pair.workers[0], None))
    assert pair.overdue_s() == {0: 0, 1: pytest.approx(20, abs=0.1)}


def test_a_rank_that_does_not_end_the_step_that_another_has_ended_is_waited_for() -> None:
    pair = Pair()
    pair.step()
    pair.script.at(30)
    pair.workers[0].span(1, 21, 30)
    pair.live((pair.core, None), (pair.workers[0], None), (pair.workers[1], 21))
    assert pair.overdue_s() == {0: 0, 1: pytest.approx(20, abs=0.1)}


def test_a_rank_that_does_not_begin_the_step_that_another_is_in_is_waited_for() -> None:
    pair = Pair()
    pair.step()
    pair.live((pair.core, None), (pair.workers[0], 21), (pair.workers[1], None))
    assert pair.overdue_s() == {0: 0, 1: pytest.approx(20, abs=0.1)}


def test_no_rank_is_overdue_in_a_long_step() -> None:
    pair = Pair()
    pair.step()
    pair.live((pair.core, None), (pair.workers[0], 21), (pair.workers[1], 25))
    assert pair.overdue_s() == {0: 0, 1: 0}


def test_a_stage_of_a_pipeline_is_not_late_because_the_one_before_it_is_through() -> None:
    pair = Pair()
    pair.script.at(15)
    pair.workers[1].keyframe(ranks=1, stage=1)
    pair.step()
    pair.script.at(30)
    pair.workers[0].span(1, 21, 30)
    pair.live((pair.core, None), (pair.workers[0], None), (pair.workers[1], 31))
    assert pair.overdue_s() == {}


def test_ranks_without_work_may_be_silent() -> None:
    pair = Pair()
    pair.core.finished(pair.request)
    pair.live((pair.core, None))
    pair.workers[0].health()
    assert pair.overdue_s() == {0: 0, 1: 0}


def test_a_single_rank_is_never_overdue() -> None:
    script = Script()
    core = script.ring()
    core.admitted(core.queued("r"))
    core.plan(0)
    collector, _ = script.play(until_ms=4000)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    assert view.ranks == ()


def restarted(*, is_second_killed: bool) -> dict[int, float]:
    """Kill four ranks, restart with two under the same ID, and run a request on these."""
    script = Script()
    script.ring()
    for rank in range(4):
        script.ring("worker", rank, ranks=4).span(0, 0, 10)
    script.at(30_000)
    core = script.ring()
    workers = [script.ring("worker", rank, ranks=2) for rank in (0, 1)]
    request = core.queued("r")
    core.admitted(request)
    core.plan(0)
    script.at(30_010)
    for worker in workers:
        worker.span(0, 30_000, 30_010)
    core.slices(0, [(request, 8, 0)])
    rings = [core, workers[0], *([] if is_second_killed else workers[1:])]
    for ms in range(30_100, 50_000, 100):
        script.at(ms)
        for ring in rings:
            ring.health()
    collector, _ = script.play(until_ms=50_000)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    return {each.rank: each.overdue_ns / 1e9 for each in view.ranks}


def test_ranks_of_a_larger_previous_run_are_not_overdue() -> None:
    assert restarted(is_second_killed=False) == {0: 0, 1: 0}


def test_a_rank_killed_in_the_run_that_followed_a_larger_one_is_waited_for() -> None:
    assert restarted(is_second_killed=True) == {0: 0, 1: pytest.approx(20, abs=0.1)}


def test_a_rank_killed_before_a_replica_was_added_is_waited_for() -> None:
    pair = Pair()
    pair.step()
    live = ((pair.core, None), (pair.workers[0], None))
    pair.live(*live, until_ms=5_000)
    added = pair.script.ring("core", 1)
    for ms in range(5_100, LONG_MS, 100):
        pair.script.at(ms)
        for ring in (pair.core, pair.workers[0], added):
            ring.health()
    assert pair.overdue_s() == {0: 0, 1: pytest.approx(20, abs=0.1)}
