"""What a step moves is what its slices move, however they are added up."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.weights import plain_shares
from inferscope.collector.moved import count, moved_by
from inferscope.collector.rows import Rows
from inferscope.collector.work import FLOPS, NUM_COLUMNS, READ_BYTES, WRITE_BYTES
from inferscope.cost.batch import Batch, PlainTeams
from inferscope.cost.counts import rates_of
from inferscope.records import DECODE, PREFILL, Shape, StepSlices

DENSE = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16)
WINDOWED = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16, window_tokens=5, num_full_layers=1)
slices = st.tuples(st.integers(0, 40), st.sampled_from([None, None, None, 1, 7]))
"""Context, and tokens of a prefill."""


def has_few_prefills(rows: list[tuple[int, int | None]]) -> bool:
    return sum(chunk is not None for _, chunk in rows) < 5


@pytest.mark.parametrize("shape", [DENSE, WINDOWED])
@given(rows=st.lists(slices, min_size=1, max_size=9).filter(has_few_prefills))
def test_a_step_moves_what_its_slices_move(
    shape: Shape, rows: list[tuple[int, int | None]]
) -> None:
    rates = rates_of(shape)
    assert rates is not None
    num, contexts = len(rows), [context for context, _ in rows]
    tokens = [1 if chunk is None else chunk for _, chunk in rows]
    told = StepSlices(
        1,
        0,
        0,
        array("I", range(num)).tobytes(),
        bytes(DECODE if chunk is None else PREFILL for _, chunk in rows),
        array("I", tokens).tobytes(),
        array("I", contexts).tobytes(),
        b"",
        array("H", [1] * num).tobytes(),
    )
    read_rows = Rows(told, np.arange(num), PlainTeams())
    assert read_rows.is_simple
    weights = plain_shares(rates.hbm.weights, read_rows.team)
    expected = np.zeros((2, NUM_COLUMNS), dtype=np.int64)
    prefilled = []
    for at, (context, chunk) in enumerate(rows):
        amounts = [0] * NUM_COLUMNS
        count(amounts, rates, (tokens[at], context, 1), weights.of(read_rows.team, at))
        expected[0 if chunk is not None else 1] += amounts
        if chunk is not None:
            prefilled.append(amounts)
    for _ in range(2):  # the second time by what was kept
        batch = Batch(read_rows.team, read_rows.by_request(np.array(contexts)))
        moved = moved_by(read_rows, batch, prefilled, rates=rates, weights=weights)
        columns = (READ_BYTES, WRITE_BYTES, FLOPS)
        assert moved == tuple(expected[phase, at] for at in columns for phase in (0, 1))
