from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.probe import split_phases
from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED

counts = st.integers(0, 40)


@given(counts, counts, counts, counts)
def test_each_token_has_the_phase_of_its_position(
    start: int, num_tokens: int, seen: int, num_prompt: int
) -> None:
    end = start + num_tokens
    rows = list(split_phases(start, end, seen=seen, num_prompt=num_prompt))
    assert [at for _, first, stop, _ in rows for at in range(first, stop)] == [*range(start, end)]
    for phase, first, stop, flags in rows:
        for at in range(first, stop):
            assert phase == (PREFILL if at < max(seen, num_prompt) else DECODE)
            assert bool(flags & RECOMPUTED) == (at < seen)
        is_complete = phase == PREFILL and stop == max(seen, num_prompt)
        assert bool(flags & LAST_CHUNK) == is_complete
