from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution.marginal import BlameWeights, blame_weights, marginal_ns
from inferscope.attribution.split import parts_ns, price
from inferscope.cost.model import StepModel
from inferscope.cost.step_table import StepTable
from tests.attribution.games import (
    H200,
    MODELS,
    N,
    any_model,
    batch_of,
    batches,
    model_of,
    priced_of,
    step_ns,
)

Floats = NDArray[np.float64]
Step = tuple[StepTable, list[int]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A batch and its prefills, single tokens among them, and decodes of several tokens."""
    batch = draw(batches(chunks=(0, 7), singles=(0, 9)))
    num = len(batch.context)
    flags = draw(st.lists(st.booleans(), min_size=num, max_size=num))
    return batch, [at for at in range(num) if flags[at]]


def classes(step: Step) -> list[tuple[int, ...]]:
    batch, prefills = step
    decodes = tuple(at for at in range(len(batch.context)) if at not in prefills)
    return [members for members in (tuple(prefills), decodes) if members]


def saved_ns(model: StepModel, batch: StepTable, members: tuple[int, ...], member: int) -> float:
    rest = tuple(other for other in members if other != member)
    return max(0.0, step_ns(model, batch, members) - step_ns(model, batch, rest))


def weights(model: StepModel, step: Step) -> BlameWeights:
    return blame_weights(priced_of(model, *step))


@settings(max_examples=120, deadline=None)
@given(any_model, steps())
def test_marginal_times_are_those_of_the_definition(model: StepModel, step: Step) -> None:
    batch, _ = step
    everyone = tuple(range(len(batch.context)))
    whole_ns = step_ns(model, batch, everyone)
    priced = priced_of(model, *step)
    for members in (everyone, *classes(step)):
        of_class = price(model, priced.table.members(np.array(members)))
        for at, found in zip(members, marginal_ns(of_class).tolist(), strict=True):
            expected = saved_ns(model, batch, members, at)
            assert found == pytest.approx(expected, abs=1e-9 * whole_ns)


@settings(max_examples=40, deadline=None)
@given(steps(), st.data())
def test_no_weight_is_negative_even_where_more_tokens_cost_less(
    step: Step, data: st.DataObject
) -> None:
    falls_at = data.draw(st.integers(1, 4000))
    falling = model_of(np.where(falls_at < N, 1e6, 3e6 * np.minimum(N, 1)))
    for weight in (marginal_ns(priced_of(falling, *step)), *weights(falling, step)):
        assert (weight >= 0).all()


@settings(max_examples=120, deadline=None)
@given(any_model, steps())
def test_weights_sum_to_the_wait(model: StepModel, step: Step) -> None:
    batch, _ = step
    everyone = tuple(range(len(batch.context)))
    whole_ns = step_ns(model, batch, everyone)
    weight = weights(model, step)
    close = {"rel": 1e-9, "abs": 1e-9 * whole_ns}
    assert weight.queue.sum() == pytest.approx(whole_ns, **close)
    for members in classes(step):
        class_ns = step_ns(model, batch, members)
        others = tuple(at for at in everyone if at not in members)
        if others:
            waited_ns = whole_ns - step_ns(model, batch, others)
            of_class = weight.interference[list(members)].sum()
            assert of_class == pytest.approx(waited_ns, **close)
        if len(members) > 1:
            alone_ns = [step_ns(model, batch, (at,)) for at in members]
            shortest = int(np.argmin(alone_ns))
            waited_ns = class_ns - alone_ns[shortest]
            waited_ns += saved_ns(model, batch, members, members[shortest])
            assert weight.co_batched[list(members)].sum() == pytest.approx(waited_ns, **close)


@settings(max_examples=120, deadline=None)
@given(any_model, steps())
def test_of_single_tokens_alike_the_longer_context_weighs_no_less(
    model: StepModel, step: Step
) -> None:
    """Requests of one token differ by their context alone: more of it, more of every wait."""
    batch, prefills = step
    singles = [at for at in range(len(batch.context)) if batch.tokens[at] == 1]
    weight = weights(model, step)
    for members in (set(prefills), set(range(len(batch.context))) - set(prefills)):
        plain = [at for at in singles if at in members and batch.sampled[at] == 1]
        rising = sorted(plain, key=lambda at: batch.context[at])
        for kind in weight:
            assert (np.diff(kind[rising]) >= -1e-6 * max(1.0, kind.max())).all()


def test_where_no_single_absence_saves_anything_the_shapley_shares_weigh() -> None:
    stairs = replace(model_of(1e6 * np.ceil(N / 64)), decoding_ns=3e5)
    batch = batch_of([40, 35, *[1] * 40], [0, 0, *range(40)], [1] * 42)
    priced = priced_of(stairs, batch, [0, 1])
    assert not marginal_ns(priced).any()
    weight = blame_weights(priced)
    np.testing.assert_allclose(weight.queue, parts_ns(priced))
    assert weight.interference[0] > weight.interference[1] > 0
    assert weight.co_batched[2:].tolist() == pytest.approx([weight.co_batched[2]] * 40)


# --- one culprit is named with the time that its absence would save ---------------------------


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("num_decodes", [64, 200])
def test_a_long_chunk_beside_decodes_answers_for_what_the_step_would_save(
    model: str, num_decodes: int
) -> None:
    cost = MODELS[model]
    batch = batch_of(
        [10_000, *[1] * num_decodes],
        [0, *range(300, 300 + 10 * num_decodes, 10)],
        [1] * (num_decodes + 1),
    )
    everyone = tuple(range(num_decodes + 1))
    whole_ns = step_ns(cost, batch, everyone)
    but_for = saved_ns(cost, batch, everyone, 0) / whole_ns
    queue = weights(cost, (batch, [0])).queue
    assert queue[0] / queue.sum() == pytest.approx(but_for, abs=0.05)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_decode_with_a_long_context_answers_for_what_the_others_would_save(model: str) -> None:
    cost = MODELS[model]
    num = 64
    batch = batch_of([1] * num, [100_000, *range(300, 930, 10)], [1] * num)
    everyone = tuple(range(num))
    waited_ns = step_ns(cost, batch, everyone) - step_ns(cost, batch, (5,))
    but_for = saved_ns(cost, batch, everyone, 0) / waited_ns
    of_others = np.delete(weights(cost, (batch, [])).co_batched, 5)
    assert of_others[0] / of_others.sum() == pytest.approx(but_for, abs=0.05)


def test_a_context_that_turns_9_ms_into_49_ms_is_blamed_for_them() -> None:
    cost = replace(H200, single_ns=400.0)
    batch = batch_of([1] * 64, [100_000, *[300] * 63], [1] * 64)
    everyone = tuple(range(64))
    with_it, without = step_ns(cost, batch, everyone), step_ns(cost, batch, everyone[1:])
    assert without < 15e6 < 45e6 < with_it
    but_for = (with_it - without) / (with_it - step_ns(cost, batch, (5,)))
    of_others = np.delete(weights(cost, (batch, [])).co_batched, 5)
    assert of_others[0] / of_others.sum() == pytest.approx(but_for, abs=0.05)
