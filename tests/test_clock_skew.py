from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.clock_skew import LEAST_SKEW_NS, Offsets, skew_between_ns

S = 1_000_000_000
OFFSET = st.integers(-(10**15), 10**15)
NOISE = st.integers(0, LEAST_SKEW_NS // 4)
LARGE = st.one_of(st.integers(-(10**15), -LEAST_SKEW_NS), st.integers(LEAST_SKEW_NS, 10**15))


def offsets(first_ns: int, last_ns: int, first_s: float = 0, last_s: float = 60) -> Offsets:
    return Offsets(first_ns, last_ns, round(first_s * S), round(last_s * S))


@given(OFFSET, LARGE, NOISE, NOISE)
def test_an_offset_of_a_namespace_is_found_to_the_noise(
    here_ns: int, skew_ns: int, noise_ns: int, other_noise_ns: int
) -> None:
    mine = offsets(here_ns + 2 * skew_ns + noise_ns, here_ns + 2 * skew_ns + other_noise_ns)
    found_ns = skew_between_ns(mine, offsets(here_ns, here_ns))
    assert found_ns == 2 * skew_ns + min(noise_ns, other_noise_ns)


@given(OFFSET, LARGE, st.booleans(), st.booleans())
def test_a_wall_clock_that_is_set_is_no_skew(
    here_ns: int, jump_ns: int, is_mine_older: bool, is_theirs_older: bool
) -> None:
    """It is set once: before a process starts, while it runs, or after its last reading."""
    before, after = offsets(here_ns, here_ns), offsets(here_ns + jump_ns, here_ns + jump_ns)
    across = offsets(here_ns, here_ns + jump_ns)
    mine = across if is_mine_older else after
    theirs = across if is_theirs_older else before
    assert not skew_between_ns(mine, theirs) or (mine, theirs) == (after, before)
    # Of two that never ran at once, one before and one after, nothing can be known.
    later = after._replace(first_real_ns=600 * S, last_real_ns=660 * S)
    assert skew_between_ns(later, before) is None
    assert skew_between_ns(before, later) is None


@given(OFFSET, LARGE, LARGE)
def test_both_are_found_apart_where_the_wall_clock_is_set_meanwhile(
    here_ns: int, skew_ns: int, jump_ns: int
) -> None:
    mine = offsets(here_ns + 2 * skew_ns, here_ns + 2 * skew_ns + jump_ns)
    found_ns = skew_between_ns(mine, offsets(here_ns, here_ns + jump_ns))
    assert found_ns in (0, 2 * skew_ns)
    assert found_ns or abs(abs(2 * skew_ns) - abs(jump_ns)) < LEAST_SKEW_NS
