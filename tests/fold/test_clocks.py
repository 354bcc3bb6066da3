"""Error bounds of the mapping of a drifting device clock by inexact, late anchors."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from inferscope.fold.clocks import DeviceClock, WallClock

S = 1_000_000_000
HOST_NS = 5_000 * S
"""Host time at device offset 0."""


def host_at(device_ns: int, drift: float) -> int:
    return HOST_NS + device_ns + round(device_ns * drift)


@given(
    drift=st.floats(-2e-4, 2e-4),
    error_ns=st.integers(0, 20_000),
    num=st.integers(2, 100),
    seed=st.integers(0, 1 << 30),
)
def test_a_drifting_clock_is_mapped_within_the_reported_error(
    drift: float, error_ns: int, num: int, seed: int
) -> None:
    draw = random.Random(seed)
    clock = DeviceClock()
    for at in range(num):
        device_ns = 2 * S * at
        wrong_ns = draw.randint(-error_ns, error_ns)
        clock.anchor(device_ns, host_at(device_ns, drift) + wrong_ns, error_ns)
    last_ns = 2 * S * (num - 1)
    for _ in range(20):
        device_ns = draw.randint(max(0, last_ns - 60 * S), last_ns + 3 * S)
        mapped_ns, bound_ns = clock.host_ns(device_ns), clock.error_at_ns(device_ns)
        assert mapped_ns is not None
        assert bound_ns is not None
        assert abs(mapped_ns - host_at(device_ns, drift)) <= bound_ns + 3  # whole ns tilt the slope


@given(order=st.permutations(range(8)))
def test_anchors_that_come_late_change_nothing(order: list[int]) -> None:
    in_turn, late = DeviceClock(), DeviceClock()
    for clock, numbers in ((in_turn, range(8)), (late, order)):
        for at in numbers:
            clock.anchor(2 * S * at, host_at(2 * S * at, 3e-5) + 100 * (at % 3), 200)
    for device_ns in range(0, 16 * S, S // 3):
        assert late.host_ns(device_ns) == in_turn.host_ns(device_ns)
        assert late.error_at_ns(device_ns) == in_turn.error_at_ns(device_ns)


def test_an_anchor_that_contradicts_the_others_is_left_out() -> None:
    clock = DeviceClock()
    for at in range(4):
        clock.anchor(2 * S * at, HOST_NS + 2 * S * at, 1000)
    before = clock.host_ns(7 * S)
    clock.anchor(8 * S, HOST_NS + 9 * S, 1000)  # one second off: more than any clock drifts
    clock.anchor(9 * S, HOST_NS + S, 1000)
    clock.anchor(6 * S, HOST_NS + 6 * S + 1, 1000)  # repeated with a slightly different time
    assert clock.host_ns(7 * S) == before


def test_a_wrong_first_anchor_is_dropped_when_three_later_ones_contradict_it() -> None:
    clock = DeviceClock()
    clock.anchor(0, HOST_NS + 3600 * S, 1000)
    for at in range(1, 6):
        clock.anchor(2 * S * at, HOST_NS + 2 * S * at, 1000)
    assert clock.host_ns(9 * S) == HOST_NS + 9 * S


def test_two_adjacent_anchors_do_not_determine_the_slope() -> None:
    clock = DeviceClock()
    clock.anchor(0, HOST_NS, 5000)
    clock.anchor(2 * S, HOST_NS + 2 * S, 5000)
    clock.anchor(2 * S + 1_000_000, HOST_NS + 2 * S + 1_005_000, 5000)
    mapped_ns = clock.host_ns(4 * S)
    assert mapped_ns is not None
    assert abs(mapped_ns - HOST_NS - 4 * S) <= 20_000


def test_the_bound_grows_with_the_time_since_the_last_anchor() -> None:
    clock = DeviceClock()
    assert clock.error_at_ns(0) is None
    assert clock.host_ns(0) is None
    clock.anchor(0, HOST_NS, 1000)
    clock.anchor(2 * S, HOST_NS + 2 * S, 3000)
    assert clock.error_ns == 3000
    bounds = [clock.error_at_ns(at * S) or 0 for at in range(2, 8)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 3000 < bounds[-1]


@given(
    drift=st.floats(-5e-4, 5e-4),
    error_ns=st.integers(0, 20_000),
    num=st.integers(0, 70),
    seed=st.integers(0, 1 << 30),
)
def test_many_offsets_at_once_are_mapped_as_each_alone(
    drift: float, error_ns: int, num: int, seed: int
) -> None:
    draw = random.Random(seed)
    clock, last_ns = DeviceClock(), 1_700_000_000 * S
    for _ in range(num):
        last_ns += draw.randint(1, 3 * S)
        clock.anchor(last_ns, host_at(last_ns, drift) + draw.randint(0, error_ns), error_ns)
    offsets = [last_ns - draw.randint(-S, 3 * S * num + S) for _ in range(50)]
    found = clock.between(np.array(offsets, dtype=np.int64))
    columns = (column.tolist() for column in found)
    for offset_ns, host_ns, bound_ns, is_between in zip(offsets, *columns, strict=True):
        alone_ns, alone_error_ns = clock.host_ns(offset_ns), clock.error_at_ns(offset_ns)
        if is_between:
            assert alone_ns is not None
            assert alone_error_ns is not None
            assert abs(host_ns - alone_ns) <= 1
            assert bound_ns >= alone_error_ns
    if num >= 2:
        assert clock.between(np.array([clock.last_device_ns])).is_between.all()
        assert not clock.between(np.array([clock.last_device_ns + 1])).is_between.any()


@given(order=st.permutations(range(9)), jumps=st.tuples(*[st.integers(-9, 9)] * 2))
def test_a_wall_clock_that_was_set_is_the_same_in_whatever_order_anchors_come(
    order: list[int], jumps: tuple[int, int]
) -> None:
    assume(not jumps[0] or sum(jumps))  # set and set back: only anchors in order show it
    at_ns = [HOST_NS + S // 10 * number for number in range(9)]
    set_ns = [S // 9 * sum(jumps[: number // 3]) for number in range(9)]
    in_turn, late = WallClock(), WallClock()
    for clock, numbers in ((in_turn, range(9)), (late, order)):
        for number in numbers:
            clock.anchor(at_ns[number] + set_ns[number], at_ns[number], 100)
    assert in_turn.now is not None
    assert late.now is not None
    stamps = np.arange(at_ns[0] + set_ns[8], at_ns[8] + set_ns[8] + S, S // 50, dtype=np.int64)
    for one, other in zip(in_turn.now.between(stamps), late.now.between(stamps), strict=True):
        assert (one == other).all()


def test_the_current_clock_covers_the_interval_since_the_last_jump() -> None:
    wall = WallClock()
    assert wall.now is None
    for number in range(4):
        wall.anchor(7 * S + number * S, HOST_NS + number * S, 100)
    before = wall.now
    wall.anchor(2 * S + 4 * S, HOST_NS + 4 * S, 100)
    wall.anchor(2 * S + 5 * S, HOST_NS + 5 * S, 100)
    assert before is not None
    assert wall.now is not None
    assert wall.now is not before
    assert before.between(np.array([8 * S])).host_ns.tolist() == [HOST_NS + S]
    mapped = wall.now.between(np.array([6 * S, 7 * S, 8 * S]))
    assert mapped.is_between.tolist() == [True, True, False]
    assert mapped.host_ns.tolist()[:2] == [HOST_NS + 4 * S, HOST_NS + 5 * S]
