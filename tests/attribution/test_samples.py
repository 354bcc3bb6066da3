"""Samples are divided over steps without loss, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution.samples import covering, in_lanes, touching

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


@given(steps=intervals(), samples=intervals())
def test_pairs_are_all_that_share_time_and_how_much(
    steps: tuple[Ints, Ints], samples: tuple[Ints, Ints]
) -> None:
    pairs = touching(*steps, *samples)
    found = {
        (sample, step): overlap
        for sample, step, overlap in zip(
            pairs.sample.tolist(), pairs.step.tolist(), pairs.overlap_ns.tolist(), strict=True
        )
    }
    expected = {
        (i, j): min(stop, end) - max(start, begin)
        for i, (begin, end) in enumerate(zip(*samples, strict=True))
        for j, (start, stop) in enumerate(zip(*steps, strict=True))
        if min(stop, end) > max(start, begin)
    }
    assert found == expected


@given(lanes=st.lists(intervals(), max_size=4), samples=intervals(), seed=st.integers(0, 1 << 30))
def test_lanes_are_paired_each_for_itself_wherever_their_steps_stand(
    lanes: list[tuple[Ints, Ints]], samples: tuple[Ints, Ints], seed: int
) -> None:
    none = np.zeros(0, dtype=np.int64)
    lane_of = np.concatenate([none, *(np.full(len(lane[0]), at) for at, lane in enumerate(lanes))])
    np.random.default_rng(seed).shuffle(lane_of)  # each lane's steps stay in their order
    places = [np.flatnonzero(lane_of == at) for at in range(len(lanes))]
    starts, ends = np.zeros_like(lane_of), np.zeros_like(lane_of)
    expected = set()
    for lane, place in zip(lanes, places, strict=True):
        starts[place], ends[place] = lane
        alone = touching(*lane, *samples)
        columns = (alone.sample, place[alone.step], alone.overlap_ns, alone.within)
        expected |= set(zip(*(column.tolist() for column in columns), strict=True))
    pairs = in_lanes(starts, ends, places, *samples)
    columns = (pairs.sample, pairs.step, pairs.overlap_ns, pairs.within)
    assert set(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert len(pairs.sample) == len(expected)
    assert pairs.sample.tolist() == sorted(pairs.sample.tolist())


@given(steps=intervals(), samples=intervals(), seed=st.integers(0, 1 << 30))
def test_long_samples_lie_over_steps_as_short_ones_do(
    steps: tuple[Ints, Ints], samples: tuple[Ints, Ints], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    columns, rates = (
        draw.uniform(0, 9, (3, len(steps[0]))),
        draw.uniform(0, 9, (2, len(samples[0]))),
    )
    short, long = touching(*steps, *samples), covering(*steps, *samples)
    assert long.busy_ns().tolist() == short.busy_ns().tolist()
    assert long.sums(columns) == pytest.approx(short.sums(columns))
    assert long.shares(rates) == pytest.approx(short.shares(rates))


@given(steps=intervals(), samples=intervals(), seed=st.integers(0, 1 << 30))
def test_what_touches_a_step_is_given_away_whole(
    steps: tuple[Ints, Ints], samples: tuple[Ints, Ints], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    amounts = draw.uniform(0, 1e9, len(samples[0]))
    expected = draw.uniform(0.1, 9, len(steps[0]))
    pairs = touching(*steps, *samples)
    (whole,) = pairs.sums(expected[None])
    is_touched = np.isin(np.arange(len(amounts)), pairs.sample)
    assert (whole > 0).tolist() == is_touched.tolist()
    rates = np.divide(amounts, whole, out=np.zeros(len(amounts)), where=is_touched)
    given_away = pairs.shares(rates[None])[0] * expected
    assert given_away.sum() == pytest.approx(amounts[is_touched].sum())


def test_a_sample_that_reaches_into_a_gap_is_all_its_steps() -> None:
    pairs = touching(np.array([10]), np.array([20]), np.array([15]), np.array([35]))
    assert pairs.sums(np.array([[6.0]])).tolist() == [[3.0]]
    assert pairs.shares(np.array([[8.0]])).tolist() == [[4.0]]
