from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.emission_log import EmissionLog


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_emissions_written_at_once_are_each_requests_own(seed: int, is_flushed: bool) -> None:
    """Emit one or several tokens, end and begin in any order, with flushes in between or not."""
    draw, tokens = random.Random(seed), EmissionLog(4)
    tokens.grow(12)
    events: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(1, 9)}
    ended: set[int] = set()
    gaps, expected_gaps = 0, 0
    for slot in events:
        tokens.begin(slot)
    for at_ns in range(1, 60):
        slots = draw.sample(list(events), draw.randint(1, 8))
        counts = None
        if draw.random() < 0.3:
            slots += draw.choices(slots, k=2)  # a request may occur more than once
            counts = np.array([draw.randint(1, 3) for _ in slots], dtype=np.uint32)
        expected = [events[slot][-1][0] if events[slot] else 0 for slot in slots]
        before_ns = tokens.emit(np.array(slots), counts, at_ns)
        if not ended:
            assert before_ns.tolist() == expected
        expected_gaps += sum(at_ns - before for before in before_ns.tolist())
        for slot, num in zip(slots, [1] * len(slots) if counts is None else counts, strict=True):
            if slot not in ended:
                events[slot].append((at_ns, int(num)))
        if draw.random() < 0.1:
            slot = draw.randint(1, 8)
            tokens.end(slot)
            ended.add(slot)
        if is_flushed and draw.random() < 0.3:
            of_each_ns, of_previous_ns = tokens.flush()
            gaps += int((of_each_ns - of_previous_ns).sum())
            for slot in ended:
                kept, _ = tokens.events_of(slot)
                before = kept.tolist()
                tokens.begin(slot)
                assert kept.tolist() == before == [t_ns for t_ns, _ in events[slot]]
                events[slot] = []
            ended.clear()
    of_each_ns, of_previous_ns = tokens.flush()
    assert gaps + int((of_each_ns - of_previous_ns).sum()) == expected_gaps
    for slot, expected_events in events.items():
        times_ns, counts_of = tokens.events_of(slot)
        assert list(zip(times_ns, counts_of, strict=True)) == expected_events
        assert tokens.num[slot] == sum(num for _, num in expected_events)
        assert tokens.times_ns[slot] == times_ns
        if slot not in ended:
            assert tokens.edge_ns[slot] == (expected_events[-1][0] if expected_events else 0)
