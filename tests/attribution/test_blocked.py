from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.blocked import BlockedTime

TIME = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(st.integers(-5, 60), TIME), max_size=12)
"""Lengths and ends; damaged records may hold anything."""


@given(INTERVALS, TIME, TIME, TIME)
def test_blocked_time_is_what_the_union_of_the_intervals_has_within(
    intervals: list[tuple[int, int]], since_ns: int, cut_ns: int, until_ns: int
) -> None:
    intervals.sort(key=lambda interval: interval[1])
    blocked, covered = BlockedTime(), set[int]()
    furthest_ns = -100
    for length_ns, end_ns in intervals:
        blocked.add(3, length_ns, end_ns)
        covered |= set(range(max(end_ns - length_ns, furthest_ns), end_ns))
        furthest_ns = max(furthest_ns, *(covered or {furthest_ns}))
    since_ns, cut_ns, until_ns = sorted((since_ns, cut_ns, until_ns))
    expected = len(covered & set(range(since_ns, until_ns)))
    assert blocked.within_ns(3, since_ns, until_ns) == expected
    parts = [blocked.within_ns(3, since_ns, cut_ns), blocked.within_ns(3, cut_ns, until_ns)]
    assert sum(parts) == expected
    assert blocked.within_ns(4, since_ns, until_ns) == 0
    blocked.forget(3)
    assert blocked.within_ns(3, since_ns, until_ns) == 0
