from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.insight.findings.durations import Durations

some_ns = st.lists(st.integers(1_000, 10**11), min_size=1, max_size=200)


@given(some_ns, st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_off_by_half_a_per_cent_at_most(
    durations_ns: list[int], share: float
) -> None:
    durations = Durations()
    durations.add_all(np.array(durations_ns))
    rank = max(1, int(np.ceil(share * len(durations_ns))))
    exact_ns = sorted(durations_ns)[rank - 1]
    assert durations.quantile_ns(share) == pytest.approx(exact_ns, rel=0.00502)


@given(some_ns)
def test_one_by_one_and_all_at_once_are_the_same(durations_ns: list[int]) -> None:
    single, together = Durations(), Durations()
    for duration_ns in durations_ns:
        single.add(duration_ns)
    together.add_all(np.array(durations_ns))
    assert (single.num, single.sum_ns, single.longest_ns) == (
        len(durations_ns), sum(durations_ns), max(durations_ns),
    )  # fmt: skip
    assert single.mean_ns == together.mean_ns
    assert single.quantile_ns(0.5) == pytest.approx(together.quantile_ns(0.5), rel=0.0101)


def test_of_nothing_nothing_is_known() -> None:
    nothing = Durations()
    nothing.add_all(np.zeros(0, dtype=np.int64))
    assert (nothing.mean_ns, nothing.quantile_ns(0.5)) == (None, None)


def test_what_is_beyond_the_bins_still_has_a_place() -> None:
    durations = Durations()
    for duration_ns in (0, 5 * 10**12):
        durations.add(duration_ns)
    assert durations.longest_ns == 5 * 10**12
    assert durations.quantile_ns(0.01) == pytest.approx(1_000, rel=0.01)
