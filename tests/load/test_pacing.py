"""A schedule that slows down keeps a queue short on any machine, and does not starve it."""

from __future__ import annotations

import itertools
import statistics

import pytest

from inferscope.load.pacing import INTERVAL_S, Pacing, from_now_on
from inferscope.load.workload import Workload

RATE_S = 8.0


def waiting_over_time(capacity_s: list[float], *, seed: int = 1) -> tuple[list[int], int]:
    """Serve the demo's workload, four requests at a time, at a capacity for each second.

    Returns:
        how many requests wait at the end of each second, and how many were served.
    """
    pacing = Pacing()
    workload = Workload(seed, rate_s=RATE_S, pace=lambda: pacing.pace)
    asks = workload.asks()
    due, queue, served, owed = next(asks), 0, 0, 0.0
    seen = []
    for second, capacity in enumerate(capacity_s, 1):
        for tenth in range(10):
            while due.at_s <= second - 1 + tenth / 10:
                queue, due = queue + 1, next(asks)
            owed = min(owed + capacity / 10, 1.0 if not queue else 4.0)
            done = min(queue, int(owed))
            queue, owed, served = queue - done, owed - done, served + done
        seen.append(max(0, queue - 4))
        if second % INTERVAL_S == 0:
            pacing.observe(seen[-1])
    return seen, served


@pytest.mark.parametrize("capacity_s", [0.8, 2.0, 4.0, 7.0, 12.0])
def test_the_queue_is_stable_at_any_capacity_and_the_engine_is_used(capacity_s: float) -> None:
    runs = [waiting_over_time([capacity_s] * 120, seed=seed) for seed in range(1, 12)]
    later = [waiting[40:] for waiting, _ in runs]
    assert statistics.mean(map(statistics.mean, later)) < 6, later
    assert statistics.median(min(waiting[-40:]) for waiting in later) <= 2, "it never drains"
    assert all(served >= 0.55 * 120 * min(capacity_s, RATE_S) for _, served in runs)


def test_a_machine_that_becomes_busy_is_given_less_and_then_more_again() -> None:
    waiting, _ = waiting_over_time([12.0] * 30 + [2.0] * 60 + [12.0] * 60)
    assert max(waiting) < 40
    assert sum(waiting[60:90]) / 30 < 8
    assert sum(waiting[100:]) / 50 < 3


def test_the_pace_stays_within_its_bounds() -> None:
    pacing = Pacing(3.0)
    assert pacing.pace == 1.0
    for _ in range(100):
        pacing.observe(1000)
    assert 0 < pacing.pace < 0.1
    for _ in range(200):
        pacing.observe(0)
    assert pacing.pace == 1.0


def test_a_slower_pace_asks_the_same_later() -> None:
    usual = list(itertools.islice(Workload(3, rate_s=RATE_S).asks(), 200))
    slow = list(itertools.islice(Workload(3, rate_s=RATE_S, pace=lambda: 0.5).asks(), 200))
    assert [ask.prompt for ask in slow] == [ask.prompt for ask in usual]
    for one, other in zip(usual, slow, strict=True):
        assert other.at_s == pytest.approx(2 * one.at_s)


def test_a_pause_of_the_process_is_not_made_up_for() -> None:
    now_s = 100.0

    def clock_s() -> float:
        return now_s

    asks = from_now_on(Workload(3, rate_s=RATE_S).asks(), clock_s=clock_s)
    usual = list(itertools.islice(Workload(3, rate_s=RATE_S).asks(), 300))
    first = list(itertools.islice(asks, 100))
    assert first == usual[:100]
    now_s += first[-1].at_s + 30
    later = list(itertools.islice(asks, 200))
    assert later[0].at_s == pytest.approx(now_s - 100)
    for one, other in zip(later, usual[100:], strict=True):
        assert one.at_s - later[0].at_s == pytest.approx(other.at_s - usual[100].at_s)
