from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.exact_shapley import filled, of_classes, of_subsets

Floats = NDArray[np.float64]


def by_every_order(cost: Floats) -> Floats:
    """Return the value from its definition: what each adds, averaged over all orders."""
    num = len(cost).bit_length() - 1
    values = np.zeros(num)
    for order in itertools.permutations(range(num)):
        coalition = 0
        for player in order:
            values[player] += cost[coalition | 1 << player] - cost[coalition]
            coalition |= 1 << player
    return values / math.factorial(num)


def subsets_of(classes: Floats) -> Floats:
    """Spell out a table by class: chunks first, then decodes that are all alike."""
    num_chunks, num_decodes = len(classes).bit_length() - 1, classes.shape[1] - 1
    of_chunks = len(classes) - 1
    return np.array(
        [
            classes[coalition & of_chunks, (coalition >> num_chunks).bit_count()]
            for coalition in range(2 ** (num_chunks + num_decodes))
        ]
    )


@st.composite
def tables(draw: st.DrawFn) -> Floats:
    """Costs of any kind: not even that more work costs more."""
    num_chunks = draw(st.integers(0, 3))
    num_decodes = draw(st.integers(0 if num_chunks else 1, 6 - num_chunks))
    cost = np.random.default_rng(draw(st.integers(0, 2**32))).uniform(
        0, 100, (2**num_chunks, num_decodes + 1)
    )
    cost[0, 0] = 0.0
    return cost


@given(tables())
def test_every_subset_weighed_is_every_order_walked(classes: Floats) -> None:
    cost = subsets_of(classes)
    assert of_subsets(cost) == pytest.approx(by_every_order(cost), abs=1e-9)


@given(tables())
def test_classes_of_like_decodes_give_what_all_their_subsets_give(classes: Floats) -> None:
    num_chunks = len(classes).bit_length() - 1
    chunks, decodes = of_classes(classes)
    spelled_out = by_every_order(subsets_of(classes))
    assert chunks == pytest.approx(spelled_out[:num_chunks], abs=1e-9)
    assert decodes == pytest.approx(spelled_out[num_chunks:].sum(), abs=1e-9)
    assert chunks.sum() + decodes == pytest.approx(classes[-1, -1])


def test_repeats_are_valued_side_by_side() -> None:
    repeats = np.random.default_rng(1).uniform(0, 9, (16, 5))
    repeats[0] = 0.0
    one_by_one = [of_subsets(repeats[:, at]) for at in range(5)]
    assert of_subsets(repeats) == pytest.approx(np.stack(one_by_one, axis=1))


def test_what_was_not_measured_is_filled_in_on_lines_and_what_was_is_kept() -> None:
    at = np.array([0, 1, 4, 8])
    line = filled(np.array([[0.0, 10.0, 16.0, 24.0], [7.0, 8.0, 11.0, 15.0]]), at)
    assert line[0].tolist() == [0, 10, 12, 14, 16, 18, 20, 22, 24]
    assert line[1].tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15]
