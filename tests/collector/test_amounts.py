"""What steps move and compute is what their slices do, however they are counted."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.weights import weight_shares
from inferscope.collector.amounts import count_rows
from inferscope.collector.rows import Rows
from inferscope.collector.steps import Joined, SplitStep
from inferscope.collector.work import COMPUTE_NS, FLOPS, READ_BYTES, TOKENS, WRITE_BYTES
from inferscope.cost.batch import PlainTeams
from inferscope.cost.counts import rates_of
from inferscope.records import DECODE, PREFILL, VERIFY, Shape, StepSlices

DENSE = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16)
WINDOWED = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16, window_tokens=5, num_full_layers=1)
_SLICE = st.tuples(
    st.sampled_from([DECODE, DECODE, DECODE, PREFILL, VERIFY]),
    st.sampled_from([1, 7]),
    st.integers(0, 40),
)
"""Phase, tokens if it does not decode, and context."""
Slices = list[tuple[int, int, int]]


def joined(told: Slices, teams: PlainTeams) -> Joined:
    """Return a step, split over two ranks."""
    num = len(told)
    tokens = [1 if phase == DECODE else of for phase, of, _ in told]
    slices = StepSlices(
        1,
        0,
        0,
        array("I", range(num)).tobytes(),
        bytes(phase for phase, _, _ in told),
        array("I", tokens).tobytes(),
        array("I", [context for _, _, context in told]).tobytes(),
        b"",
        array("H", [1] * num).tobytes(),
    )
    rows, none = Rows(slices, np.arange(num), teams), np.zeros(0, dtype=np.int64)
    shares_ns = [np.arange(num), np.full(num, 5)]
    delay = Delay(none, None, [], 0, 0, 0, 0)
    split = SplitStep(shares_ns, [0, 0], [0, 0], 0.0, "", rows.members, delay)
    unused: Any = None
    return Joined(unused, rows, rows.contexts(slices), slices, unused, 0, 0, split)


@pytest.mark.parametrize("shape", [DENSE, WINDOWED, None])
@given(told=st.lists(st.lists(_SLICE, min_size=1, max_size=9), min_size=1, max_size=5))
def test_steps_move_and_compute_what_their_slices_do(
    shape: Shape | None, told: list[Slices]
) -> None:
    rates, teams = rates_of(shape), PlainTeams()
    steps = [joined(slices, teams) for slices in told]
    counted = count_rows(steps, rates)
    start = 0
    for step, end, moved in zip(steps, counted.ends, counted.moved, strict=True):
        rows, here = step.rows, counted.amounts[:, start:end]
        start = end
        assert here[COMPUTE_NS].tolist() == [5 + at for at in range(len(rows.slots))]
        assert here[TOKENS].tolist() == rows.tokens.tolist()
        if rates is None:
            assert not any(moved)
            assert not here[[FLOPS, READ_BYTES, WRITE_BYTES]].any()
            continue
        columns = zip(
            rows.tokens.tolist(), step.contexts.tolist(), rows.sampled.tolist(), strict=True
        )
        own = list(columns)
        assert here[FLOPS].tolist() == [rates.flops.of_slices(*each) for each in own]
        assert here[WRITE_BYTES].tolist() == [rates.hbm.writes(n, m) for n, _, m in own]
        weights = here[READ_BYTES] - [rates.hbm.reads(*each) for each in own]
        expected = weight_shares(rates.hbm.weights, rows.tokens, rows.sampled)
        assert weights.sum() == expected.sum()
        assert np.abs(weights - expected).max() <= 3 * len(own)
        is_prefill = rows.phases == PREFILL
        assert moved == [
            here[column, of].sum()
            for column in (READ_BYTES, WRITE_BYTES, FLOPS)
            for of in (is_prefill, ~is_prefill)
        ]
