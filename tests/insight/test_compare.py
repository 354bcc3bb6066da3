"""A comparison of equal sides shows no difference at the stated level; a shift is found."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.fold import FinalRequest
from inferscope.insight.compare import (
    HEADLINE_LEVEL,
    NO_DIFFERENCE,
    Comparison,
    ComparisonRow,
    compare,
    fewest_pairs,
    paired_interval,
)
from tests.slo.requests import FINE, MS

Draw = Callable[[np.random.Generator, int], np.ndarray]
Runs = list[list[FinalRequest]]

NUM_RUNS, NUM_REQUESTS = 8, 12


def request(
    *, at_ns: int = 0, queue_ns: int = 20 * MS, prefill_ns: int, gaps_ns: list[int]
) -> FinalRequest:
    """Return a request that waits, computes its prompt, and emits a token after each gap."""
    first_ns = at_ns + queue_ns + prefill_ns
    times_ns = np.cumsum([first_ns, *gaps_ns]).tolist()
    before = {"queue": queue_ns, "prefill_own": prefill_ns}
    return replace(
        FINE,
        arrived_ns=at_ns,
        first_token_ns=first_ns,
        last_token_ns=times_ns[-1],
        delivered_ns=times_ns[-1] + MS,
        output_tokens=len(times_ns),
        ledger_ns={**before, "decode_own": sum(gaps_ns), "output": MS},
        ttft_ledger_ns=before,
        token_times_ns=array("q", times_ns),
        tokens_per_event=(1,) * len(times_ns),
        prefill_ns=prefill_ns,
        decode_ns=sum(gaps_ns),
    )


def runs(
    draw: np.random.Generator, *, prefill: float = 1.0, gap: float = 1.0, drift: float = 0.0
) -> Runs:
    """Return runs whose speed varies by a tenth, with factors of prompts and gaps."""
    made = []
    for number in range(NUM_RUNS):
        speed = draw.lognormal(0, 0.1) * (1 + drift * number)
        made.append(
            [
                request(
                    at_ns=250 * MS * index,
                    prefill_ns=round(100 * MS * speed * prefill * draw.lognormal(0, 0.5)),
                    gaps_ns=[
                        round(10 * MS * speed * gap * draw.lognormal(0, 0.3)) for _ in "12345"
                    ],
                )
                for index in range(NUM_REQUESTS)
            ]
        )
    return made


def rows(comparison: Comparison) -> dict[str, ComparisonRow]:
    return {row.name: row for row in comparison.rows if row.group != "ledger"}


# --- the interval -------------------------------------------------------------------------------


def even(draw: np.random.Generator, num: int) -> np.ndarray:
    return draw.normal(size=num)


def skewed(draw: np.random.Generator, num: int) -> np.ndarray:
    return draw.lognormal(0, 1, size=num) - draw.lognormal(0, 1, size=num)


def heavy(draw: np.random.Generator, num: int) -> np.ndarray:
    """Return differences without a mean or a variance."""
    return draw.standard_cauchy(size=num)


def drifting(draw: np.random.Generator, num: int) -> np.ndarray:
    """Return differences of a machine that slows down by a constant amount: A B, B A, …."""
    return draw.normal(size=num) + 0.5 * (-1.0) ** np.arange(num)


@pytest.mark.thorough
@pytest.mark.parametrize("level", [0.95, HEADLINE_LEVEL])
@pytest.mark.parametrize("num", [8, 12, 30])
@pytest.mark.parametrize("differences", [even, skewed, heavy, drifting])
def test_intervals_of_equal_sides_hold_zero_at_their_level(
    differences: Draw, num: int, level: float
) -> None:
    draw, num_trials = np.random.default_rng(1), 2000
    num_missed = 0
    for _ in range(num_trials):
        low, high = paired_interval(differences(draw, num).tolist(), level=level)
        assert low <= high
        num_missed += not low <= 0 <= high
    expected = num_trials * (1 - level)
    assert num_missed <= expected + 3 * np.sqrt(expected)


def test_an_interval_is_not_wider_than_its_level_needs() -> None:
    draw, num_trials = np.random.default_rng(2), 1000
    intervals = [paired_interval(even(draw, 12).tolist(), level=0.95) for _ in range(num_trials)]
    num_missed = sum(not low <= 0 <= high for low, high in intervals)
    assert num_missed >= 0.03 * num_trials
    # Student's t is the narrowest interval that holds a normal mean at its level.
    mean_width = np.mean([high - low for low, high in intervals])
    assert mean_width == pytest.approx(2 * 2.201 / np.sqrt(12), rel=0.1)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=20),
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e3),
)
def test_an_interval_moves_and_scales_with_its_differences(
    differences: list[float], shift: float, factor: float
) -> None:
    low, high = paired_interval(differences, level=0.95)
    near = pytest.approx
    assert low <= high
    assert min(differences) - 1e-6 <= low
    assert high <= max(differences) + 1e-6
    moved = paired_interval([factor * each + shift for each in differences], level=0.95)
    assert moved == (near(factor * low + shift, abs=1e-3), near(factor * high + shift, abs=1e-3))
    mirrored = paired_interval([-each for each in differences], level=0.95)
    assert mirrored == (near(-high, abs=1e-6), near(-low, abs=1e-6))


def test_too_few_pairs_cannot_reach_a_level() -> None:
    assert [fewest_pairs(level) for level in (0.5, 0.95, 0.99)] == [2, 6, 8]


def test_fewer_pairs_than_that_are_refused() -> None:
    assert paired_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], level=0.95) == (1.0, 6.0)
    with pytest.raises(ValueError, match="5 pairs"):
        paired_interval([1.0, 2.0, 3.0, 4.0, 5.0], level=0.95)


# --- the rows -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_equal_sides_show_no_difference() -> None:
    draw, num_trials = np.random.default_rng(3), 60
    comparisons = [compare(runs(draw), runs(draw)) for _ in range(num_trials)]
    num_found = sum(
        any(row.verdict != NO_DIFFERENCE for row in each.headlines) for each in comparisons
    )
    assert len(comparisons[0].headlines) == 5
    assert num_found <= 0.05 * num_trials + 3 * np.sqrt(0.05 * num_trials)


@pytest.mark.thorough
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.6, 1.6, 2.0]))
def test_a_shift_of_prompts_is_found_in_ttft_and_not_between_tokens(
    seed: int, factor: float
) -> None:
    draw = np.random.default_rng(seed)
    a, b = runs(draw), runs(np.random.default_rng(seed), prefill=factor)
    found = rows(compare(a, b))
    verdict = "lower" if factor < 1 else "higher"
    for name in ("ttft_p50", "prefill"):
        row = found[name]
        assert row.verdict == verdict
        assert row.low <= row.difference <= row.high
        assert row.difference == pytest.approx(row.b - row.a)
    assert found["tbt_p50"].difference == 0
    assert found["tbt_p50"].verdict == NO_DIFFERENCE


def test_a_shift_between_tokens_is_found_in_other_runs_too() -> None:
    draw = np.random.default_rng(4)
    found = rows(compare(runs(draw), runs(draw, gap=1.5)))
    assert (
        found["tbt_p50"].verdict == found["tbt_p99"].verdict == found["decode"].verdict == "higher"
    )
    assert found["ttft_p50"].verdict == NO_DIFFERENCE


def test_a_drift_of_the_machine_is_no_difference() -> None:
    draw = np.random.default_rng(5)
    found = rows(compare(runs(draw, drift=0.1), runs(draw, drift=0.1)))
    assert {row.verdict for row in found.values()} == {NO_DIFFERENCE}


def test_the_ledgers_rows_sum_to_the_mean_time_of_a_request() -> None:
    draw = np.random.default_rng(6)
    a, b = runs(draw), runs(draw, prefill=2.0)
    ledger = [row for row in compare(a, b).rows if row.group == "ledger"]
    for side, name in ((a, "a"), (b, "b")):
        whole = np.mean([one.delivered_ns - one.arrived_ns for run in side for one in run])
        assert sum(getattr(row, name) for row in ledger) == pytest.approx(whole)


def test_goodput_counts_requests_within_twice_the_medians_of_both_sides() -> None:
    fast = [request(at_ns=100 * MS * i, prefill_ns=80 * MS, gaps_ns=[10 * MS]) for i in range(9)]
    late = request(at_ns=900 * MS, prefill_ns=181 * MS, gaps_ns=[10 * MS])
    comparison = compare([[*fast, late]] * 8, [[*fast, replace(late, finish="error")]] * 8)
    assert (comparison.limits.ttft_ns, comparison.limits.tpot_ns) == (200 * MS, 20 * MS)
    row = rows(comparison)["goodput"]
    assert row.a == pytest.approx(9 / 1.112)
    assert row.b == pytest.approx(9 / 0.911)
    assert comparison.num_left_out == 8


def test_requests_that_failed_or_were_seen_in_part_are_in_no_row() -> None:
    one = request(prefill_ns=80 * MS, gaps_ns=[10 * MS])
    odd = [
        replace(one, finish="error"),
        replace(one, joined_late=True),
        replace(one, ledger_missing="core not observed"),
    ]
    comparison = compare([[one, *odd]] * 8, [[one]] * 8)
    assert (comparison.num_a, comparison.num_b, comparison.num_left_out) == (8, 8, 24)
    assert all(row.verdict == NO_DIFFERENCE for row in comparison.rows)


def test_a_measure_that_too_few_runs_have_is_no_row() -> None:
    one = request(prefill_ns=80 * MS, gaps_ns=[])
    several = request(prefill_ns=80 * MS, gaps_ns=[10 * MS])
    comparison = compare([[one]] * 8, [[one], *[[several]] * 7])
    assert "tbt_p50" not in rows(comparison)
    assert "ttft_p50" in rows(comparison)


def test_runs_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="paired"):
        compare([[FINE]], [])
    with pytest.raises(ValueError, match="no request"):
        compare([[]], [[]])
