from __future__ import annotations

import numpy as np
import pytest
import torch

from inferscope.engine.attention import KvTensors, PagedAttention, RaggedBatch
from inferscope.engine.shapes import parse_shape

CONFIG = parse_shape("tiny,layers=1")
WIDTH = 4
NUM_BLOCKS = 64


class Dense:
    """Dense attention over each request's keys and values, one query at a time."""

    def __init__(self, num_requests: int) -> None:
        empty = torch.empty(0, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.keys = [empty] * num_requests
        self.values = [empty] * num_requests

    def attend(
        self, request: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.keys[request] = torch.cat([self.keys[request], key])
        self.values[request] = torch.cat([self.values[request], value])
        repeats = CONFIG.num_heads // CONFIG.num_kv_heads
        keys = self.keys[request].repeat_interleave(repeats, dim=1)
        values = self.values[request].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * CONFIG.head_dim**-0.5
        first = len(keys) - len(query)
        is_beyond = torch.arange(len(keys)) > torch.arange(first, len(keys))[:, None]
        shares = scores.masked_fill(is_beyond, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", shares, values)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_paged_attention_equals_dense_attention(is_shuffled: bool) -> None:
    """Cover chunks, single tokens, both, a single request, and requests of equal length."""
    torch.manual_seed(0)
    paged = PagedAttention(
        KvTensors(
            CONFIG,
            num_blocks=NUM_BLOCKS,
            block_tokens=WIDTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    order = np.random.default_rng(0).permutation(NUM_BLOCKS) if is_shuffled else range(NUM_BLOCKS)
    table = np.array(list(order)).reshape(4, -1)
    dense = Dense(4)
    lengths = [0] * 4
    for step in (
        {0: 5, 1: 9},
        {2: 1, 1: 3},
        {0: 1, 1: 1, 2: 1, 3: 7},
        {0: 1, 3: 2},
        {3: 1},
        {0: 1, 1: 1, 2: 1, 3: 1},
        {0: 1, 3: 30},
        {2: 11},
        {1: 1, 2: 1},
    ):
        requests = sorted(step, key=lambda request: step[request] != 1)
        counts = np.array([step[request] for request in requests])
        contexts = np.array([lengths[request] for request in requests])
        positions = [
            (request, lengths[request] + i) for request in requests for i in range(step[request])
        ]
        slots = torch.tensor(
            [table[request, p // WIDTH] * WIDTH + p % WIDTH for request, p in positions]
        )
        num_tokens = len(positions)
        query = torch.randn(num_tokens, CONFIG.num_heads, CONFIG.head_dim)
        key, value = torch.randn(2, num_tokens, CONFIG.num_kv_heads, CONFIG.head_dim)
        paged.plan(
            RaggedBatch(
                slots=slots,
                counts=counts,
                contexts=contexts,
                blocks=table[requests],
                num_singles=int((counts == 1).sum()),
            )
        )
        actual = paged.run(0, query, key, value)
        start = 0
        for request, count in zip(requests, counts, strict=True):
            rows = slice(start, start + count)
            expected = dense.attend(request, query[rows], key[rows], value[rows])
            assert torch.allclose(actual[rows], expected, atol=1e-5)
            start += count
            lengths[request] += int(count)
