from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.cost.pure_steps import TOLERANCE, PureSteps

MS = 1_000_000


def bounds_of(steps: PureSteps, *members: tuple[int, int]) -> list[float]:
    """Return the bounds of members by tokens and context, which are the same one by one."""
    tokens, contexts = (np.array(column) for column in zip(*members, strict=True))
    found = steps.bounds_of_all(tokens, contexts)
    one_by_one = steps.bounds(tokens, contexts, list(range(len(members))))
    bounds = [math.inf] * len(members) if found is None else found.own_ns.tolist()
    again = [math.inf] * len(members) if one_by_one is None else one_by_one.own_ns.tolist()
    assert again == pytest.approx(bounds)
    return bounds


def test_step_bounds_members_of_as_many_tokens_and_as_much_context_or_less() -> None:
    steps = PureSteps()
    steps.observe(16, 100, 90 * MS)
    steps.observe(1, 3000, 30 * MS)
    assert bounds_of(steps, (16, 100), (17, 0), (16, 200)) == [90 * MS, math.inf, math.inf]
    assert bounds_of(steps, (1, 3000), (1, 4000), (2, 0)) == [30 * MS, math.inf, 90 * MS]


def test_bound_grows_with_the_context_for_a_while() -> None:
    steps = PureSteps()
    steps.observe(1, 999, 30 * MS)
    assert bounds_of(steps, (1, 1009), (1, 1249)) == pytest.approx([30.3 * MS, 37.5 * MS])


def test_without_steps_nothing_is_bounded() -> None:
    assert bounds_of(PureSteps(), (1, 0), (16, 0)) == [math.inf, math.inf]


def test_one_step_of_a_wrong_time_bounds_nothing() -> None:
    steps = PureSteps()
    for took_ns in (100 * MS, 100 * MS, 1, 100 * MS):
        steps.observe(13, 0, took_ns)
        assert bounds_of(steps, (13, 0)) == [100 * MS]


def test_only_prefills_are_bounded_where_the_model_is_trusted() -> None:
    steps = PureSteps()
    steps.observe(13, 0, 100 * MS)
    tokens, contexts = np.array([13, 1]), np.array([0, 0])
    found = steps.bounds(tokens, contexts, [0])
    assert found is not None
    assert found.own_ns.tolist() == [100 * MS, math.inf]
    assert found.step_ns == math.inf
    whole = steps.bounds_of_all(tokens, contexts)
    assert whole is not None
    assert whole.step_ns == pytest.approx(TOLERANCE * 200 * MS)


sizes = st.tuples(st.integers(1, 20_000), st.integers(0, 200_000))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(1, 10**10)), min_size=1, max_size=80), sizes)
def test_no_bound_is_below_the_fastest_step_that_compares(
    steps_seen: list[tuple[tuple[int, int], int]], member: tuple[int, int]
) -> None:
    steps = PureSteps()
    for size, took_ns in steps_seen:
        steps.observe(*size, took_ns)
    (bound,) = bounds_of(steps, member)
    as_large = [
        took_ns * max(1.0, (member[1] + 1) / (context + 1))
        for (n, context), took_ns in steps_seen
        if n >= member[0] and 1.25 * (context + 1) >= member[1] + 1
    ]
    assert bound == math.inf or bound >= min(as_large) * (1 - 1e-9)
