"""Rates are found again from sums, with an honest error, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.regression import (
    FEWEST_WINDOWS,
    HIGHEST_CONDITION,
    condition,
    estimate,
)

rates = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=4)


@settings(max_examples=50)
@given(rates=rates, seed=st.integers(0, 1 << 30))
def test_rates_without_noise_are_found_exactly(rates: list[float], seed: int) -> None:
    columns = np.random.default_rng(seed).uniform(0, 1e8, (80, len(rates)))
    found = estimate(columns, columns @ np.array(rates))
    assert found is not None
    assert [rate or 0.0 for rate in found.rates] == pytest.approx(rates, abs=1e-6)
    assert found.num_windows == 80


@settings(max_examples=50)
@given(scale=st.floats(1e-6, 1e12), seed=st.integers(0, 1 << 30))
def test_units_do_not_matter(scale: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    columns, noise = draw.uniform(0, 1, (60, 2)), draw.normal(0, 0.01, 60)
    sums = columns @ np.array([0.9, 0.35]) + noise
    one, other = estimate(columns, sums), estimate(columns * np.array([1.0, scale]), sums)
    assert one is not None
    assert other is not None
    assert other.of(0) == pytest.approx(one.of(0), rel=1e-6)
    assert other.of(1) * scale == pytest.approx(one.of(1), rel=1e-6)


def test_two_standard_errors_cover_the_truth_nearly_always() -> None:
    draw = np.random.default_rng(7)
    num_inside = 0
    for _ in range(200):
        columns = draw.uniform(0, 1, (100, 2))
        found = estimate(columns, columns @ np.array([0.9, 0.35]) + draw.normal(0, 0.05, 100))
        assert found is not None
        assert found.errors[0] is not None
        num_inside += abs(found.of(0) - 0.9) <= 2 * found.errors[0]
    assert num_inside >= 180


def test_no_rate_is_negative_and_the_others_make_do() -> None:
    draw = np.random.default_rng(3)
    columns = draw.uniform(0, 1, (80, 2))
    found = estimate(columns, columns @ np.array([1.0, -0.2]))
    assert found is not None
    assert found.of(1) == 0.0
    assert found.errors[1] is None
    alone = columns[:, 0] @ (columns @ np.array([1.0, -0.2])) / (columns[:, 0] @ columns[:, 0])
    assert found.of(0) == pytest.approx(alone)


def test_correlated_columns_have_no_estimate() -> None:
    draw = np.random.default_rng(5)
    first = draw.uniform(1, 2, 200)
    alike = np.stack([first, 0.3 * first + draw.normal(0, 0.003, 200)], axis=1)
    assert condition(alike) > HIGHEST_CONDITION
    assert estimate(alike, alike @ np.array([0.9, 0.35])) is None


def test_too_few_windows_are_no_estimate() -> None:
    columns = np.random.default_rng(5).uniform(0, 1, (FEWEST_WINDOWS, 2))
    sums = columns @ np.array([0.9, 0.35])
    assert estimate(columns, sums) is not None
    assert estimate(columns[1:], sums[1:]) is None


def test_a_phase_that_never_came_has_no_rate() -> None:
    columns = np.random.default_rng(5).uniform(0, 1, (60, 2)) * np.array([1.0, 0.0])
    found = estimate(columns, columns @ np.array([0.9, 0.0]))
    assert found is not None
    assert found.rates[1] is None
    assert found.of(0) == pytest.approx(0.9)


@pytest.mark.parametrize("num_columns", [2, 3, 4, 5])
def test_condition_is_that_of_the_columns_at_unit_length(num_columns: int) -> None:
    draw = np.random.default_rng(num_columns)
    for alike in (0.0, 0.5, 0.9, 0.99):
        columns = draw.uniform(0, 1, (70, num_columns))
        columns[:, 1:] = alike * columns[:, :1] + (1 - alike) * columns[:, 1:]
        unit = columns / np.linalg.norm(columns, axis=0)
        largest, *_, smallest = np.linalg.svd(unit, compute_uv=False)
        assert condition(columns) == pytest.approx(largest / smallest, rel=1e-4)


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 30), num_columns=st.integers(1, 5))
def test_no_other_rates_leave_less(seed: int, num_columns: int) -> None:
    draw = np.random.default_rng(seed)
    columns, sums = draw.uniform(0, 1, (80, num_columns)), draw.normal(0, 1, 80)
    found = estimate(columns, sums)
    assert found is not None
    rates = np.array([rate or 0.0 for rate in found.rates])
    left = sums - columns @ rates
    assert found.fit_error == pytest.approx(np.sqrt(np.mean(left**2)) / np.abs(sums).mean())
    falls = (
        columns.T @ left
    )  # what is left over is convex: least where it falls in no open direction
    assert (rates >= 0).all()
    assert (falls <= 1e-9).all()
    assert falls[rates > 0] == pytest.approx(0, abs=1e-9)
    in_use = columns[:, rates > 0]
    spread = (left @ left) / (80 - in_use.shape[1])
    errors = np.sqrt(spread * np.diagonal(np.linalg.inv(in_use.T @ in_use)))
    assert [error for error in found.errors if error is not None] == pytest.approx(errors.tolist())
