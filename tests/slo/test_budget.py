"""Budgets over a window that moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.slo import Objective
from inferscope.slo.budget import Budget

_DAY_NS = 86400 * 10**9
_NOW_NS = 1_700_000_000 * 10**9
OBJECTIVE = Objective("ttft", "ttft", 1_000_000_000, 0.99, 86400 * 10**9)


def test_nothing_spent_is_all_of_it_and_too_much_is_below_nothing() -> None:
    budget = Budget(OBJECTIVE)
    assert budget.remaining(_NOW_NS) == 1.0
    budget.add(_NOW_NS, good=99)
    assert budget.remaining(_NOW_NS) == 1.0
    budget.add(_NOW_NS, bad=1)
    assert budget.remaining(_NOW_NS) == pytest.approx(0.0)
    budget.add(_NOW_NS, bad=100)
    assert budget.remaining(_NOW_NS) == pytest.approx(1 - (101 / 200) / 0.01)


@given(
    st.lists(st.tuples(st.integers(0, 3 * _DAY_NS), st.booleans()), max_size=50),
    st.integers(0, 50),
)
def test_it_holds_what_is_in_the_window_also_over_a_restart(
    events: list[tuple[int, bool]], cut: int
) -> None:
    budget, after = Budget(OBJECTIVE), Budget(OBJECTIVE)
    for at_ns, is_good in events[:cut]:
        budget.add(_NOW_NS + at_ns, good=is_good, bad=not is_good)
    after.restore(budget.entries())
    for at_ns, is_good in events[cut:]:
        after.add(_NOW_NS + at_ns, good=is_good, bad=not is_good)
    end_ns = _NOW_NS + 3 * _DAY_NS
    piece_ns = _DAY_NS // 144
    surely = [event for event in events if event[0] > 2 * _DAY_NS + piece_ns]
    maybe = [event for event in events if event[0] > 2 * _DAY_NS - piece_ns]
    for which in (True, False):
        num = after.counts(end_ns)[0 if which else 1]
        assert sum(is_good is which for _, is_good in surely) <= num
        assert num <= sum(is_good is which for _, is_good in maybe)


def test_what_is_kept_does_not_grow_with_time() -> None:
    budget = Budget(OBJECTIVE)
    for hour in range(24 * 20):
        budget.add(_NOW_NS + hour * 3600 * 10**9, good=1)
        budget.counts(_NOW_NS + hour * 3600 * 10**9)
    assert budget.counts(_NOW_NS + 24 * 20 * 3600 * 10**9)[0] == 23
    assert len(budget.entries()) <= 2 * 144


@given(
    st.lists(st.tuples(st.integers(0, 2 * _DAY_NS), st.booleans()), max_size=30),
    st.integers(-(10**9), 10**9).map(lambda step_s: step_s * 10**9),
    st.integers(0, 200),
)
def test_a_clock_that_is_wrong_for_a_moment_takes_nothing_away(
    events: list[tuple[int, bool]], step_ns: int, num_meanwhile: int
) -> None:
    """Not even one that is 30 years ahead; what is counted meanwhile is all that can be wrong."""
    budget, end_ns = Budget(OBJECTIVE), _NOW_NS + 2 * _DAY_NS
    for at_ns, is_good in events:
        budget.add(_NOW_NS + at_ns, good=is_good, bad=not is_good)
    before = budget.counts(end_ns)
    for _ in range(num_meanwhile):
        budget.add(end_ns + step_ns, good=1)
        budget.counts(end_ns + step_ns)
    good, bad = budget.counts(end_ns)
    assert bad == before[1]
    is_of_window = abs(step_ns) < _DAY_NS - _DAY_NS // 144
    is_beyond = abs(step_ns) > _DAY_NS + _DAY_NS // 144
    assert good - before[0] in ({num_meanwhile} if is_of_window else {0, num_meanwhile})
    assert good == before[0] or not is_beyond


def test_a_clock_that_was_ahead_for_months_and_is_corrected_leaves_room_for_what_comes() -> None:
    budget = Budget(OBJECTIVE)
    for piece in range(400):
        budget.add(_NOW_NS + 400 * _DAY_NS + piece * _DAY_NS // 144, good=1)
    for piece in range(200):
        budget.add(_NOW_NS + piece * _DAY_NS // 144, bad=1)
    assert budget.counts(_NOW_NS + 199 * _DAY_NS // 144) == (0, 144)
