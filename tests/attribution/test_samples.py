"""What lies in a window is what its steps have of their amounts in it, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution.samples import amounts_until, one_by_one

Ints = NDArray[np.int64]


@st.composite
def intervals(draw: st.DrawFn, most: int = 20) -> tuple[Ints, Ints]:
    """Draw intervals one after the other, some with gaps between them."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=most))
    starts, ends, at = [], [], 0
    for gap, length in lengths:
        starts.append(at + gap)
        at += gap + length
        ends.append(at)
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


def overlaps(steps: tuple[Ints, Ints], samples: tuple[Ints, Ints]) -> Ints:
    """Return how much time each sample shares with each step: [samples, steps]."""
    shared = np.minimum(steps[1], samples[1][:, None]) - np.maximum(steps[0], samples[0][:, None])
    return np.maximum(shared, 0)


@given(steps=intervals(), samples=intervals(), seed=st.integers(0, 1 << 30))
def test_a_window_has_of_each_step_what_lies_in_it(
    steps: tuple[Ints, Ints], samples: tuple[Ints, Ints], seed: int
) -> None:
    amounts = np.random.default_rng(seed).uniform(0, 9, (3, len(steps[0])))
    lower, upper = (amounts_until(*steps, amounts, edge) for edge in samples)
    parts = overlaps(steps, samples) / (steps[1] - steps[0])
    assert upper - lower == pytest.approx(amounts @ parts.T)


@given(steps=intervals(), edges=st.lists(st.integers(-10, 3500), min_size=1), seed=st.integers(0))
def test_windows_side_by_side_have_all_of_it_and_once(
    steps: tuple[Ints, Ints], edges: list[int], seed: int
) -> None:
    amounts = np.random.default_rng(seed).uniform(0, 9, (2, len(steps[0])))
    times = np.array([-20, *sorted(edges), 4000])
    until = amounts_until(*steps, amounts, times)
    assert (until[:, 0] == 0).all()
    assert np.diff(until, axis=1).sum(axis=1) == pytest.approx(amounts.sum(axis=1))
    assert (np.diff(until, axis=1) >= -1e-9).all()


def test_a_sample_that_reaches_into_a_gap_is_all_its_steps() -> None:
    steps = np.array([10, 40]), np.array([20, 50])
    until = amounts_until(*steps, np.array([[6.0, 8.0]]), np.array([15, 35, 45]))
    assert np.diff(until).tolist() == [[3.0, 4.0]]


@given(lanes=st.lists(intervals(), min_size=1, max_size=4))
def test_spans_of_several_lanes_one_by_one_are_all_the_time_that_any_takes(
    lanes: list[tuple[Ints, Ints]],
) -> None:
    starts, ends = one_by_one(*map(np.concatenate, zip(*lanes, strict=True)))
    is_taken, expected = np.zeros(3001, dtype=int), np.zeros(3001, dtype=bool)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        is_taken[start:end] += 1
    for lane in lanes:
        for start, end in zip(*(edge.tolist() for edge in lane), strict=True):
            expected[start:end] = True
    assert is_taken.tolist() == expected.astype(int).tolist()
