"""Columns of a window, which equal each step's slices for any number of steps."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.rows import Columns
from inferscope.fold.slots import SlotMap
from inferscope.fold.steps import Joined
from inferscope.records import DECODE, DRAFT, PREFILL, RECOMPUTED, VERIFY, StepSlices


def some_step(draw: random.Random) -> Joined:
    """Return a step, mostly of plain decodes and a few prefills; some columns may be missing."""
    num = draw.randint(1, 9)
    phases = [draw.choice([DECODE] * 9 + [PREFILL] * 3 + [VERIFY, DRAFT]) for _ in range(num)]
    tokens = [draw.choice([0, 1, 1, 1, 5, 300]) for _ in range(num)]
    columns = [
        array("I", range(num)).tobytes(),
        bytes(phases),
        array("I", tokens).tobytes(),
        array("I", [draw.randint(0, 4000) for _ in range(num)]).tobytes(),
        bytes(draw.choice([0, 0, 0, RECOMPUTED]) for _ in range(num)),
        array("H", [draw.choice([1, 1, 1, 0, 2]) for _ in range(num)]).tobytes(),
    ]
    columns[1:] = [column if draw.random() < 0.9 else b"" for column in columns[1:]]
    slots = np.array([draw.randint(1, 20 if draw.random() < 0.2 else 500) for _ in range(num)])
    unused: Any = None
    is_single = len(set(slots.tolist())) == num
    return Joined(unused, slots, is_single, StepSlices(0, 0, 0, *columns), "none", 0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_columns_of_a_window_equal_its_slices_row_by_row(seed: int) -> None:
    draw = random.Random(seed)
    steps = [some_step(draw) for _ in range(draw.randint(1, 5))]
    columns = Columns(steps)
    for at, step in enumerate(steps):
        rows, num, of = columns.rows(at), len(step.slots), step.slices
        assert columns.slots[rows].tolist() == step.slots.tolist()
        phases = list(of.phases) or [0] * num
        tokens = array("I", of.tokens).tolist() or [0] * num
        contexts = array("I", of.contexts).tolist() or [0] * num
        sampled = array("H", of.sampled).tolist() or [0] * num
        again = [
            phase == PREFILL and flag & RECOMPUTED > 0
            for phase, flag in zip(phases, of.flags or bytes(num), strict=True)
        ]
        assert columns.phases[rows].tolist() == phases
        assert columns.tokens[rows].tolist() == tokens
        assert columns.contexts[rows].tolist() == contexts
        assert columns.sampled[rows].tolist() == sampled
        assert columns.is_again[rows].tolist() == again
        table, members = columns.table, columns.table.span(at, at + 1)
        slots = columns.member_slots[members].tolist()
        assert sorted(slots) == sorted(set(step.slots.tolist()))
        for position, slot in enumerate(slots, members.start):
            mine = [row for row, other in enumerate(step.slots.tolist()) if other == slot]
            assert table.tokens[position] == max(1, sum(tokens[row] for row in mine))
            assert table.context[position] == min(contexts[row] for row in mine)
            assert table.sampled[position] == sum(sampled[row] for row in mine)
            assert table.is_prefill[position] == any(phases[row] == PREFILL for row in mine)
            if table.recomputed is not None:
                lost = sum(tokens[row] for row in mine if again[row])
                assert table.recomputed[position] == lost


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_table_of_some_steps_is_that_of_them_alone(seed: int) -> None:
    draw = random.Random(seed)
    steps = [some_step(draw) for _ in range(draw.randint(1, 6))]
    chosen = sorted(draw.sample(range(len(steps)), draw.randint(1, len(steps))))
    table, slots = Columns(steps).steps(chosen, len(steps))
    alone = Columns([steps[at] for at in chosen])
    assert slots.tolist() == alone.member_slots.tolist()
    for name in ("tokens", "context", "sampled", "is_prefill", "sizes", "row_sizes", "visible"):
        assert getattr(table, name).tolist() == getattr(alone.table, name).tolist(), name
    again = alone.table.recomputed
    if table.recomputed is None or again is None:
        assert again is None
        assert table.recomputed is None or not table.recomputed.any()
    else:
        assert table.recomputed.tolist() == again.tolist()
    if table.rows is not None and alone.table.rows is not None:
        for ours, theirs in zip(table.rows, alone.table.rows, strict=True):
            assert ours.tolist() == theirs.tolist()


def test_slots_of_a_team_are_the_same_array_until_one_of_it_leaves() -> None:
    slots = SlotMap()
    for index in range(4):
        slots.put(index, 10 + index)
    requests = array("I", range(3)).tobytes()
    team = slots.team(requests)
    assert team is not None
    assert team.tolist() == [10, 11, 12]
    assert slots.team(requests) is team
    slots.drop(3)
    assert slots.team(requests) is team
    slots.drop(1)
    assert slots.team(requests) is None
    slots.put(1, 20)  # the index is reused for another request
    found = slots.team(requests)
    assert found is not None
    assert found.tolist() == [10, 20, 12]
    assert slots.team(array("I", [0, 0]).tobytes()) is None
