from __future__ import annotations

import random
from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.collector.rows import KeptRows, Rows
from inferscope.collector.slots import SlotMap
from inferscope.collector.tokens import outsiders
from inferscope.cost.batch import PlainTeams, Team
from inferscope.records import DECODE, PREFILL, RECOMPUTED, VERIFY, StepSlices

FIELDS = ("num_tokens", "num_rows", "chunks", "chunk_tokens", "num_single")


def some_slices(draw: random.Random) -> tuple[StepSlices, np.ndarray]:
    """Return a step, mostly of plain decodes and a few prefills, and its requests' slots."""
    num = draw.randint(1, 9)
    phases = [draw.choice([DECODE] * 9 + [PREFILL] * 3 + [VERIFY]) for _ in range(num)]
    tokens = [
        draw.choice([1, 1, 5, 300]) if phase == PREFILL else draw.choice([1] * 30 + [0, 2])
        for phase in phases
    ]
    sampled = [draw.choice([1] * 30 + [0, 2]) for _ in range(num)]
    slices = StepSlices(
        0,
        0,
        0,
        array("I", range(num)).tobytes(),
        bytes(phases),
        array("I", tokens).tobytes(),
        array("I", [draw.randint(0, 4000) for _ in range(num)]).tobytes(),
        b"",
        array("H", sampled).tobytes(),
    )
    return slices, np.array(draw.sample(range(1, 50), num), dtype=np.int64)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_a_team_read_as_bytes_is_the_team_read_number_by_number(seed: int) -> None:
    draw, teams = random.Random(seed), PlainTeams()
    slices, slots = some_slices(draw)
    rows = Rows(slices, slots, teams)
    tokens = np.frombuffer(slices.tokens, dtype="<u4").astype(np.int64)
    sampled = np.frombuffer(slices.sampled, dtype="<u2").astype(np.int64)
    told = Team(np.maximum(tokens, 1), sampled)
    for name in FIELDS:
        assert getattr(rows.team, name) == getattr(told, name), name
    assert rows.team.tokens.tolist() == told.tokens.tolist()
    assert rows.team.sampled.tolist() == sampled.tolist()
    assert rows.prefills == [at for at, phase in enumerate(slices.phases) if phase == PREFILL]
    assert rows.num_prefill_tokens == sum(tokens[rows.prefills].tolist())
    decodes = [at for at in range(len(slots)) if at not in rows.prefills]
    if rows.is_simple:
        assert (tokens[decodes] == 1).all()
        assert (sampled[decodes] == 1).all()
        assert VERIFY not in slices.phases
        assert Rows(slices, slots, teams, like=rows).team is rows.team
    elif VERIFY not in slices.phases and len(rows.prefills) < 4 and (tokens > 0).all():
        plain = (tokens[decodes] == 1).all() and (sampled[decodes] == 1).all()
        assert not plain or (sampled[tokens == 1] != 1).any()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_what_others_have_done_before_is_read_as_if_nobody_had(seed: int) -> None:
    draw, kept = random.Random(seed), KeptRows()
    slices, slots = some_slices(draw)
    flags = bytes(draw.choice([0, RECOMPUTED]) for _ in slots) if draw.random() < 0.5 else b""
    slices = replace(slices, flags=flags)
    others = slots + 50
    if draw.random() < 0.3:
        others[-1] = others[0]  # one of them has two rows
    before = kept.read(slices, slots)
    rows, fresh = kept.read(slices, others), Rows(slices, others, PlainTeams())
    assert (rows.team is before.team) >= (len(set(others.tolist())) == len(others))
    for name in Rows.__slots__:
        ours, theirs = getattr(rows, name), getattr(fresh, name)
        if name == "team":
            assert ours.sampled.tolist() == theirs.sampled.tolist()
            ours, theirs = ([getattr(team, field) for field in FIELDS] for team in (ours, theirs))
        is_same = np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
        assert is_same, name


def test_a_team_is_kept_while_others_leave_and_let_go_when_one_of_it_does() -> None:
    slots, kept = SlotMap(), KeptRows()
    for index in range(4):
        slots.put(index, 10 + index)
    slices, _ = some_slices(random.Random(3))
    columns = {"phases": bytes([DECODE] * 3), "tokens": b"", "contexts": b"", "sampled": b""}
    slices = replace(slices, requests=array("I", range(3)).tobytes(), **columns)
    assert kept.rows_of(slices, slots) is None
    rows = Rows(slices, slots.slots(np.arange(3, dtype=np.uint32)), kept.teams)
    kept.keep(rows)
    assert kept.rows_of(slices, slots) is rows
    slots.drop(3)
    assert kept.rows_of(slices, slots) is rows
    slots.drop(1)
    assert kept.rows_of(slices, slots) is None
    slots.put(1, 20)  # known again, as somebody else
    assert kept.rows_of(slices, slots) is None


@given(st.lists(st.integers(0, 19), unique=True), st.sets(st.integers(0, 19)))
def test_outsiders_are_those_who_are_not_in(slots: list[int], members: set[int]) -> None:
    is_in = np.isin(np.arange(20), list(members))
    expected = [slot for slot in slots if slot not in members]
    assert outsiders(np.array(slots, dtype=np.int64), is_in) == expected
