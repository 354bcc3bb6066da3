from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold import add_durations
from inferscope.log_histogram import LOWEST_NS, LogHistogram

some_ns = st.lists(st.integers(LOWEST_NS, 10**12), min_size=1, max_size=200)


def histogram_of(durations_ns: list[int]) -> LogHistogram:
    histogram = LogHistogram()
    for duration_ns in durations_ns:
        histogram.add(duration_ns)
    return histogram


@given(some_ns, st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_off_by_half_a_per_cent_at_most(
    durations_ns: list[int], share: float
) -> None:
    rank = max(1, math.ceil(share * len(durations_ns)))
    exact_ns = sorted(durations_ns)[rank - 1]
    found_ns = histogram_of(durations_ns).quantile_ns(share)
    # A bin's half width, and the rounding of its middle to nanoseconds.
    assert abs(found_ns - exact_ns) <= 0.00502 * exact_ns + 1


@given(some_ns)
def test_one_by_one_and_all_at_once_are_the_same(durations_ns: list[int]) -> None:
    single, together = histogram_of(durations_ns), LogHistogram()
    add_durations(together, np.array(durations_ns, dtype=np.int64))
    for each in (single, together):
        assert (each.num, each.sum_ns, each.longest_ns) == (
            len(durations_ns), sum(durations_ns), max(durations_ns),
        )  # fmt: skip
    assert single.mean_ns == together.mean_ns
    assert single.quantile_ns(0.5) == pytest.approx(together.quantile_ns(0.5), rel=0.0101)


@given(some_ns, some_ns)
def test_a_merged_histogram_is_that_of_all_durations(first: list[int], second: list[int]) -> None:
    merged, whole = histogram_of(first), histogram_of(first + second)
    merged.merge(histogram_of(second))
    assert merged.bins == whole.bins
    assert (merged.num, merged.mean_ns, merged.longest_ns) == (
        whole.num, whole.mean_ns, whole.longest_ns,
    )  # fmt: skip
    assert merged.percentiles_ns() == whole.percentiles_ns()


def test_of_nothing_nothing_is_known() -> None:
    nothing = LogHistogram()
    add_durations(nothing, np.array([], dtype=np.int64))
    assert (nothing.mean_ns, nothing.percentiles_ns()) == (None, (None, None, None))


def test_durations_of_any_length_have_a_place() -> None:
    durations = histogram_of([0, 5 * 10**15])
    assert durations.longest_ns == 5 * 10**15
    assert durations.quantile_ns(0.01) == pytest.approx(LOWEST_NS, rel=0.01)
    assert durations.quantile_ns(1.0) == pytest.approx(5 * 10**15, rel=0.0051)
