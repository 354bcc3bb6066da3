from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.counterfactual import Delay, TableBounds, delays
from inferscope.attribution.split import price
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.cost.pure_steps import TOLERANCE, Bounds
from inferscope.cost.step_table import StepTable
from inferscope.records import Shape
from tests.attribution.games import any_model, batches, co_batched_ns, priced_of, step_ns

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16, 16, 16)
H200 = roofline(LLAMA_8B, peaks_of("NVIDIA H200"))


class Case:
    """A step to explain: slices as (tokens, context, is prefill, recomputed tokens)."""

    def __init__(self, slices: list[tuple[int, int, bool, int]], model: StepModel = H200) -> None:
        self.model = model
        tokens = np.array([s[0] for s in slices])
        self.prefills = [at for at, s in enumerate(slices) if s[2]]
        contexts = np.array([s[1] for s in slices])
        self.batch = table = StepTable.of(tokens, contexts, np.ones_like(tokens), self.prefills)
        recomputed = np.array([s[3] for s in slices])
        table.recomputed = recomputed if recomputed.any() else None
        self.priced = price(model, table)
        self.modelled_ns = self.priced.modelled_ns.item()

    def explain(
        self, delay_ns: int, healthy_ratio: float = 1.0, bounds: Bounds | None = None
    ) -> Delay:
        most = None if bounds is None else TableBounds(np.array([bounds.step_ns]), bounds.own_ns)
        return delays(self.priced, np.array([delay_ns]), np.array([healthy_ratio]), most)[0]

    def parts(self, delay: Delay) -> np.ndarray:
        """Return the parts of each member, [members, 5]."""
        num = len(delay.own_ns)
        is_prefill = np.isin(np.arange(num), self.prefills)
        again = np.zeros(num, np.int64) if delay.recompute_ns is None else delay.recompute_ns
        return np.stack(
            [
                delay.own_ns,
                again,
                co_batched_ns(delay),
                np.where(is_prefill, delay.prefill_interference_ns, delay.decode_interference_ns),
                np.full(num, delay.excess_ns),
            ],
            axis=1,
        )


@st.composite
def slices(draw: st.DrawFn) -> tuple[int, int, bool, int]:
    if draw(st.booleans()):
        return 1, draw(st.integers(0, 100_000)), False, 0
    tokens = draw(st.integers(1, 4000))
    return (
        tokens,
        draw(st.integers(0, 100_000)),
        True,
        draw(st.sampled_from([0, tokens // 2, tokens])),
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(slices(), min_size=1, max_size=40),
    st.integers(1, 10**12),
    st.floats(0.01, 100, allow_nan=False),
)
def test_every_member_s_parts_sum_to_the_delay_and_none_is_negative(
    members: list[tuple[int, int, bool, int]], delay_ns: int, healthy_ratio: float
) -> None:
    case = Case(members)
    parts = case.parts(case.explain(delay_ns, healthy_ratio))
    assert (parts.sum(axis=1) == delay_ns).all()
    assert (parts >= 0).all()
    prefills = case.prefills
    for of_class in (prefills, [at for at in range(len(members)) if at not in prefills]):
        if len(of_class) == 1:
            assert parts[of_class[0], 2] == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(slices(), min_size=1, max_size=20),
    st.integers(1, 10**11),
    st.lists(st.floats(1, 1e11) | st.just(math.inf), min_size=20, max_size=20),
    st.floats(1, 1e11) | st.just(math.inf),
)
def test_bounded_parts_sum_to_the_delay_and_keep_the_bounds(
    members: list[tuple[int, int, bool, int]], delay_ns: int, of_each: list[float], step_ns: float
) -> None:
    case = Case(members)
    bounds = Bounds(np.array(of_each[: len(members)]), step_ns)
    delay = case.explain(delay_ns, bounds=bounds)
    parts = case.parts(delay)
    assert (parts.sum(axis=1) == delay_ns).all()
    assert (parts >= 0).all()
    assert delay.explained_ns <= step_ns + 1
    assert (parts[:, :2].sum(axis=1) <= TOLERANCE * bounds.own_ns + 1).all()
    assert 0 <= delay.bounded_ns <= delay_ns
    if not case.prefills or len(case.prefills) == len(members):
        assert parts[:, 3].sum() == 0


def test_a_bound_of_the_prefill_is_interference_by_the_decodes() -> None:
    case = Case([(2000, 0, True, 0), *[(1, 900, False, 0)] * 8])
    whole_ns = round(case.modelled_ns)
    bounds = Bounds(np.array([whole_ns / 10, *[math.inf] * 8]))
    delay, before = case.explain(whole_ns, bounds=bounds), case.explain(whole_ns)
    assert delay.own_ns[0] == pytest.approx(whole_ns / 10, rel=0.01)
    assert delay.prefill_interference_ns == pytest.approx(0.9 * whole_ns, rel=0.01)
    assert delay.decode_interference_ns == before.decode_interference_ns
    assert delay.bounded_ns == before.own_ns[0] - delay.own_ns[0]


def test_a_decode_alone_has_only_own_time() -> None:
    case = Case([(1, 900, False, 0)])
    delay = case.explain(round(case.modelled_ns))
    assert delay.own_ns[0] == pytest.approx(case.modelled_ns, abs=1)
    assert co_batched_ns(delay)[0] == 0
    assert delay.decode_interference_ns == delay.excess_ns == 0


def test_decodes_alone_owe_each_other_what_they_add() -> None:
    case = Case([(1, 900, False, 0)] * 8)
    delay = case.explain(round(case.modelled_ns))
    assert (co_batched_ns(delay) > 0).all()
    assert delay.decode_interference_ns == 0


def test_a_chunk_holds_up_the_decodes_more_than_they_hold_up_the_chunk() -> None:
    case = Case([(2000, 0, True, 0), *[(1, 900, False, 0)] * 8])
    delay = case.explain(round(case.modelled_ns))
    assert delay.decode_interference_ns > 10 * delay.prefill_interference_ns > 0


def test_prefills_alone_are_co_batched_not_interfered_with() -> None:
    case = Case([(1000, 0, True, 0), (500, 0, True, 0)])
    delay = case.explain(round(case.modelled_ns))
    assert delay.prefill_interference_ns == 0
    assert co_batched_ns(delay)[0] < co_batched_ns(delay)[1]


def test_recomputed_tokens_take_their_share_of_the_own_part() -> None:
    case = Case([(1000, 0, True, 250)])
    delay = case.explain(round(case.modelled_ns))
    assert delay.recompute_ns is not None
    assert delay.recompute_ns[0] == pytest.approx(case.modelled_ns / 4, rel=1e-6)


def test_only_what_a_healthy_step_would_not_take_is_excess() -> None:
    case = Case([(1, 900, False, 0)] * 4)
    healthy = case.explain(round(case.modelled_ns * 1.2), healthy_ratio=1.2)
    slow = case.explain(round(case.modelled_ns * 1.2) + 5_000_000, healthy_ratio=1.2)
    assert healthy.excess_ns <= 1
    assert slow.excess_ns - healthy.excess_ns == 5_000_000
    assert slow.own_ns.tolist() == healthy.own_ns.tolist()


def test_a_step_faster_than_the_model_scales_all_parts_down_alike() -> None:
    case = Case([(2000, 0, True, 0), *[(1, 900, False, 0)] * 8])
    usual, fast = case.explain(round(case.modelled_ns)), case.explain(round(case.modelled_ns / 2))
    assert fast.excess_ns == 0
    np.testing.assert_allclose(2 * fast.own_ns, usual.own_ns, atol=2)
    assert 2 * fast.decode_interference_ns == pytest.approx(usual.decode_interference_ns, abs=3)


def test_a_model_without_numbers_explains_nothing() -> None:
    zeros = np.zeros(100)
    case = Case(
        [(1, 5, False, 0), (7, 0, True, 0)], StepModel("none", "fit", zeros, zeros, 0, 0, 0, 0, 0)
    )
    delay = case.explain(1000)
    assert case.parts(delay).sum(axis=1).tolist() == [1000, 1000]


@settings(max_examples=150, deadline=None)
@given(any_model, batches(), st.data())
def test_class_times_are_those_of_the_step_with_one_class_alone(
    model: StepModel, batch: StepTable, data: st.DataObject
) -> None:
    num = len(batch.context)
    prefills = sorted(data.draw(st.sets(st.integers(0, num - 1))))
    decodes = [at for at in range(num) if at not in prefills]
    priced = priced_of(model, batch, prefills)
    delay = delays(priced, np.rint(priced.modelled_ns).astype(np.int64), np.ones(1))[0]
    if prefills:
        of_prefills = step_ns(model, batch, tuple(prefills))
        assert delay.prefill_class_ns == pytest.approx(of_prefills, rel=1e-9, abs=2)
    if decodes:
        of_decodes = step_ns(model, batch, tuple(decodes))
        assert delay.decode_class_ns == pytest.approx(of_decodes, rel=1e-9, abs=2)
    for at in range(num):
        mine_ns = step_ns(model, batch, (at,))
        assert delay.own_ns.item(at) == pytest.approx(mine_ns, rel=1e-9, abs=2)


def test_what_decoding_costs_once_is_paid_by_a_decode_alone_and_not_by_a_prefill() -> None:
    model = replace(H200, decoding_ns=5e5)
    slices = [(1, 900, False, 0), (1, 300, False, 0), (200, 0, True, 0)]
    one, other = Case(slices, model), Case(slices)
    paid, free = one.explain(round(one.modelled_ns)), other.explain(round(other.modelled_ns))
    assert (paid.own_ns - free.own_ns).tolist() == pytest.approx([5e5, 5e5, 0], abs=2)
    assert paid.decode_class_ns - free.decode_class_ns == pytest.approx(5e5, abs=2)
    assert paid.prefill_class_ns == pytest.approx(free.prefill_class_ns, abs=2)
