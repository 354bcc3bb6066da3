"""Models' shapes, published and made up."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.engine.model import Model
from inferscope.records import Shape

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16, 16, 16)
MIXTRAL = Shape(32, 4096, 32, 8, 128, 14336, 32000, 16, 16, 16, False, 8, 2)
GEMMA_2 = replace(LLAMA_8B, window_tokens=4096, num_full_layers=16)
"""Its way of windows, in every other layer."""


def shape_of(model: Model) -> Shape:
    """Return the shape of the reference engine's model."""
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
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a small shape: any grouping of heads, dense or of experts, with windows or without."""
    kv_heads, groups = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    num_layers = draw(st.integers(1, 4))
    num_experts = draw(st.sampled_from([0, 0, 4, 8]))
    window = draw(st.sampled_from([0, 0, 1, 5, 40]))
    return Shape(
        num_layers=num_layers,
        hidden=8 * draw(st.integers(1, 4)),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 2)),
        ffn=8 * draw(st.integers(1, 6)),
        vocab=8 * draw(st.integers(2, 9)),
        weight_bits=draw(st.sampled_from([4, 8, 16])),
        kv_bits=draw(st.sampled_from([8, 16])),
        activation_bits=16,
        tied=draw(st.booleans()),
        num_experts=num_experts,
        experts_per_token=draw(st.integers(1, 3)) if num_experts else 0,
        num_shared_experts=draw(st.integers(0, 2)) if num_experts else 0,
        window_tokens=window,
        num_full_layers=draw(st.integers(0, num_layers)) if window else 0,
        head_bits=draw(st.sampled_from([0, 16])),
        num_shared_gates=draw(st.integers(0, 1)) if num_experts else 0,
    )


SLICES = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 7, 60]), st.integers(0, 90), st.integers(0, 2)),
    min_size=1,
    max_size=9,
)
"""Tokens, context and sampled rows of a step's requests."""
