from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from inferscope.cost.flops import flop_rates
from inferscope.cost.shape import rank_shape
from inferscope.engine.attention import KvTensors, PagedAttention, RaggedBatch
from inferscope.engine.model import Model, build_model, forward
from inferscope.engine.shapes import parse_shape
from inferscope.engine.weights import random_weights
from inferscope.records import Shape
from tests.cost.naive import Slice, step_flops
from tests.cost.shapes import LLAMA_8B, SLICES, shape_of, shapes

STEPS = {
    "a prefill": [(9, 0)],
    "two prefills": [(9, 0), (4, 0)],
    "a chunk with context": [(5, 7)],
    "a decode": [(1, 11)],
    "decodes equally long": [(1, 11), (1, 11)],
    "decodes of any length": [(1, 3), (1, 19), (1, 0)],
    "a mixed step": [(1, 3), (1, 19), (8, 0), (6, 12)],
}
"""Slices as (tokens, context), those of one token first, as the engine lays them out."""


GQA, MQA = "tiny", "tiny,heads=4,kv_heads=1,layers=3,ffn=96"
MIXTURE = "tiny-moe,experts=6,experts_per_token=3"


@pytest.fixture(
    scope="module", params=[(GQA, True), (GQA, False), (MQA, True), (MQA, False), (MIXTURE, True)]
)
def model(request: pytest.FixtureRequest) -> Model:
    """Load a model, with lm_head tied to the embedding or not: it makes no difference."""
    name, is_tied = request.param
    config = replace(parse_shape(name), is_tied=is_tied)
    weights = random_weights(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    return build_model(config, weights, max_tokens=config.max_positions)


def count(model: Model, slices: list[tuple[int, int]]) -> tuple[int, int]:
    """Return what torch counts for a step: FLOPs of matrix products and of attention."""
    counts = np.array([tokens for tokens, _ in slices])
    contexts = np.array([context for _, context in slices])
    num_singles = int((counts == 1).sum())
    blocks = np.arange(len(slices) * 4).reshape(len(slices), 4)
    positions = [c + i for n, c in slices for i in range(n)]
    owners = np.repeat(np.arange(len(slices)), counts)
    slots = [int(blocks[o, p // 16]) * 16 + p % 16 for o, p in zip(owners, positions, strict=True)]
    attention = PagedAttention(
        KvTensors(
            model.config,
            num_blocks=64,
            block_tokens=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    attention.plan(RaggedBatch(torch.tensor(slots), counts, contexts, blocks, num_singles))
    plain = sdpa_kernel(SDPBackend.MATH)  # torch does not count what is inside the CPU's fused one
    with torch.inference_mode(), plain, FlopCounterMode(display=False) as counter:
        forward(
            model,
            torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.tensor(positions),
            attend=attention.run,
            rows=torch.from_numpy(counts.cumsum() - 1),
        )
    by_op = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_op.items() if str(op) in ("aten.mm", "aten.addmm"))
    return products, counter.get_total_flops() - products


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS)
def test_flops_are_those_that_torch_counts_on_the_engine(model: Model, step: str) -> None:
    """To the FLOP on matrix products. Attention, torch counts as the rectangle that is computed.

    Its kernels skip what a causal mask hides, and padding adds nothing useful: we count pairs of
    a query and a key it sees. The rectangle is that of the chunk and all its keys, and of all the
    single tokens and the longest one's keys.
    """
    slices = STEPS[step]
    shape = shape_of(model)
    tokens, contexts = (np.array(column) for column in zip(*slices, strict=True))
    ours = int(flop_rates(shape).of_slices(tokens, contexts, np.ones_like(tokens)).sum())
    per_pair = 4 * shape.num_heads * shape.head_dim * shape.num_layers
    seen = sum(1 for n, c in slices for i in range(n) for _ in range(c + i + 1))
    singles = [c + 1 for n, c in slices if n == 1]
    rectangles = len(singles) * max(singles, default=0)
    rectangles += sum(n * (c + n) for n, c in slices if n > 1)

    products, attention = count(model, slices)
    assert ours - per_pair * seen == products
    assert attention == per_pair * rectangles


@settings(max_examples=60, deadline=None)
@given(shapes(), SLICES)
def test_flops_are_those_of_a_count_one_by_one(shape: Shape, slices: list[Slice]) -> None:
    """Shapes have experts, shared ones and gates, windows in all layers or some, in any slices."""
    columns = (np.array(column, dtype=np.int64) for column in zip(*slices, strict=True))
    together = flop_rates(shape).of_slices(*columns)
    assert together.tolist() == [step_flops(shape, [each]) for each in slices]
    assert [flop_rates(shape).of_slices(*each) for each in slices] == together.tolist()


@settings(max_examples=60, deadline=None)
@given(shapes(), SLICES, st.sampled_from([2, 4]))
def test_a_rank_computes_its_heads_and_columns(
    shape: Shape, slices: list[Slice], num_ranks: int
) -> None:
    """And repeats what all ranks need: KV heads, where they are fewer, and the router."""
    shape = msgspec.structs.replace(shape, num_heads=4 * shape.num_heads)
    one = rank_shape(shape, num_ranks)
    executed = 0
    for rank in range(num_ranks):
        naive = step_flops(shape, slices, num_ranks=num_ranks, rank=rank)
        assert naive == sum(flop_rates(one).of_slices(*each) for each in slices)
        executed += naive
    repeated_heads = num_ranks * one.num_kv_heads - shape.num_kv_heads
    repeated = 2 * shape.hidden * shape.head_dim * repeated_heads
    if shape.num_experts:
        repeated += (num_ranks - 1) * shape.hidden * (shape.num_experts + shape.num_shared_gates)
    num_tokens = sum(tokens for tokens, _, _ in slices)
    whole = sum(flop_rates(shape).of_slices(*each) for each in slices)
    assert executed == whole + 2 * repeated * shape.num_layers * num_tokens


def test_heads_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="on 5 ranks"):
        rank_shape(LLAMA_8B, 5)


@given(shapes(), st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(0, 90))
def test_a_prefill_in_chunks_takes_the_flops_of_one_in_a_piece(
    shape: Shape, chunks: list[int], context: int
) -> None:
    in_pieces, at = 0, context
    for tokens in chunks:
        in_pieces += flop_rates(shape).of_slices(tokens, at, 0)
        at += tokens
    assert in_pieces + flop_rates(shape).of_slices(0, at, 1) == flop_rates(shape).of_slices(
        sum(chunks), context, 1
    )


@given(shapes(), SLICES, st.sampled_from([4, 8, 16]))
def test_quantised_weights_are_multiplied_as_often(
    shape: Shape, slices: list[Slice], bits: int
) -> None:
    other = msgspec.structs.replace(shape, weight_bits=bits, kv_bits=8)
    for each in slices:
        assert flop_rates(other).of_slices(*each) == flop_rates(shape).of_slices(*each)
