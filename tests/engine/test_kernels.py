"""The Triton kernels against the same attention in plain torch.

Compiled where there is a GPU; else in Triton's interpreter, in an environment with triton, by
`TRITON_INTERPRET=1 python -m pytest tests/engine/test_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.nn.attention import SDPBackend, sdpa_kernel

from inferscope.engine import Engine, EngineOptions, Sampling
from inferscope.engine.attention import KvTensors, PagedAttention, RaggedBatch
from inferscope.engine.config import ModelConfig
from inferscope.engine.graphs import DecodeGraphs
from inferscope.engine.load import load_model
from inferscope.engine.runner import Runner
from inferscope.engine.shapes import parse_shape
from tests.engine.triton_device import DEVICE, MARKS

pytestmark = MARKS
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Largest allowed difference of two results, absolute and relative: bfloat16 has 8 bits."""


def shape(**given: int) -> ModelConfig:
    return replace(parse_shape("tiny"), num_layers=1, **given)


class Pair:
    """Both back ends on equal pools, and a batch generator over shuffled blocks."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, num_requests: int, longest: int, seed: int
    ) -> None:
        from inferscope.engine.kernels import TritonAttention

        self.config, self.dtype = config, dtype
        self.draw = np.random.default_rng(seed)
        self.width = int(self.draw.choice([1, 4, 16]))
        per_request = -(-longest // self.width)
        num_blocks = num_requests * per_request
        self.blocks = self.draw.permutation(num_blocks).reshape(num_requests, per_request)
        plain, triton = (
            KvTensors(
                config, num_blocks=num_blocks, block_tokens=self.width, dtype=dtype, device=DEVICE
            )
            for _ in range(2)
        )
        self.plain, self.triton = PagedAttention(plain), TritonAttention(triton)
        self.lengths = np.zeros(num_requests, dtype=np.int64)

    def batch(self, counts_by_request: dict[int, int]) -> RaggedBatch:
        """Return a step's batch, and advance its requests."""
        requests = sorted(counts_by_request, key=lambda idx: counts_by_request[idx] != 1)
        counts = np.array([counts_by_request[idx] for idx in requests])
        contexts = self.lengths[requests]
        self.lengths[requests] += counts
        slots = [
            self.blocks[idx, at // self.width] * self.width + at % self.width
            for idx, context, count in zip(requests, contexts, counts, strict=True)
            for at in range(context, context + count)
        ]
        widest = -(-int(self.lengths[requests].max()) // self.width)
        return RaggedBatch(
            slots=torch.tensor(slots, device=DEVICE),
            counts=counts,
            contexts=contexts,
            blocks=self.blocks[requests, :widest],
            num_singles=int((counts == 1).sum()),
        )

    def tensors(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return query, key and value as the model passes them: views with a stride."""
        config = self.config
        heads = config.num_heads + 2 * config.num_kv_heads
        numbers = self.draw.standard_normal((num_tokens, heads, config.head_dim))
        qkv = torch.tensor(numbers, dtype=self.dtype, device=DEVICE)
        return qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)

    def fill(self, lengths: list[int]) -> None:
        """Fill both pools with equal numbers, as the context of the requests."""
        for ours, theirs in (
            (self.plain.kv.keys[0], self.triton.kv.keys[0]),
            (self.plain.kv.values[0], self.triton.kv.values[0]),
        ):
            numbers = torch.tensor(self.draw.standard_normal(tuple(ours.shape)))
            ours.copy_(numbers)
            theirs.copy_(numbers)
        self.lengths[:] = lengths

    def compare(self, counts_by_request: dict[int, int]) -> None:
        batch = self.batch(counts_by_request)
        given = self.tensors(len(batch.slots))
        self.plain.plan(batch)
        self.triton.plan(batch)
        # A GPU's fused kernels may compute float32 products from TF32 parts.
        with sdpa_kernel(SDPBackend.MATH):
            expected = self.plain.run(0, *given)
        actual = self.triton.run(0, *given)
        most = TOLERANCE[self.dtype]
        torch.testing.assert_close(actual, expected, rtol=most, atol=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 24])
def test_kernels_equal_plain_attention_on_random_batches(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Cover chunks with and without a context, single tokens, and both in one batch."""
    config = shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    pair = Pair(config, dtype, num_requests=5, longest=180, seed=heads * head_dim)
    pair.compare({0: 1, 1: 37, 2: 2})
    for _ in range(3):
        num = int(pair.draw.integers(1, 6))
        requests = pair.draw.choice(5, size=num, replace=False)
        pair.compare({int(idx): int(pair.draw.choice([1, 1, 3, 40])) for idx in requests})
    pair.compare(dict.fromkeys(range(5), 1))


def test_decode_over_many_splits_equals_plain_attention() -> None:
    """A context of more tiles than the minimum of one split uses several splits."""
    from inferscope.engine import kernels

    config = shape(num_heads=4, num_kv_heads=2, head_dim=64)
    pair = Pair(config, torch.float32, num_requests=3, longest=4400, seed=1)
    tile = pair.triton._tile
    most_of_one = kernels._LEAST_SPLIT_TILES * tile
    least_of_most = kernels._SPLITS * most_of_one
    pair.fill([most_of_one - 2, most_of_one - 1, least_of_most + 3 * tile])
    for _ in range(3):
        pair.compare(dict.fromkeys(range(3), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_of_a_request_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Bit for bit: alone, among others, and in a padded batch."""
    config = shape(num_heads=4, num_kv_heads=2, head_dim=64)
    pair = Pair(config, dtype, num_requests=4, longest=500, seed=2)
    pair.compare({0: 300, 1: 290, 2: 7, 3: 40})
    batch = pair.batch(dict.fromkeys(range(4), 1))
    query, key, value = pair.tensors(4)
    pair.triton.plan(batch)
    whole = pair.triton.run(0, query, key, value)
    for row in range(4):
        one = slice(row, row + 1)
        alone = structs.replace(
            batch, slots=batch.slots[one], counts=batch.counts[one], contexts=batch.contexts[one],
            blocks=batch.blocks[one], num_singles=1,
        )  # fmt: skip
        pair.triton.plan(alone)
        assert torch.equal(pair.triton.run(0, query[one], key[one], value[one])[0], whole[row])


def test_padding_stores_nothing_and_attends_to_nothing() -> None:
    config = shape(num_heads=4, num_kv_heads=2, head_dim=64)
    pair = Pair(config, torch.float32, num_requests=2, longest=64, seed=3)
    pair.compare({0: 20, 1: 5})
    pool = [tensor.view(torch.int32) for tensor in (*pair.triton.kv.keys, *pair.triton.kv.values)]
    before = [tensor.clone() for tensor in pool]
    given: dict[str, Any] = {
        "slots": torch.full((3,), -1, device=DEVICE),
        "requests": torch.zeros((3, 4), dtype=torch.int64, device=DEVICE),
        "blocks": torch.zeros(1, dtype=torch.int64, device=DEVICE),
    }
    pair.triton.bind(**given)
    assert not pair.triton.run(0, *pair.tensors(3)).any()
    assert all(map(torch.equal, before, pool))


def test_engine_on_kernels_and_padded_decodes_generates_the_plain_engine_s_tokens() -> None:
    """In float32, with chunks, mixed steps and preemptions."""
    from inferscope.engine.kernels import TritonAttention

    options = EngineOptions(
        dtype="float32", device=str(DEVICE), token_budget=16, max_running=3, num_blocks=12,
        block_tokens=4, cuda_graphs=False,
    )  # fmt: skip
    model = load_model("random:tiny", options)
    attention = TritonAttention(
        KvTensors(model.config, num_blocks=12, block_tokens=4, dtype=model.dtype, device=DEVICE)
    )
    sizes: list[int] = []

    def capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replay() -> torch.Tensor:
            logits = run()
            sizes.append(len(logits))
            return logits

        return replay

    runner = Runner(
        model, attention, token_budget=16, max_running=3, max_blocks=12, block_tokens=4,
        graphs=DecodeGraphs(
            model, attention, sizes=(1, 4), max_blocks=12, capture=capture
        ),
    )  # fmt: skip
    engine = Engine(model, options, runner=runner)
    plain = PagedAttention(
        KvTensors(model.config, num_blocks=12, block_tokens=4, dtype=model.dtype, device=DEVICE)
    )
    reference = Runner(model, plain, token_budget=16, max_running=3, max_blocks=12, block_tokens=4)
    draw = np.random.default_rng(4)
    prompts = [draw.integers(0, 256, size=length).tolist() for length in (14, 3, 20, 9)]
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    expected = Engine(model, options, runner=reference).generate(prompts, sampling)
    assert engine.generate(prompts, sampling) == expected
    assert engine.stats().preemptions > 0
    assert set(sizes) == {1, 4}
