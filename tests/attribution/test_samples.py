"""Samples are divided over steps without loss, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution.samples import in_lanes, of_one_kind, touching

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
def test_what_touches_a_step_is_given_away_whole(
    steps: tuple[Ints, Ints], samples: tuple[Ints, Ints], seed: int
) -> None:
    amounts = np.random.default_rng(seed).uniform(0, 1e9, len(samples[0]))
    pairs = touching(*steps, *samples)
    parts = np.array([0.3, 0.7]) * pairs.overlap_ns[:, None]
    given_away = pairs.by_sample(pairs.spread(amounts, parts).sum(axis=1))
    touched = np.isin(np.arange(len(amounts)), pairs.sample)
    assert given_away == pytest.approx(np.where(touched, amounts, 0.0))


def test_a_sample_that_reaches_into_a_gap_is_all_its_steps() -> None:
    pairs = touching(np.array([10]), np.array([20]), np.array([15]), np.array([35]))
    assert pairs.spread(np.array([8.0]), np.array([[5.0]])).tolist() == [[8.0]]


def test_a_sample_without_weights_is_kept_back() -> None:
    pairs = touching(np.array([10]), np.array([20]), np.array([15]), np.array([35]))
    assert pairs.spread(np.array([8.0]), np.array([[0.0]])).tolist() == [[0.0]]


def test_only_samples_of_one_phase_are_of_one_kind() -> None:
    starts, ends = np.array([0, 10, 20, 30]), np.array([10, 20, 30, 40])
    kinds = np.array([1, 1, 2, 3])  # prefill, prefill, decode, both
    pairs = touching(starts, ends, np.array([0, 15, 21, 31, 50]), np.array([20, 25, 29, 39, 60]))
    assert of_one_kind(pairs, kinds).tolist() == [True, False, True, False, True]
