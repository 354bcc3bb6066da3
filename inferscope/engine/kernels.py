"""Attention over the paged KV pool in Triton, which reads every block where it is.

Imported only on a GPU whose torch has Triton; `attention.py` does the same in plain torch, with
copies. Three kinds of kernels, each of which finds a request's keys through its block list:

    store     keys and values of a step's tokens into their pool slots
    decode    one token per request; the context is divided into splits, combined afterwards
    chunk     many tokens of one request, causal, over its context and itself

The number of splits is fixed and their size depends on the request's own length alone. So the grid
of a batch size is always the same, which a CUDA graph needs, and a request's result does not depend
on the other requests of the batch. The query heads that share a key head are rows of one product.

The softmax over tiles of keys is that of FlashAttention-2 (Dao, 2023, algorithm 1), the splits are
those of Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inferscope.engine.attention import KvTensors, RaggedBatch, request_rows

_SPLITS = 16
"""Maximum splits of a context: 16 of 8 key heads occupy a GPU of 132 processors at batch 1."""
_LEAST_SPLIT_TILES = 4
"""Minimum size of a split in tiles: combining a smaller one costs as much as it saves."""
_LEAST_ROWS = 16
"""Minimum side of a matrix product in Triton."""


@triton.jit
def _tile(
    query: tl.tensor,
    sums: tl.tensor,
    total: tl.tensor,
    best: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    last: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys at positions `at` [tile] to a running softmax over the rows of a query.

    `sums` [rows, HEAD_PAD] and `total` [rows] are the weighted values and the sum of the weights,
    both relative to the largest score `best` [rows]. Nothing is read from position `end` on, and a
    row attends up to its position `last` [rows].
    """
    dims = tl.arange(0, HEAD_PAD)
    is_read = at < end
    block = tl.load(blocks + at // BLOCK_TOKENS, mask=is_read, other=0)
    slot = block * BLOCK_TOKENS + at % BLOCK_TOKENS
    offsets = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
    mask = is_read[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(keys + offsets, mask=mask, other=0.0)
    if WIDE:
        query, key = query.to(tl.float32), key.to(tl.float32)
    # "ieee": float32 would be rounded to TF32.
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    is_seen = is_read[None, :] & (at[None, :] <= last[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - highest[:, None])
    shrink = tl.exp(best - highest)
    value = tl.load(values + offsets, mask=mask, other=0.0)
    rounded = weights.to(value.dtype)
    if WIDE:
        rounded, value = rounded.to(tl.float32), value.to(tl.float32)
    added = tl.dot(rounded, value, input_precision="ieee")
    return sums * shrink[:, None] + added, total * shrink + tl.sum(weights, 1), highest


@triton.jit
def _split_size(
    length: tl.tensor, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return the tokens of each split of a context but the last."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, TILE), SPLITS), LEAST_TILES) * TILE


@triton.jit
def _store(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
) -> None:
    """Store one token's keys and values; a token with a negative slot is padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.arange(0, WIDTH_PAD)
    mask = at < WIDTH
    tl.store(keys + slot * WIDTH + at, tl.load(key + token * key_stride + at, mask=mask), mask=mask)
    stored = tl.load(value + token * value_stride + at, mask=mask)
    tl.store(values + slot * WIDTH + at, stored, mask=mask)


@triton.jit
def _decode_split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    requests: tl.tensor,
    blocks: tl.tensor,
    partial: tl.tensor,
    totals: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Attend from one request's token to one split of its context, for one key head."""
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, first = tl.load(requests + 4 * request), tl.load(requests + 4 * request + 3)
    size = _split_size(length, SPLITS, LEAST_TILES, TILE)
    start = split * size
    end = tl.minimum(start + size, length)
    if start >= end:
        return
    group, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + group
    mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = request * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    rows = tl.load(query + offsets, mask=mask, other=0.0)
    sums = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    for tile in range(start, end, TILE):
        at = tile + tl.arange(0, TILE)
        sums, total, best = _tile(
            rows, sums, total, best, keys, values, blocks + first, at, end, end + 0 * group,
            kv_head, scale, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, WIDE,
        )  # fmt: skip
    parts = (request * KV_HEADS * GROUP + heads) * SPLITS + split
    tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
    tl.store(totals + 2 * parts, total, mask=group < GROUP)
    tl.store(totals + 2 * parts + 1, best, mask=group < GROUP)


@triton.jit
def _combine_splits(
    partial: tl.tensor,
    totals: tl.tensor,
    requests: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Combine the splits of one head of one request; zero for a request without tokens."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(requests + 4 * request)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_PAD)
    is_used = splits * _split_size(length, SPLITS, LEAST_TILES, TILE) < length
    parts = (request * HEADS + head) * SPLITS + splits
    total = tl.load(totals + 2 * parts, mask=is_used, other=0.0)
    best = tl.load(totals + 2 * parts + 1, mask=is_used, other=-1e30)
    weights = tl.where(is_used, tl.exp(best - tl.max(best, 0)), 0.0)
    mask = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    sums = tl.load(partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    weight = tl.sum(weights * total, 0)
    summed = tl.sum(sums * weights[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    where = out + (request * HEADS + head) * HEAD_DIM + dims
    tl.store(where, summed.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _chunk(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    requests: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Attend from up to `ROWS` tokens of one request's chunk, for one head."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, start = tl.load(requests + 4 * request), tl.load(requests + 4 * request + 1)
    count, first = tl.load(requests + 4 * request + 2), tl.load(requests + 4 * request + 3)
    first_row = tl.program_id(2) * ROWS
    if first_row >= count:
        return
    rows, dims = first_row + tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
    mask = (rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (start + rows)[:, None] * query_stride + head * HEAD_DIM + dims[None, :]
    loaded = tl.load(query + offsets, mask=mask, other=0.0)
    positions = length - count + rows
    end = tl.minimum(length, length - count + first_row + ROWS)
    sums = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for tile in range(0, end, TILE):
        at = tile + tl.arange(0, TILE)
        sums, total, best = _tile(
            loaded, sums, total, best, keys, values, blocks + first, at, end, positions,
            head // GROUP, scale, KV_HEADS, HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, WIDE,
        )  # fmt: skip
    where = ((start + rows)[:, None] * KV_HEADS * GROUP + head) * HEAD_DIM + dims[None, :]
    tl.store(out + where, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Step:
    slots: Tensor
    requests: Tensor
    blocks: Tensor
    num_singles: int
    longest_chunk: int


class TritonAttention:
    """Kernels over the KV pool, with the interface of `PagedAttention`.

    Attributes:
        kv: Tensors of the pool.
    """

    def __init__(self, kv: KvTensors) -> None:
        self.kv = kv
        self._config, self._device = config, device = kv.config, kv.device
        self._shape = {
            "KV_HEADS": config.num_kv_heads,
            "GROUP": config.num_heads // config.num_kv_heads,
            "HEAD_DIM": config.head_dim,
            "HEAD_PAD": max(_LEAST_ROWS, triton.next_power_of_2(config.head_dim)),
            "BLOCK_TOKENS": kv.block_tokens,
            # On a CPU Triton's interpreter runs, whose products take bfloat16 for whole numbers.
            "WIDE": device.type == "cpu",
        }
        self._tile = 64 if kv.dtype.itemsize == 2 else 32
        self._splits = {"SPLITS": _SPLITS, "LEAST_TILES": _LEAST_SPLIT_TILES, "TILE": self._tile}
        self._step: _Step | None = None

    def plan(self, batch: RaggedBatch) -> None:
        """Copy a step's requests and their block lists to the device, in one piece."""
        requests = request_rows(batch.counts, batch.contexts, batch.blocks.shape[1])
        packed = torch.from_numpy(np.concatenate([requests.ravel(), batch.blocks.ravel()]))
        packed = packed.to(self._device, non_blocking=True)
        chunks = batch.counts[batch.num_singles :]
        self._step = _Step(
            slots=batch.slots,
            requests=packed[: requests.size].view(-1, 4),
            blocks=packed[requests.size :],
            num_singles=batch.num_singles,
            longest_chunk=int(chunks.max()) if len(chunks) else 0,
        )

    def bind(self, *, slots: Tensor, requests: Tensor, blocks: Tensor) -> None:
        """Read the next `run` calls' requests, one token each, from these tensors.

        Args:
            slots: [requests], negative for padding.
            requests: [requests, 4], see `request_rows`; length 0 for padding.
            blocks: Block lists of all requests.
        """
        self._step = _Step(slots, requests, blocks, num_singles=len(slots), longest_chunk=0)

    def run(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values and compute its attention; see `PagedAttention.run`."""
        step, config = self._step, self._config
        assert step is not None, "run() before plan()"
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        width = config.num_kv_heads * config.head_dim
        _store[(len(query),)](
            key, value, keys, values, step.slots, key.stride(0), value.stride(0),
            WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width),
        )  # fmt: skip
        num_chunks = len(step.requests) - step.num_singles
        if step.num_singles:
            self._run_singles(step, query, keys, values, out)
        if num_chunks:
            rows = self._tile
            grid = (num_chunks, config.num_heads, triton.cdiv(step.longest_chunk, rows))
            _chunk[grid](
                query, keys, values, step.requests[step.num_singles :], step.blocks, out,
                query.stride(0), config.head_dim**-0.5,
                **self._shape, ROWS=rows, TILE=self._tile, num_stages=2,
            )  # fmt: skip
        return out

    def _run_singles(
        self, step: _Step, query: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        num, config = step.num_singles, self._config
        parts = (num, config.num_heads, _SPLITS)
        partial = torch.empty((*parts, config.head_dim), dtype=torch.float32, device=query.device)
        totals = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
        group = max(_LEAST_ROWS, triton.next_power_of_2(self._shape["GROUP"]))
        _decode_split[(num, config.num_kv_heads, _SPLITS)](
            query, keys, values, step.requests, step.blocks, partial, totals,
            query.stride(0), config.head_dim**-0.5,
            **self._shape, **self._splits, GROUP_PAD=group, num_stages=2,
        )  # fmt: skip
        _combine_splits[(num, config.num_heads)](
            partial, totals, step.requests, out,
            HEADS=config.num_heads, HEAD_DIM=config.head_dim, HEAD_PAD=self._shape["HEAD_PAD"],
            **self._splits,
        )  # fmt: skip
