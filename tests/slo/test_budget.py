"""Budgets over a window that moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.slo import Objective
from inferscope.slo.budget import Budget

_DAY_NS = 86400 * 10**9
_NOW_NS = 1_700_000_000 * 10**9
OBJECTIVE = Objective("ttft", "ttft", 1.0, 0.99, 86400.0)


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
    assert len(budget.entries()) <= 25
