from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.padding import airport, padding, padding_after
from tests.attribution.games import Cost, shapley

lengths = st.lists(st.integers(1, 9000), min_size=1, max_size=8)


def padding_of(visible: list[int]) -> Cost:
    return lambda members: len(members) * max((visible[m] for m in members), default=0)


@settings(max_examples=80)
@given(lengths)
def test_padding_is_split_by_the_shapley_value(visible: list[int]) -> None:
    paid = padding(np.array(visible, dtype=np.float64))
    np.testing.assert_allclose(paid, shapley(padding_of(visible), len(visible)), rtol=1e-9)


@settings(max_examples=80)
@given(lengths)
def test_each_level_is_shared_by_the_players_that_reach_it(heights: list[int]) -> None:
    exact = shapley(lambda members: max((heights[m] for m in members), default=0), len(heights))
    np.testing.assert_allclose(airport(np.array(heights, dtype=np.float64)), exact, rtol=1e-9)


@settings(max_examples=80)
@given(lengths, st.lists(st.integers(1, 9000), max_size=4))
def test_a_group_pays_for_the_padding_that_it_adds_to_others(
    visible: list[int], before: list[int]
) -> None:
    def added(members: tuple[int, ...]) -> float:
        together = [*before, *(visible[m] for m in members)]
        return len(together) * max(together, default=0) - len(before) * max(before, default=0)

    paid = padding_after(
        np.array(visible, dtype=np.float64),
        num_before=len(before),
        longest_before=max(before, default=0),
    )
    exact = shapley(added, len(visible))
    np.testing.assert_allclose(paid, exact, rtol=1e-9, atol=1e-6)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=500), st.integers(0, 1000))
def test_padding_is_paid_in_full_and_grows_with_all_alike(visible: list[int], more: int) -> None:
    at_first = np.array(visible, dtype=np.float64)
    paid = padding(at_first)
    assert float(paid.sum()) == pytest.approx(len(visible) * max(visible), rel=1e-12)
    assert (paid >= at_first * (1 - 1e-12)).all()
    np.testing.assert_allclose(padding(at_first + more), paid + more, rtol=1e-9)


def test_by_visible_tokens_the_short_ones_would_pay_too_little() -> None:
    """The reason for the closed form: the figures of the module's docstring."""
    visible = np.linspace(300, 3000, 64)
    exact = padding(visible)
    naive = visible * (64 * 3000 / visible.sum())
    assert naive[0] / exact[0] == pytest.approx(0.19, abs=0.005)
    assert np.abs(naive - exact).sum() / 2 / exact.sum() == pytest.approx(0.18, abs=0.005)
