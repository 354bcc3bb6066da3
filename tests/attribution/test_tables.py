from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from inferscope.attribution.counterfactual import Delay, TableBounds, delays
from inferscope.attribution.marginal import blame_weights
from inferscope.attribution.split import padding_ns, parts_ns, price, shares_ns
from inferscope.cost.model import MAX_TOKENS, StepModel
from inferscope.cost.step_table import RowsOfMembers, StepTable
from tests.attribution.games import Ints, N, any_model, model_of

MS = 1_000_000


class Step(NamedTuple):
    """One step by member, and its rows."""

    tokens: list[int]
    context: list[int]
    sampled: list[int]
    is_prefill: list[bool]
    recomputed: list[int]
    cut: list[int]
    """[members], tokens of a second row; 0 where there is none."""
    measured_ns: int
    delay_ns: int
    padded_tokens: int
    healthy: float
    most_ns: float
    """Bound of the step; infinite where there is none."""
    most_own_ns: list[float]
    """[members]."""


bounds = st.just(np.inf) | st.floats(1e3, 1e9)


@st.composite
def any_step(draw: st.DrawFn) -> Step:
    num_chunks = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))
    num_singles = draw(st.integers(int(not num_chunks), 9))
    sizes = draw(st.lists(st.integers(2, 3000), min_size=num_chunks, max_size=num_chunks))
    tokens = draw(st.permutations([*sizes, *[1] * num_singles]))
    num = len(tokens)

    def each(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=num, max_size=num))

    contexts = each(st.integers(0, 9000) | st.integers(300, 304))
    sampled = [1] * num if draw(st.booleans()) else each(st.integers(0, 3))
    prefills = [of > 1 for of in tokens]
    if draw(st.booleans()):
        prefills = [draw(st.booleans()) for _ in tokens]
    recomputed = [0] * num
    cut = [0] * num
    if draw(st.booleans()):
        of_prefills = [of * has for of, has in zip(tokens, prefills, strict=True)]
        recomputed = [draw(st.integers(0, of)) for of in of_prefills]
        cut = [draw(st.integers(0, of - 1)) for of in tokens]
    return Step(
        tokens, contexts, sampled, prefills, recomputed, cut,
        draw(st.integers(1, 10**11)), draw(st.integers(0, 10**11)),
        draw(st.sampled_from([0, 0, 64, 4096])), draw(st.floats(0.2, 3.0)),
        draw(bounds), draw(st.lists(bounds, min_size=num, max_size=num)),
    )  # fmt: skip


steps_lists = st.lists(any_step(), min_size=1, max_size=6)


def table_of(steps: list[Step]) -> StepTable:
    def column(name: str) -> Ints:
        return np.array([value for step in steps for value in getattr(step, name)])

    tokens, cut = column("tokens"), column("cut")
    rows = None
    sizes = np.array([len(step.tokens) for step in steps])
    if cut.any():
        member = np.concatenate([np.arange(len(tokens)), cut.nonzero()[0]])
        order = member.argsort(kind="stable")
        of_rows = np.concatenate([tokens - cut, cut[cut > 0]])
        second = [int(np.count_nonzero(step.cut)) for step in steps]
        rows = RowsOfMembers(member[order], of_rows[order], sizes + np.array(second))
    recomputed = column("recomputed")
    return StepTable(
        tokens, column("context"), column("sampled"), column("is_prefill").astype(np.bool_), sizes,
        recomputed=recomputed if recomputed.any() else None, rows=rows,
    )  # fmt: skip


def found_in(model: StepModel, steps: list[Step]) -> list[tuple[float, int, list[int], Delay]]:
    """Return T(S), padding, shares by row and the delay of each step of one table."""
    table = table_of(steps)
    priced = price(model, table)
    measured = np.array([step.measured_ns for step in steps])
    padding = padding_ns(priced, measured, np.array([step.padded_tokens for step in steps]))
    shares = shares_ns(priced, measured - padding)
    explained = delays(
        priced,
        np.array([step.delay_ns for step in steps]),
        np.array([step.healthy for step in steps]),
        TableBounds(
            np.array([step.most_ns for step in steps]),
            np.array([most for step in steps for most in step.most_own_ns]),
        ),
    )
    of_rows = np.split(shares, np.cumsum(table.row_sizes)[:-1])
    columns = priced.modelled_ns.tolist(), padding.tolist(), of_rows, explained
    return [(ns, of, rows.tolist(), delay) for ns, of, rows, delay in zip(*columns, strict=True)]


def facts_of(delay: Delay) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(delay).items()}


def assert_same(model: StepModel, steps: list[Step]) -> None:
    for step, (*numbers, delay) in zip(steps, found_in(model, steps), strict=True):
        ((*of_one, delay_of_one),) = found_in(model, [step])
        assert numbers == of_one
        assert facts_of(delay) == facts_of(delay_of_one)
        assert sum(numbers[2]) == step.measured_ns - numbers[1]


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(any_model, steps_lists)
def test_a_table_of_steps_is_split_and_explained_as_each_step_is(
    model: StepModel, steps: list[Step]
) -> None:
    assert_same(model, steps)


@settings(max_examples=40, deadline=None)
@given(any_model, steps_lists, st.data())
def test_a_part_of_a_table_is_the_table_of_these_steps(
    model: StepModel, steps: list[Step], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(steps) - 1))
    end = data.draw(st.integers(start + 1, len(steps)))
    measured = np.array([step.measured_ns for step in steps])
    part = price(model, table_of(steps).part(start, end))
    alone = price(model, table_of(steps[start:end]))
    assert part.modelled_ns.tolist() == alone.modelled_ns.tolist()
    busy_ns = measured[start:end]
    assert shares_ns(part, busy_ns).tolist() == shares_ns(alone, busy_ns).tolist()


@settings(max_examples=80, deadline=None)
@given(any_model, steps_lists)
def test_steps_take_by_the_model_what_their_parts_sum_to(
    model: StepModel, steps: list[Step]
) -> None:
    table = table_of(steps)
    priced = price(model, table)
    np.testing.assert_allclose(model.steps_ns(table), priced.modelled_ns, rtol=1e-9)
    by_step = np.add.reduceat(parts_ns(priced), table.first)
    np.testing.assert_allclose(by_step, priced.modelled_ns, rtol=1e-9)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(any_model, steps_lists)
def test_blame_weights_of_a_table_are_those_of_each_step(
    model: StepModel, steps: list[Step]
) -> None:
    found = blame_weights(price(model, table_of(steps)))
    of_each = [blame_weights(price(model, table_of([step]))) for step in steps]
    for columns, of_steps in zip(found, zip(*of_each, strict=True), strict=True):
        assert columns.tolist() == np.concatenate(of_steps).tolist()


@pytest.mark.parametrize("sizes", [[1], [5, 1, 1], [MAX_TOKENS, 9000, 1], [MAX_TOKENS + 5]])
def test_steps_that_the_model_knows_nothing_of_are_split_as_each_is(sizes: list[int]) -> None:
    """No cost at all, and more tokens than a model's tables hold."""
    num = len(sizes)
    step = Step(
        sizes, [9] * num, [1] * num, [of > 1 for of in sizes], [0] * num, [0] * num,
        1_000_003, 2 * MS, 0, 1.0, np.inf, [np.inf] * num,
    )  # fmt: skip
    assert_same(model_of(np.zeros_like(N)), [step, step])
    assert_same(model_of(1e6 + 1e4 * N), [step, step])
