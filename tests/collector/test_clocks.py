"""A device's clock drifts, its anchors err and come late; the mapping stays within its bound."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from inferscope.collector.clocks import DeviceClock

S = 1_000_000_000
HOST_NS = 5_000 * S
"""The host's time at the device's offset 0."""


def host_at(device_ns: int, drift: float) -> int:
    return HOST_NS + device_ns + round(device_ns * drift)


@given(
    drift=st.floats(-2e-4, 2e-4),
    error_ns=st.integers(0, 20_000),
    num=st.integers(2, 100),
    seed=st.integers(0, 1 << 30),
)
def test_a_drifting_clock_is_mapped_within_the_error_that_is_told(
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
    clock.anchor(8 * S, HOST_NS + 9 * S, 1000)  # a second off: no clock drifts so
    clock.anchor(9 * S, HOST_NS + S, 1000)
    clock.anchor(6 * S, HOST_NS + 6 * S + 1, 1000)  # told again, not quite the same
    assert clock.host_ns(7 * S) == before


def test_a_wrong_beginning_is_given_up_when_all_that_follows_contradicts_it() -> None:
    clock = DeviceClock()
    clock.anchor(0, HOST_NS + 3600 * S, 1000)
    for at in range(1, 6):
        clock.anchor(2 * S * at, HOST_NS + 2 * S * at, 1000)
    assert clock.host_ns(9 * S) == HOST_NS + 9 * S


def test_two_anchors_close_together_do_not_make_the_slope() -> None:
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
