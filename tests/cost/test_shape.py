from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.cost.counts import rates_of
from inferscope.cost.flops import flop_rates
from inferscope.cost.shape import (
    expert_parameters,
    is_counted,
    kv_bytes_per_token,
    linear_parameters,
    pairs,
    resident_parameters,
    visible,
)
from inferscope.engine import EngineOptions
from inferscope.engine.attention import KvTensors, PagedAttention
from inferscope.engine.load import describe, load_engine, load_model
from inferscope.records import Shape
from tests.cost.shapes import LLAMA_8B, MIXTRAL, shape_of
from tests.engine.checkpoints import matrices_of


@pytest.mark.parametrize(
    "name", ["tiny", "tiny,heads=4,kv_heads=1,layers=3,ffn=96", "tiny-moe,experts=6"]
)
def test_parameters_are_those_of_the_engine_s_tensors(name: str) -> None:
    model = load_model(f"random:{name}", EngineOptions(dtype="float32"))
    shape = shape_of(model)
    assert resident_parameters(shape) == sum(matrix.numel() for matrix in matrices_of(model))
    num_unused = shape.num_experts - shape.experts_per_token
    unused = num_unused * expert_parameters(shape)
    assert linear_parameters(shape) == resident_parameters(shape) - unused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_those_of_the_engine_s_pool(dtype: str) -> None:
    engine = load_engine("random:tiny", EngineOptions(dtype=dtype, num_blocks=32))
    shape = describe(engine, name="tiny").shape
    assert shape is not None
    paged = PagedAttention(
        KvTensors(
            engine.model.config,
            num_blocks=32,
            block_tokens=16,
            dtype=engine.model.dtype,
            device=engine.model.device,
        )
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
    assert flop_rates(shape).of_slices(3, 0, 1) == 2 * 3 * (16 + 54 + 8) + 4 * 2 * 6 + 2 * 2 * 5


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


@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 50))
def test_a_window_clips_what_each_query_sees(tokens: int, context: int, window: int) -> None:
    seen = [range(max(0, context + new + 1 - window), context + new + 1) for new in range(tokens)]
    assert pairs(tokens, context, window) == sum(map(len, seen))
    assert visible(tokens, context, window) == len(set().union(*seen))


@pytest.mark.parametrize(
    "shape",
    [
        None,
        replace(LLAMA_8B, latent_ranks=(1536, 512)),
        replace(LLAMA_8B, num_kv_heads=0),
        replace(MIXTRAL, experts_per_token=9),
        replace(LLAMA_8B, hidden=1 << 62),
        replace(LLAMA_8B, window_tokens=-1),
        replace(LLAMA_8B, window_tokens=512, num_full_layers=33),
        replace(LLAMA_8B, head_bits=-8),
        replace(LLAMA_8B, weight_bits=1 << 62),
        replace(MIXTRAL, num_experts=1 << 60, experts_per_token=1 << 60),
    ],
)
def test_what_cannot_be_counted_is_not_guessed(shape: Shape | None) -> None:
    assert not is_counted(shape)
    assert rates_of(shape) is None


def test_ranks_that_cannot_divide_the_model_count_nothing() -> None:
    assert rates_of(LLAMA_8B, 8) is not None
    assert rates_of(LLAMA_8B, 5) is None
