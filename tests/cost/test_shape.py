from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from inferscope.cost.shape import (
    kv_bytes_per_token,
    linear_parameters,
    pairs,
    resident_parameters,
    slice_flops,
)
from inferscope.engine import EngineOptions
from inferscope.engine.attention import PagedAttention, RaggedBatch
from inferscope.engine.load import describe, load_engine, load_model
from inferscope.engine.model import Model, forward
from inferscope.records import Shape

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16, 16, 16)
MIXTRAL = Shape(32, 4096, 32, 8, 128, 14336, 32000, 16, 16, 16, False, 8, 2)

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


@pytest.fixture(scope="module", params=["tiny", "tiny,heads=4,kv_heads=1,layers=3,ffn=96"])
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(f"random:{request.param}", EngineOptions(dtype="float32"))


def shape_of(model: Model) -> Shape:
    config = model.config
    return Shape(
        num_layers=config.num_layers,
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
        weight_bits=32,
        kv_bits=32,
        activation_bits=32,
        tied=config.is_tied,
    )


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
        model.config,
        num_blocks=64,
        block_tokens=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
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


@pytest.mark.parametrize("step", STEPS)
def test_flops_are_those_that_torch_counts_on_the_engine(model: Model, step: str) -> None:
    """To the FLOP on matrix products. Attention, torch counts as the rectangle that is computed.

    Its kernels skip what a causal mask hides, and nobody needs what padding adds: we count pairs of
    a query and a key it sees. The rectangle is that of the chunk and all its keys, and of all the
    single tokens and the longest one's keys.
    """
    slices = STEPS[step]
    shape = shape_of(model)
    tokens, contexts = (np.array(column) for column in zip(*slices, strict=True))
    ours = int(slice_flops(shape, tokens, contexts, np.ones_like(tokens)).sum())
    per_pair = 4 * shape.num_heads * shape.head_dim * shape.num_layers
    seen = sum(1 for n, c in slices for i in range(n) for _ in range(c + i + 1))
    singles = [c + 1 for n, c in slices if n == 1]
    rectangles = len(singles) * max(singles, default=0)
    rectangles += sum(n * (c + n) for n, c in slices if n > 1)

    products, attention = count(model, slices)
    assert ours - per_pair * seen == products
    assert attention == per_pair * rectangles


def test_parameters_are_those_of_the_engine_s_tensors(model: Model) -> None:
    layers = model.weights.layers
    matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert linear_parameters(shape_of(model)) == sum(m.numel() for m in matrices)
    assert resident_parameters(shape_of(model)) == linear_parameters(shape_of(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_those_of_the_engine_s_pool(dtype: str) -> None:
    engine = load_engine("random:tiny", EngineOptions(dtype=dtype, num_blocks=32))
    shape = describe(engine, name="tiny").shape
    assert shape is not None
    paged = PagedAttention(
        engine.model.config,
        num_blocks=32,
        block_tokens=16,
        dtype=engine.model.dtype,
        device=engine.model.device,
    )
    pool = [*paged._keys, *paged._values]
    num_bytes = sum(part.numel() * part.element_size() for part in pool)
    assert kv_bytes_per_token(shape) * 32 * 16 == num_bytes


def test_published_parameter_counts_are_met() -> None:
    """8.03 B and 46.7 B, embedding and head included; norms are the few thousand missing."""
    head = 2 * LLAMA_8B.hidden * LLAMA_8B.vocab
    assert linear_parameters(LLAMA_8B) + head == pytest.approx(8_030_261_248, rel=1e-4)
    mixtral_head = 2 * MIXTRAL.hidden * MIXTRAL.vocab
    assert resident_parameters(MIXTRAL) + mixtral_head == pytest.approx(46_702_792_704, rel=1e-4)
    assert linear_parameters(MIXTRAL) + mixtral_head == pytest.approx(12_879_925_248, rel=1e-4)


def test_experts_count_by_hand() -> None:
    """One layer, hidden 2, one head of 2, ffn 3, four experts, two per token, one shared."""
    shape = Shape(1, 2, 1, 1, 2, 3, 5, 16, 16, 16, False, 4, 2, 1)
    attention, expert, router = 4 * 2 * 2, 3 * 2 * 3, 2 * 4
    assert linear_parameters(shape) == attention + 3 * expert + router
    assert resident_parameters(shape) == attention + 5 * expert + router
    assert slice_flops(shape, 3, 0, 1) == 2 * 3 * (16 + 54 + 8) + 4 * 2 * 6 + 2 * 2 * 5


def test_kv_is_billed_by_kv_heads() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 128 * 1024
    eight_bit = msgspec.structs.replace(LLAMA_8B, kv_bits=8)
    assert kv_bytes_per_token(eight_bit) == 64 * 1024


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(0, 5000))
def test_a_prefill_in_chunks_has_the_pairs_of_one_in_a_piece(
    chunks: list[int], context: int
) -> None:
    in_pieces, at = 0, context
    for tokens in chunks:
        in_pieces += pairs(tokens, at)
        at += tokens
    assert in_pieces == pairs(sum(chunks), context)
