from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.cost.batch import Batch, Team
from inferscope.cost.pure_steps import TOLERANCE, PureSteps

MS = 1_000_000


def batch_of(*members: tuple[int, int]) -> Batch:
    """Return a batch of members by tokens and context."""
    tokens, contexts = (np.array(column) for column in zip(*members, strict=True))
    return Batch(Team(tokens, np.ones(len(tokens), np.int64)), contexts)


def bounds_of(steps: PureSteps, *members: tuple[int, int]) -> list[float]:
    """Return the members' bounds, which are the same one by one."""
    batch = batch_of(*members)
    found, one_by_one = steps.bounds_of_all(batch), steps.bounds(batch, list(range(len(members))))
    bounds = [math.inf] * len(members) if found is None else found.own_ns.tolist()
    again = [math.inf] * len(members) if one_by_one is None else one_by_one.own_ns.tolist()
    assert again == pytest.approx(bounds)
    return bounds


def test_step_bounds_members_of_as_many_tokens_and_as_much_context_or_less() -> None:
    steps = PureSteps()
    steps.observe(batch_of((16, 100)), [0], 90 * MS)
    steps.observe(batch_of((1, 500), (1, 3000)), [], 30 * MS)
    assert bounds_of(steps, (16, 100), (17, 0), (16, 200)) == [90 * MS, math.inf, math.inf]
    assert bounds_of(steps, (1, 3000), (1, 4000), (2, 0)) == [30 * MS, math.inf, 90 * MS]


def test_bound_grows_with_the_context_for_a_while() -> None:
    steps = PureSteps()
    steps.observe(batch_of((1, 999)), [], 30 * MS)
    assert bounds_of(steps, (1, 1009), (1, 1249)) == pytest.approx([30.3 * MS, 37.5 * MS])


def test_mixed_steps_bound_nothing() -> None:
    steps = PureSteps()
    steps.observe(batch_of((16, 0), (1, 100)), [0], 90 * MS)
    assert steps.bounds_of_all(batch_of((1, 0))) is None
    assert steps.bounds(batch_of((1, 0)), [0]) is None


def test_one_step_of_a_wrong_time_bounds_nothing() -> None:
    steps = PureSteps()
    for took_ns in (100 * MS, 100 * MS, 1, 100 * MS):
        steps.observe(batch_of((13, 0)), [0], took_ns)
        assert bounds_of(steps, (13, 0)) == [100 * MS]


def test_only_prefills_are_bounded_where_the_model_is_trusted() -> None:
    steps = PureSteps()
    steps.observe(batch_of((13, 0)), [0], 100 * MS)
    found = steps.bounds(batch_of((13, 0), (1, 0)), [0])
    assert found is not None
    assert found.own_ns.tolist() == [100 * MS, math.inf]
    assert found.step_ns == math.inf
    whole = steps.bounds_of_all(batch_of((13, 0), (1, 0)))
    assert whole is not None
    assert whole.step_ns == pytest.approx(TOLERANCE * 200 * MS)


sizes = st.tuples(st.integers(1, 20_000), st.integers(0, 200_000))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(1, 10**10)), min_size=1, max_size=80), sizes)
def test_no_bound_is_below_the_fastest_step_that_compares(
    told: list[tuple[tuple[int, int], int]], member: tuple[int, int]
) -> None:
    steps = PureSteps()
    for size, took_ns in told:
        steps.observe(batch_of(size), [0], took_ns)
    (bound,) = bounds_of(steps, member)
    as_large = [
        took_ns * max(1.0, (member[1] + 1) / (context + 1))
        for (n, context), took_ns in told
        if n >= member[0] and 1.25 * (context + 1) >= member[1] + 1
    ]
    assert bound == math.inf or bound >= min(as_large) * (1 - 1e-9)
