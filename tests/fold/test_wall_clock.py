"""Samples stamped by CUPTI's wall clock, joined to the steps they were counted in or to none."""

from __future__ import annotations

from functools import cache

import pytest

from inferscope.fold.join.counter_shares import SM_ACTIVE
from inferscope.fold.view import snapshot
from inferscope.records import Clock, CounterSample
from tests.fold.scripts import MS, START_NS
from tests.fold.trains import Train, counters_of, shares
from tests.fold.walls import Wall

PREFILL_MS, DECODE_MS = 20.3, 6.4


def counted() -> Train:
    train = Train().alternate(until_ms=2500, prefill_ms=PREFILL_MS, decode_ms=DECODE_MS, gap_ms=1.1)
    return train.sample(0.5, "sm_active_share", (0.9, 0.35), source="pm")


@cache
def undisturbed_ns(lag_ms: int) -> float:
    """Return the time allocated to steps if the wall clock does not jump."""
    collector, _ = counted().stamp(Wall(), lag_ns=lag_ms * MS).play()
    return float(counters_of(collector).totals[:, SM_ACTIVE].sum())


def num_reported(train: Train) -> int:
    return sum(len(one.starts_ns) // 8 for one in train.stamped if isinstance(one, CounterSample))


def test_a_drifting_wall_clock_changes_no_figure() -> None:
    expected = shares(counted().play()[0])
    collector, _ = counted().stamp(Wall(2e-4), error_ns=2000).play()
    assert shares(collector) == pytest.approx(expected, rel=0.005)
    counters = counters_of(collector)
    assert counters.num_unplaced == 0
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0].counters
    assert view.num_unplaced == 0
    assert view.stamp_error_ns is not None
    assert 2000 <= view.stamp_error_ns < 30_000


@pytest.mark.thorough
@pytest.mark.parametrize("by_ms", [3_600_000, 5000, 60, 13, -13, -60, -5000, -3_600_000])
@pytest.mark.parametrize(("at_ns", "lag_ms"), [(1_042_000_000, 0), (1_079_250_001, 40)])
def test_about_a_jump_samples_join_the_right_steps_or_none(
    by_ms: int, at_ns: int, lag_ms: int
) -> None:
    jump = (START_NS + at_ns, by_ms * MS)
    train = counted()
    samples = train.samples
    train.stamp(Wall(0.0, [jump]), error_ns=1000, lag_ns=lag_ms * MS)
    collector, finals = train.play()
    assert shares(collector) == (pytest.approx(0.9, rel=0.01), pytest.approx(0.35, rel=0.05))
    num_clear = 0
    for final in finals.requests:
        begin_ms, end_ms = ((ns - START_NS) / MS for ns in (final.arrived_ns, final.delivered_ns))
        is_clear = begin_ms >= 300 and (end_ms <= 900 or begin_ms >= 1200)
        num_clear += is_clear
        if "sm_active_ns" not in final.counters.prefill:
            assert not is_clear
            continue
        prefill_ns, decode_ns = (
            phase["sm_active_ns"] for phase in (final.counters.prefill, final.counters.decode)
        )
        assert prefill_ns == pytest.approx(0.9 * PREFILL_MS * MS, rel=0.05)
        assert decode_ns == pytest.approx(0.35 * DECODE_MS * MS, rel=0.2)
    assert num_clear > 60
    counters = counters_of(collector)
    # From the last window decoded before the jump to the first anchor after it.
    assert counters.num_unplaced == pytest.approx((100 + lag_ms) / 0.5, abs=2)
    hole_ns = START_NS + (1000 - lag_ms) * MS, START_NS + 1100 * MS
    dropped_ns = sum(
        each.values["sm_active_share"] * (each.end_ns - each.start_ns)
        for each in samples
        if each.end_ns > hole_ns[0] and each.start_ns < hole_ns[1]
    )
    left_ns = undisturbed_ns(lag_ms) - dropped_ns
    assert counters.totals[:, SM_ACTIVE].sum() == pytest.approx(left_ns, abs=MS)
    assert counters.found.num_late == counters.found.num_doubled == 0
    view = snapshot(collector, window_ns=60_000 * MS, mode="ended").engines[0].counters
    assert view.num_unplaced == counters.num_unplaced


def test_without_anchors_nothing_is_joined_and_all_is_counted() -> None:
    train = counted().stamp(Wall())
    train.stamped = [one for one in train.stamped if not isinstance(one, Clock)]
    collector, finals = train.play()
    counters = counters_of(collector)
    assert not counters.totals.any()
    assert counters.num_unplaced == num_reported(train) > 4000
    assert counters.stamp_error_ns is None
    assert not any(final.counters.prefill for final in finals.requests)
