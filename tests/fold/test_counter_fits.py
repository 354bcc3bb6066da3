"""Equality of a rolling regression with one over its last windows."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.attribution.regression import FEWEST_WINDOWS, estimate
from inferscope.fold.join.fits import RollingFit

KEPT = 600


def test_a_fit_is_that_of_the_last_windows_whatever_came_before() -> None:
    draw, fit = np.random.default_rng(2), RollingFit(("prefill", "decode"))
    columns = draw.uniform(0, 1e8, (3 * KEPT, 2))
    columns[:KEPT] *= 1e6  # subtracting these from sums would leave rounding errors
    totals = columns @ np.array([0.9, 0.35]) + draw.normal(0, 0.01, len(columns)) * columns[:, 0]
    num_fits = 0
    for num, (row, total) in enumerate(zip(columns.tolist(), totals.tolist(), strict=True), 1):
        fit.add(row, total)
        found, last = fit.now(), slice(max(0, num - KEPT), num)
        if num < FEWEST_WINDOWS:
            assert found is None
        elif num % 10 == 0:
            expected = estimate(columns[last], totals[last])
            assert found is not None
            assert expected is not None
            assert found.rates == pytest.approx(expected.rates)
            assert found.errors == pytest.approx(expected.errors)
            assert found.fit_error == pytest.approx(expected.fit_error)
            assert found.num_windows == expected.num_windows == min(num, KEPT)
            num_fits += 1
    assert num_fits > 100


def test_columns_that_are_not_separable_yet_are_omitted() -> None:
    draw, fit = (
        np.random.default_rng(3),
        RollingFit(("idle", "prefill", "decode", "bytes", "flops")),
    )
    for _ in range(100):
        idle, prefill, decode = draw.uniform(0, 1, 3).tolist()
        fit.add((idle, prefill, decode, 2 * decode, 3 * prefill), idle + 4 * prefill + 2 * decode)
    found = fit.now()
    assert found is not None
    assert found.rates[:3] == pytest.approx((1.0, 4.0, 2.0))
    assert found.rates[3:] == (None, None)


def test_empty_windows_are_ignored() -> None:
    fit = RollingFit(("prefill", "decode"))
    for _ in range(2 * FEWEST_WINDOWS):
        fit.add((0.0, 0.0), 5.0)
    assert fit.now() is None


def test_the_interval_between_fits_does_not_depend_on_the_windows_per_call() -> None:
    draw = np.random.default_rng(4)
    columns = draw.uniform(0, 1, (200, 2))
    totals = (columns @ np.array([0.9, 0.35]) + draw.normal(0, 0.1, len(columns))).tolist()
    found = []
    for num_together in (1, 7, 150):
        fit = RollingFit(("prefill", "decode"))
        fits = fit.take(columns[:FEWEST_WINDOWS].tolist(), totals[:FEWEST_WINDOWS])
        for at in range(FEWEST_WINDOWS, len(totals), num_together):
            last = slice(at, at + num_together)
            fits += fit.take(columns[last].tolist(), totals[last])
        found.append(fits)
    assert found[0] == found[1] == found[2]
    assert len({id(each) for each in found[0]}) == 1 + (200 - FEWEST_WINDOWS) // 10
