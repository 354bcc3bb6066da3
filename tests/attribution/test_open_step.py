from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.open_step import scaled

_CELLS = st.lists(st.sampled_from([0, 0, 1, 2, 7, 1_000, 40_000_000]), min_size=4, max_size=4)
_ROWS = st.lists(st.tuples(_CELLS, st.integers(0, 50_000_000)), min_size=1, max_size=5)


@given(_ROWS)
def test_scaled_rows_sum_to_their_totals_and_stay_in_proportion(
    told: list[tuple[list[int], int]],
) -> None:
    rows, totals_ns = np.array([row for row, _ in told]), np.array([ns for _, ns in told])
    found = scaled(rows, totals_ns)
    wholes_ns = rows.sum(axis=1)
    assert (found.sum(axis=1) == np.minimum(totals_ns, wholes_ns)).all()
    assert ((found >= 0) & (found <= rows)).all()
    exact = rows * np.minimum(1.0, totals_ns / np.maximum(wholes_ns, 1))[:, None]
    assert (np.abs(found - exact) < 1 + 1e-6).all()


@given(_ROWS)
def test_rows_are_scaled_each_by_itself(told: list[tuple[list[int], int]]) -> None:
    rows, totals_ns = np.array([row for row, _ in told]), np.array([ns for _, ns in told])
    together = scaled(rows, totals_ns)
    for at in range(len(rows)):
        assert (scaled(rows[at : at + 1], totals_ns[at : at + 1])[0] == together[at]).all()


def test_the_largest_remainders_are_rounded_up_the_first_of_equal_ones_first() -> None:
    rows = np.array([[10, 0, 10, 10, 1]])
    assert scaled(rows, np.array([17])).tolist() == [[6, 0, 5, 5, 1]]
