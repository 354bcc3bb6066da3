"""Laws of the comparison of two recordings, and what it refuses."""

from __future__ import annotations

import random
from math import inf

import msgspec
import pytest
from msgspec.structs import replace

from inferscope.errors import BadInput
from inferscope.insight.compare import (
    NO_DIFFERENCE,
    RECORDING_HEADLINES,
    Difference,
    RecordingComparison,
    check_enough,
    columns_of,
)
from inferscope.insight.compare.blocks import FEWEST_BLOCKS, num_blocks
from inferscope.insight.compare.intervals import student_t
from inferscope.insight.compare.recordings import FEWEST_REQUESTS
from tests.insight.recordings import NUM, compared, recording, scaled
from tests.insight.test_compare import request
from tests.slo.requests import MS


def by_name(comparison: RecordingComparison) -> dict[str, Difference]:
    return {row.name: row for row in comparison.rows}


# --- laws ---------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("named", [False, True])
def test_a_recording_does_not_differ_from_itself(named: bool) -> None:
    one = recording(3, named=named)
    comparison = compared(one, one)
    assert comparison.num_paired == (NUM if named else 0)
    assert comparison.is_comparable
    assert comparison.explanations == ()
    assert comparison.overlap_share == pytest.approx(1)
    for row in comparison.rows:
        assert row.difference == 0
        assert row.low <= 0 <= row.high
        assert row.verdict == NO_DIFFERENCE


@pytest.mark.thorough
@pytest.mark.parametrize(("named", "seed"), [(False, 1), (True, 2)])
def test_swapping_the_sides_negates_every_row(named: bool, seed: int) -> None:
    a = recording(seed, load_seed=1 if named else None, named=named)
    b = recording(seed + 1, load_seed=1 if named else None, named=named, gap=1.2)
    there, back = by_name(compared(a, b)), by_name(compared(b, a))
    assert list(there) == list(back)
    opposite = {"lower": "higher", "higher": "lower", NO_DIFFERENCE: NO_DIFFERENCE}
    for name, row in there.items():
        other = back[name]
        assert (row.a, row.b) == pytest.approx((other.b, other.a))
        size = max(abs(row.low), abs(row.high), 1e-9)
        assert row.low == pytest.approx(-other.high, abs=1e-9 * size)
        assert row.high == pytest.approx(-other.low, abs=1e-9 * size)
        assert row.verdict == opposite[other.verdict]


@pytest.mark.parametrize(("seed", "factor"), [(1, 7)])
def test_scaling_all_times_scales_every_row(seed: int, factor: int) -> None:
    a, b = recording(seed), recording(seed + 1, prefill=1.3)
    rows = by_name(compared(a, b))
    larger = by_name(compared(scaled(a, factor), scaled(b, factor)))
    for name, row in rows.items():
        times = {"ns": factor, "requests/s": 1 / factor, "tok/s": 1 / factor}.get(row.unit, 1)
        for found, expected in zip(
            (larger[name].a, larger[name].b, larger[name].low, larger[name].high),
            (row.a, row.b, row.low, row.high),
            strict=True,
        ):
            assert found == pytest.approx(times * expected, rel=1e-6, abs=1e-6 * times)
        assert larger[name].verdict == row.verdict


@pytest.mark.parametrize("seed", [1])
def test_the_order_of_the_requests_changes_nothing(seed: int) -> None:
    a, b = recording(seed), recording(seed + 1)
    shuffled = [list(each) for each in (a, b)]
    for each in shuffled:
        random.Random(seed).shuffle(each)
    assert msgspec.json.encode(compared(*shuffled)) == msgspec.json.encode(compared(a, b))


def test_the_ledgers_rows_sum_to_the_means_that_they_explain() -> None:
    comparison = compared(recording(1), recording(2, prefill=1.5))
    mean = by_name(comparison)["ttft_mean"]
    for side in ("a", "b"):
        booked = sum(getattr(row, side) for row in comparison.rows if row.group == "ttft_ledger")
        assert booked == pytest.approx(getattr(mean, side))


def test_a_wider_level_has_wider_intervals() -> None:
    a, b = columns_of(recording(1)), columns_of(recording(2))
    wide = by_name(compared(a, b, level=0.99))
    for name, row in by_name(compared(a, b, level=0.9)).items():
        assert wide[name].low <= row.low
        assert row.high <= wide[name].high


# --- what is found ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("named", [False, True])
def test_a_slower_prompt_is_found_and_its_ledger_row_named(named: bool) -> None:
    load_seed = 5 if named else None
    a = recording(5, load_seed=load_seed, named=named)
    comparison = compared(a, recording(6, load_seed=load_seed, named=named, prefill=2.0))
    rows = by_name(comparison)
    assert rows["ttft_mean"].verdict == "higher"
    assert rows["ttft_mean"].low < rows["ttft_mean"].difference < rows["ttft_mean"].high
    assert rows["tbt_p50"].verdict == NO_DIFFERENCE
    causes = {each.headline: each.causes for each in comparison.explanations}
    assert "ttft.prefill_own" in causes["ttft_mean"]
    assert "ttft.decode_own" not in causes["ttft_mean"]


@pytest.mark.thorough
def test_the_same_requests_show_a_smaller_difference_than_others_of_their_lengths() -> None:
    a = recording(7, load_seed=7, named=True)
    b = recording(8, load_seed=7, named=True, prefill=1.3)
    paired = by_name(compared(a, b))["ttft_mean"]
    unnamed = [[replace(one, external_id=None) for one in side] for side in (a, b)]
    alone = by_name(compared(*unnamed))["ttft_mean"]
    assert paired.verdict == "higher"
    assert paired.difference == pytest.approx(alone.difference, rel=0.02)
    assert paired.high - paired.low < 0.7 * (alone.high - alone.low)


@pytest.mark.thorough
def test_longer_prompts_alone_are_no_difference_at_the_same_lengths() -> None:
    a, b = recording(9, num=600), recording(10, num=600, prompt=1.3)
    comparison = compared(a, b)
    rows = by_name(comparison)
    raw = [sum(one.prefill_ns for one in side) / len(side) for side in (a, b)]
    assert raw[1] > 1.25 * raw[0]
    assert rows["prefill"].b < 1.08 * rows["prefill"].a
    assert 0.5 < comparison.overlap_share < 0.95


def test_other_workloads_are_not_comparable() -> None:
    comparison = compared(recording(11), recording(12, prompt=8.0, prefill=1 / 8))
    assert comparison.overlap_share < 0.5
    assert not comparison.is_comparable


def test_failed_requests_are_a_headline() -> None:
    a = recording(13)
    b = [
        replace(one, finish="error") if number % 4 == 0 else one
        for number, one in enumerate(recording(14))
    ]
    row = by_name(compared(a, b))["failed"]
    assert row.is_headline
    assert (row.a, row.b) == (0, 0.25)
    assert row.verdict == "higher"


def test_cancelled_requests_did_not_fail_and_partly_observed_ones_are_left_out() -> None:
    a = recording(15)
    odd = [
        replace(a[0], finish="client_cancel"),
        replace(a[1], finish="rejected"),
        replace(a[2], joined_late=True),
    ]
    rows = by_name(compared([*odd, *a[3:]], a))
    assert "failed" not in rows
    assert columns_of([*odd, *a[3:]]).is_complete.sum() == NUM - 3


def test_a_percentile_of_too_few_values_is_no_row() -> None:
    few = [recording(seed, num=40) for seed in (16, 17)]
    comparison = compared(*few)
    assert "ttft_p90" in comparison.too_few
    assert "ttft_p90" not in by_name(comparison)
    assert "ttft_mean" in by_name(comparison)


def test_all_headlines_share_the_level() -> None:
    for row in compared(recording(18), recording(19), level=0.9).rows:
        num = len(RECORDING_HEADLINES) if row.is_headline else 1
        assert row.is_headline == (row.name in RECORDING_HEADLINES)
        assert row.level == pytest.approx(1 - 0.1 / num)


# --- what is refused ----------------------------------------------------------------------------


def test_too_few_requests_are_refused_with_the_number_that_is_needed() -> None:
    with pytest.raises(BadInput, match=rf"x.isr has 29 finished .* at least {FEWEST_REQUESTS} "):
        check_enough(columns_of(recording(20, num=29)), "x.isr")
    check_enough(columns_of(recording(20, num=40)), "x.isr")


def test_a_recording_that_is_short_for_its_requests_is_refused_with_the_time_it_needs() -> None:
    at_once = [
        request(at_ns=number * MS, queue_ns=900 * MS, prefill_ns=99 * MS, gaps_ns=[])
        for number in range(60)
    ]
    with pytest.raises(BadInput, match=r"covers 0\.1 s of arrivals.* at least 12\.0 s"):
        check_enough(columns_of(at_once), "x.isr")


def test_blocks_are_never_shorter_than_two_lifetimes() -> None:
    columns = columns_of(recording(22, num=200))
    lives = [one.delivered_ns - one.arrived_ns for one in recording(22, num=200)]
    span = columns.facts["arrived_ns"][-1] - columns.facts["arrived_ns"][0]
    assert FEWEST_BLOCKS <= num_blocks(columns) <= span / (2 * sorted(lives)[100])


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 5, 2.5706),
        (0.99, 9, 3.2498),
        (0.99, 30, 2.7500),
        (0.5, 4, 0.7407),
    ],
)
def test_students_t_is_that_of_the_tables(level: float, freedom: float, expected: float) -> None:
    assert student_t(level, freedom) == pytest.approx(expected, abs=1e-4)
    assert student_t(level, 1e4) < student_t(level, freedom) < inf
