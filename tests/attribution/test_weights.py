from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.weights import plain_shares, weight_shares
from inferscope.cost.hbm import WeightBytes
from inferscope.cost.step_table import StepTable

DENSE = WeightBytes(layers=1_000_003, head=70_001, experts=0, touch_share=0.0)
EXPERTS = WeightBytes(layers=1_000_003, head=70_001, experts=8_000_000_000, touch_share=0.25)

REQUESTS = st.lists(
    st.tuples(st.sampled_from([0, 1, 1, 2, 5, 40]), st.integers(0, 3)), min_size=1, max_size=9
)


def shapley(worth: Callable[[tuple[int, ...]], float], num: int) -> list[float]:
    """Return what each player adds on average over all orders of joining."""
    added = [0.0] * num
    for size in range(num):
        weight = 1 / (num * math.comb(num - 1, size))
        for member in range(num):
            others = [at for at in range(num) if at != member]
            for subset in itertools.combinations(others, size):
                added[member] += weight * (worth((*subset, member)) - worth(subset))
    return added


def columns(requests: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens, sampled = zip(*requests, strict=True)
    return np.array(tokens, dtype=np.int64), np.array(sampled, dtype=np.int64)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([DENSE, EXPERTS]), st.lists(REQUESTS, min_size=1, max_size=12))
def test_shares_sum_to_what_the_step_reads(
    weights: WeightBytes, parts: list[list[tuple[int, int]]]
) -> None:
    tokens, sampled = columns([request for part in parts for request in part])
    shares = weight_shares(weights, tokens, sampled)
    rows = int(sampled[tokens > 0].sum())
    assert int(shares.sum()) == weights.of_step(int(tokens.sum()), rows)
    assert (shares >= 0).all()
    assert (shares[tokens == 0] == 0).all()


@settings(max_examples=30, deadline=None)
@given(REQUESTS.filter(lambda requests: len(requests) <= 7))
def test_shares_are_the_shapley_value(requests: list[tuple[int, int]]) -> None:
    """The value averages all orders of the requests, with the expected read of experts."""
    tokens, sampled = columns(requests)

    def read(subset: tuple[int, ...]) -> float:
        there = list(subset)
        num = int(tokens[there].sum()) if there else 0
        if not num:
            return 0.0
        experts = EXPERTS.experts * (1 - (1 - EXPERTS.touch_share) ** num)
        has_rows = any(sampled[at] and tokens[at] for at in there)
        return EXPERTS.layers + experts + EXPERTS.head * has_rows

    exact = shapley(read, len(requests))
    assert weight_shares(EXPERTS, tokens, sampled).tolist() == pytest.approx(
        exact, abs=3 * len(requests)
    )


def test_experts_of_large_batches_are_divided_as_by_a_finer_quadrature() -> None:
    tokens = np.array([1] * 250 + [3] * 40 + [500, 7000], dtype=np.int64)
    shares = weight_shares(EXPERTS._replace(layers=0, head=0), tokens, np.zeros_like(tokens))
    grid = (np.arange(200_000) + 0.5) / 200_000
    wants = {n: 1 - (1 - EXPERTS.touch_share) ** n for n in set(tokens.tolist())}
    none = np.exp(sum(np.log1p(-wants[n] * grid) for n in tokens.tolist()))
    exact = [wants[n] * float((none / (1 - wants[n] * grid)).mean()) for n in tokens.tolist()]
    scaled = np.array(exact) * (int(shares.sum()) / sum(exact))
    assert shares.tolist() == pytest.approx(scaled.tolist(), rel=1e-4)


STEPS = st.lists(
    st.lists(
        st.tuples(st.just(1) | st.integers(2, 700), st.integers(0, 2)), min_size=1, max_size=40
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([DENSE, EXPERTS]), STEPS)
def test_shares_of_many_steps_are_the_same(
    weights: WeightBytes, steps: list[list[tuple[int, int]]]
) -> None:
    """But for the bytes left over, which are fewer than the requests."""
    tokens, sampled = columns([request for step in steps for request in step])
    sizes = np.array([len(step) for step in steps])
    none = np.zeros_like(tokens)
    found = plain_shares(weights, StepTable(tokens, none, sampled, none > 0, sizes))
    for step, of in zip(steps, np.split(found, np.cumsum(sizes)[:-1]), strict=True):
        expected = weight_shares(weights, *columns(step))
        assert of.sum() == expected.sum()
        assert of.tolist() == pytest.approx(expected.tolist(), abs=3 * len(of) + 1, rel=1e-9)


def test_requests_with_more_tokens_read_more_experts_and_equal_ones_the_same() -> None:
    tokens, sampled = columns([(1, 0), (8, 0), (1, 0), (90, 0)])
    shares = weight_shares(EXPERTS._replace(layers=0, head=0), tokens, sampled)
    assert shares[0] <= shares[1] <= shares[3]
    assert abs(int(shares[0] - shares[2])) <= 1
    for a, b in itertools.pairwise(weight_shares(DENSE, tokens, sampled).tolist()):
        assert abs(a - b) < len(tokens)
