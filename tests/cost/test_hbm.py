from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.cost.hbm import HbmRates, activation_bytes, hbm_rates, weight_bytes
from inferscope.cost.shape import kv_bytes_per_token
from inferscope.records import Shape
from tests.cost.naive import Slice, dense_weight_bytes, kv_bytes
from tests.cost.shapes import GEMMA_2, LLAMA_8B, MIXTRAL, SLICES, shapes


def moved(rates: HbmRates, slices: list[Slice]) -> tuple[int, int]:
    """Return the bytes that slices read and write themselves."""
    read = sum(rates.reads(*each) for each in slices)
    return read, sum(rates.writes(tokens, sampled) for tokens, _, sampled in slices)


@settings(max_examples=60, deadline=None)
@given(shapes(), SLICES, st.sampled_from([1, 2, 4]))
def test_kv_is_what_each_rank_s_heads_see_and_add(
    shape: Shape, slices: list[Slice], num_ranks: int
) -> None:
    """Isolated by what 16 bits take beyond 8: all else is the same."""
    shape = replace(shape, num_heads=4 * shape.num_heads, kv_bits=8)
    wide = replace(shape, kv_bits=16)
    narrow_moved = moved(hbm_rates(shape, num_ranks), slices)
    wide_moved = moved(hbm_rates(wide, num_ranks), slices)
    split = kv_bytes(wide, slices, num_ranks=num_ranks)
    beyond = tuple(2 * (w - n) for w, n in zip(wide_moved, narrow_moved, strict=True))
    assert beyond == split


@given(shapes(), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_dense_weights_are_read_once_for_all_requests(
    shape: Shape, num_rows: int, num_ranks: int
) -> None:
    shape = replace(shape, num_heads=4 * shape.num_heads, num_experts=0, experts_per_token=0)
    weights = weight_bytes(shape, num_ranks)
    expected_bytes = dense_weight_bytes(shape, num_rows=num_rows, num_ranks=num_ranks)
    assert weights.of_step(1, num_rows) == weights.of_step(500, num_rows) == expected_bytes
    assert weights.of_step(0, 0) == 0


def test_a_published_model_takes_its_published_bytes() -> None:
    """Llama 3 8B in bf16: 16.06 GB, of which 1.05 GB are the embedding, read by rows."""
    embedding = 2 * LLAMA_8B.hidden * LLAMA_8B.vocab
    read = hbm_rates(LLAMA_8B).weights.of_step(1, 1)
    assert read + embedding == pytest.approx(16.06e9, rel=1e-3)
    eight_bit = replace(LLAMA_8B, weight_bits=8, head_bits=16)
    assert weight_bytes(eight_bit).layers * 2 == weight_bytes(LLAMA_8B).layers
    assert weight_bytes(eight_bit).head == weight_bytes(LLAMA_8B).head


def test_experts_are_read_as_often_as_tokens_are_sent_to_them() -> None:
    """Against a thousand draws of two of eight experts for each token."""
    draw, weights = random.Random(1), weight_bytes(MIXTRAL)
    for num_tokens in (1, 3, 9):
        touched = 0
        for _ in range(1000):
            touched += len({e for _ in range(num_tokens) for e in draw.sample(range(8), 2)})
        expected = weights.experts / 8 * touched / 1000
        assert weights.of_experts(num_tokens) == pytest.approx(expected, rel=0.02)
    assert weights.of_experts(1) == weights.experts // 4


def test_activations_by_hand() -> None:
    """One layer, hidden 2, one head of 2, ffn 3: each operation's inputs and outputs, two bytes."""
    shape = Shape(1, 2, 1, 1, 2, 3, 5, 16, 16, 16)
    read = [4, 2, 4, 2, 2, 4, 2, 6, 3]  # norm, qkv, rotation, attention, out, norm, up, gate, down
    written = [4, 6, 4, 2, 2, 4, 6, 3, 2]
    assert activation_bytes(shape) == 2 * (sum(read) + sum(written))
    rates, embedding_row, kv = hbm_rates(shape), 2 * 2, 2 * 2 * 2
    assert rates.read_per_token == 2 * sum(read) + embedding_row
    assert rates.write_per_token == 2 * sum(written) + embedding_row + kv


@given(shapes(), SLICES)
def test_columns_are_counted_as_numbers_are(shape: Shape, slices: list[Slice]) -> None:
    rates = hbm_rates(shape)
    tokens, contexts, sampled = (np.array(c, dtype=np.int64) for c in zip(*slices, strict=True))
    assert rates.reads(tokens, contexts, sampled).tolist() == [rates.reads(*s) for s in slices]
    assert rates.writes(tokens, sampled).tolist() == [rates.writes(s[0], s[2]) for s in slices]


def test_kv_without_windows_is_that_of_the_pool() -> None:
    assert hbm_rates(LLAMA_8B).kv_per_token == kv_bytes_per_token(LLAMA_8B)
    windowed = hbm_rates(GEMMA_2)
    assert windowed.kv_per_token + windowed.window_kv_per_token == kv_bytes_per_token(GEMMA_2)
