"""Equality of the bytes and FLOPs of steps with those of their slices, however counted."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.weights import weight_shares
from inferscope.cost.counts import rates_of
from inferscope.fold.amounts import count_rows
from inferscope.fold.rows import Columns
from inferscope.fold.steps import Joined
from inferscope.fold.work_totals import COMPUTE_NS, FLOPS, READ_BYTES, TOKENS, WRITE_BYTES
from inferscope.records import DECODE, PREFILL, VERIFY, Shape, StepSlices

DENSE = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16)
WINDOWED = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16, window_tokens=5, num_full_layers=1)
_SLICE = st.tuples(
    st.sampled_from([DECODE, DECODE, DECODE, PREFILL, VERIFY]),
    st.sampled_from([1, 7]),
    st.integers(0, 40),
)
"""Phase, tokens of a slice that does not decode, and context."""
Slices = list[tuple[int, int, int]]


def sliced(rows: Slices) -> Joined:
    """Return a step with these slices."""
    num = len(rows)
    tokens = [1 if phase == DECODE else of for phase, of, _ in rows]
    slices = StepSlices(
        1,
        0,
        0,
        array("I", range(num)).tobytes(),
        bytes(phase for phase, _, _ in rows),
        array("I", tokens).tobytes(),
        array("I", [context for _, _, context in rows]).tobytes(),
        b"",
        array("H", [1] * num).tobytes(),
    )
    unused: Any = None
    return Joined(unused, np.arange(num), True, slices, "none", 0, 0, 0)


@pytest.mark.parametrize("shape", [DENSE, WINDOWED, None])
@given(steps_slices=st.lists(st.lists(_SLICE, min_size=1, max_size=9), min_size=1, max_size=5))
def test_steps_move_and_compute_what_their_slices_do(
    shape: Shape | None, steps_slices: list[Slices]
) -> None:
    rates = rates_of(shape)
    steps = [sliced(slices) for slices in steps_slices]
    rows = Columns(steps)
    counted = count_rows(rows, np.arange(len(rows.slots)), [step.slices for step in steps], rates)
    for at, moved in enumerate(counted.moved.tolist()):
        of = rows.rows(at)
        here, tokens, sampled = counted.amounts[:, of], rows.tokens[of], rows.sampled[of]
        assert here[COMPUTE_NS].tolist() == list(range(of.start, of.stop))
        assert here[TOKENS].tolist() == tokens.tolist()
        if rates is None:
            assert not any(moved)
            assert not here[[FLOPS, READ_BYTES, WRITE_BYTES]].any()
            continue
        columns = tokens.tolist(), rows.contexts[of].tolist(), sampled.tolist()
        own = list(zip(*columns, strict=True))
        assert here[FLOPS].tolist() == [rates.flops.of_slices(*each) for each in own]
        assert here[WRITE_BYTES].tolist() == [rates.hbm.writes(n, m) for n, _, m in own]
        weights = here[READ_BYTES] - [rates.hbm.reads(*each) for each in own]
        expected = weight_shares(rates.hbm.weights, tokens, sampled)
        assert weights.sum() == expected.sum()
        assert np.abs(weights - expected).max() <= 3 * len(own)
        is_prefill = rows.phases[of] == PREFILL
        assert moved == [
            here[column, chosen].sum()
            for column in (READ_BYTES, WRITE_BYTES, FLOPS)
            for chosen in (is_prefill, ~is_prefill)
        ]
