from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.emission_log import EmissionLog


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_times_kept_once_for_a_team_are_each_members_own(seed: int, is_asked: bool) -> None:
    """Join, leave, emit alone and emit twice in any order, with and without reads in between."""
    draw, tokens = random.Random(seed), EmissionLog(4)
    tokens.grow(12)
    events: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(1, 9)}
    in_engine: dict[int, int] = dict.fromkeys(events, 0)
    team = np.array(list(events), dtype=np.int64)
    is_in_engine = True
    for at_ns in range(1, 60):
        if draw.random() < 0.4:
            team = np.array(draw.sample(list(events), draw.randint(1, 8)), dtype=np.int64)
        if draw.random() < 0.1:
            is_in_engine = not is_in_engine
        if draw.random() < 0.1:
            slot = draw.randint(1, 8)
            kept, _ = tokens.events_of(slot)
            before = kept.tolist()
            tokens.end(slot)
            tokens.begin(slot)
            assert kept.tolist() == before == [t_ns for t_ns, _ in events[slot]]
            events[slot], in_engine[slot] = [], 0
        some = [draw.choice(team.tolist()) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.2:
            counts = [draw.randint(1, 3) for _ in some]
            tokens.emit_several(np.array(some), counts, at_ns)
            for slot, num in zip(some, counts, strict=True):
                events[slot].append((at_ns, num))
        else:
            last_ns = {slot: events[slot][-1][0] for slot in team.tolist() if events[slot]}
            joining = tokens.gather(team, is_in_engine=is_in_engine)
            stayed = set(team.tolist()) - set(joining)
            assert all(tokens.last_ns == last_ns[slot] for slot in stayed)
            tokens.emit(at_ns)
            for slot in team.tolist():
                events[slot].append((at_ns, 1))
                in_engine[slot] = at_ns if is_in_engine else in_engine[slot]
        if is_asked:
            assert tokens.num.sum() == sum(n for slot in events for _, n in events[slot])
    for slot, told in events.items():
        times_ns, counts_of = tokens.events_of(slot)
        assert list(zip(times_ns, counts_of, strict=True)) == told
        assert tokens.edges_of(slot) == (told[-1][0] if told else 0, in_engine[slot])
        assert tokens.num[slot] == sum(num for _, num in told)
        assert tokens.times_ns[slot] == times_ns
        assert (tokens.edge_ns[slot], tokens.engine_ns[slot]) == tokens.edges_of(slot)
