"""Attention over a paged KV cache, in plain torch.

The pool is token-major, `[slots, kv_heads, head_dim]` per layer, keys and values in separate
tensors; slot `block * block_tokens + i` holds the i-th token of a block. `plan` reads a step's
batch once and chooses how each group of requests reads the pool; `run` applies that choice in each
layer:

    one token per request   one padded attention for all, keys gathered into scratch
    a chunk of a request    one attention per chunk; causal on its own keys without a context
    consecutive blocks      a view of the pool, no gather

Gathering with `index_select(out=)` into persistent scratch is 4.5 times faster than allocating
(2-core Xeon). Query heads that share a key head are folded into the query's length or into a
broadcast dimension, so keys are never repeated.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from inferscope.engine.config import ModelConfig


class RaggedBatch(msgspec.Struct, frozen=True, gc=False):
    """Layout of a step's requests: those with one token first, then the chunks.

    Attributes:
        slots: [tokens] int64 on the device, the pool slot of each token's key and value.
        counts: [requests] tokens of each request in this step.
        contexts: [requests] tokens of each request before this step.
        blocks: [requests, blocks] each request's KV blocks, padded with any valid block.
        num_singles: Number of requests with one token.
    """

    slots: Tensor
    counts: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    num_singles: int


def request_rows(
    counts: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], num_blocks: int
) -> npt.NDArray[np.int64]:
    """Return what a kernel reads of each request, [requests, 4].

    The columns are the tokens after the step, the first token's row in the batch, the tokens in the
    step, and the place of the request's first block in the block lists of the batch.

    Args:
        counts: [requests], tokens in the step.
        contexts: [requests], tokens before it.
        num_blocks: Length of each request's block list, padding included.
    """
    firsts = np.arange(len(counts)) * num_blocks
    return np.stack([contexts + counts, counts.cumsum() - counts, counts, firsts], axis=1)


class _Reading(msgspec.Struct, frozen=True, gc=False):
    """Access of a request group to the pool: in place from `first_slot`, or gathered."""

    num_requests: int
    num_tokens: int
    first_slot: int
    block_ids: Tensor | None


class _Singles(msgspec.Struct, frozen=True, gc=False):
    reading: _Reading
    mask: Tensor | None
    """Additive mask [requests, 1, 1, tokens]; None if all contexts have the same length."""


class _Chunk(msgspec.Struct, frozen=True, gc=False):
    start: int
    end: int
    reading: _Reading | None
    """Access to the context; None if the chunk has no context."""
    mask: Tensor | None
    """Additive mask [chunk, tokens]; None if attention is causal from the first token."""


class KvTensors:
    """Tensors of the KV pool.

    Attributes:
        config: Shape of the model.
        keys: [layers] of [slots, kv_heads, head_dim].
        values: Likewise.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_tokens, config.num_kv_heads, config.head_dim)
        self.config, self.block_tokens = config, block_tokens
        self.dtype, self.device = dtype, device
        # Zeros, not uninitialized memory: a masked key is still multiplied, and 0 * NaN is NaN.
        self.keys = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.values = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]

    def read_tokens(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Return a request's first keys and values: [layers, 2, tokens, kv_heads, head_dim]."""
        slots = self._slots_of(blocks, 0, num_tokens)
        pools = zip(self.keys, self.values, strict=True)
        return torch.stack([torch.stack([keys[slots], values[slots]]) for keys, values in pools])

    def write_tokens(self, blocks: Sequence[int], start: int, content: bytearray) -> None:
        """Store a request's keys and values from token `start` on; `content` begins at token 0."""
        shape = (len(self.keys), 2, -1, *self.keys[0].shape[1:])
        kv = torch.frombuffer(content, dtype=self.dtype).view(shape)[:, :, start:].to(self.device)
        slots = self._slots_of(blocks, start, start + kv.shape[2])
        for keys, values, layer in zip(self.keys, self.values, kv, strict=True):
            keys[slots], values[slots] = layer[0], layer[1]

    def _slots_of(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        first = torch.tensor(blocks)[positions // self.block_tokens] * self.block_tokens
        return (first + positions % self.block_tokens).to(self.device)


class PagedAttention:
    """Attention over the KV pool.

    Attributes:
        kv: Tensors of the pool.
    """

    def __init__(self, kv: KvTensors) -> None:
        self.kv = kv
        self._keys, self._values = kv.keys, kv.values
        self._config = kv.config
        self._block_tokens = kv.block_tokens
        self._dtype, self._device = dtype, device = kv.dtype, kv.device
        self._scratch_keys = torch.empty(0, dtype=dtype, device=device)
        self._scratch_values = torch.empty(0, dtype=dtype, device=device)
        self._edge = torch.empty(0, dtype=dtype, device=device)
        """As many zeros as -inf behind them: each row of a mask is a part of it."""
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._singles: _Singles | None = None
        self._chunks: list[_Chunk] = []

    def plan(self, batch: RaggedBatch) -> None:
        """Plan how the `run` calls of this step read the pool."""
        self._slots = batch.slots
        self._singles = self._plan_singles(batch) if batch.num_singles else None
        self._chunks = []
        start = batch.num_singles
        for request_idx in range(batch.num_singles, len(batch.counts)):
            chunk = self._plan_chunk(batch, request_idx=request_idx, start=start)
            self._chunks.append(chunk)
            start = chunk.end

    def run(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values and compute its attention.

        Args:
            layer_idx: Index of the layer.
            query: [tokens, heads, head_dim], rotated.
            key: [tokens, kv_heads, head_dim], rotated.
            value: [tokens, kv_heads, head_dim].

        Returns:
            [tokens, heads, head_dim].
        """
        self._keys[layer_idx].index_copy_(0, self._slots, key)
        self._values[layer_idx].index_copy_(0, self._slots, value)
        singles = self._singles
        if singles is not None and not self._chunks:
            return self._run_singles(singles, layer_idx, query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if singles is not None:
            num_singles = singles.reading.num_requests
            out[:num_singles] = self._run_singles(singles, layer_idx, query[:num_singles])
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            if chunk.reading is None:
                keys, values = key[rows], value[rows]
            else:
                keys, values = (tensor[0] for tensor in self._read(chunk.reading, layer_idx))
            out[rows] = self._run_chunk(query[rows], keys, values, mask=chunk.mask)
        return out

    def _plan_singles(self, batch: RaggedBatch) -> _Singles:
        num = batch.num_singles
        lengths = batch.contexts[:num] + 1
        longest = int(lengths.max())
        reading = self._reading(batch.blocks[:num], longest)
        if num == 1 or bool((lengths == longest).all()):
            return _Singles(reading=reading, mask=None)
        mask = self._additive(lengths, longest).view(num, 1, 1, longest)
        return _Singles(reading=reading, mask=mask)

    def _plan_chunk(self, batch: RaggedBatch, *, request_idx: int, start: int) -> _Chunk:
        count, context = int(batch.counts[request_idx]), int(batch.contexts[request_idx])
        if not context:
            return _Chunk(start=start, end=start + count, reading=None, mask=None)
        reading = self._reading(batch.blocks[request_idx : request_idx + 1], context + count)
        mask = self._additive(np.arange(context, context + count) + 1, context + count)
        return _Chunk(start=start, end=start + count, reading=reading, mask=mask)

    def _additive(self, lengths: npt.NDArray[np.int64], width: int) -> Tensor:
        """Return a mask [lengths, width] whose rows are zero up to their length, then -inf."""
        # Every layer would convert a boolean mask to this one.
        if len(self._edge) < 2 * width:
            self._edge = torch.zeros(4 * width, dtype=self._dtype, device=self._device)
            self._edge[2 * width :] = float("-inf")
        starts = torch.from_numpy(len(self._edge) // 2 - lengths)
        windows = self._edge.unfold(0, width, 1)
        return windows.index_select(0, starts.to(self._device, non_blocking=True))

    def _reading(self, blocks: npt.NDArray[np.int64], num_tokens: int) -> _Reading:
        blocks = blocks[:, : -(-num_tokens // self._block_tokens)]
        first_slot, block_ids = 0, None
        if len(blocks) == 1 and bool((np.diff(blocks[0]) == 1).all()):
            first_slot = int(blocks[0, 0]) * self._block_tokens
        else:
            flat = torch.from_numpy(np.ascontiguousarray(blocks).reshape(-1))
            block_ids = flat.to(self._device, non_blocking=True)
        return _Reading(
            num_requests=len(blocks),
            num_tokens=num_tokens,
            first_slot=first_slot,
            block_ids=block_ids,
        )

    def _read(self, reading: _Reading, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [requests, tokens, kv_heads, head_dim]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if reading.block_ids is None:
            rows = slice(reading.first_slot, reading.first_slot + reading.num_tokens)
            return keys[rows].unsqueeze(0), values[rows].unsqueeze(0)
        block_elements = self._block_tokens * keys.shape[1] * keys.shape[2]
        self._reserve(len(reading.block_ids) * block_elements)
        shape = (reading.num_requests, -1, keys.shape[1], keys.shape[2])
        gathered = []
        for pool, scratch in ((keys, self._scratch_keys), (values, self._scratch_values)):
            rows_out = scratch[: len(reading.block_ids) * block_elements].view(-1, block_elements)
            torch.index_select(pool.view(-1, block_elements), 0, reading.block_ids, out=rows_out)
            gathered.append(rows_out.view(shape)[:, : reading.num_tokens])
        return gathered[0], gathered[1]

    def _reserve(self, num_elements: int) -> None:
        if self._scratch_keys.numel() < num_elements:
            grown = 2 * num_elements
            self._scratch_keys = torch.empty(grown, dtype=self._dtype, device=self._device)
            self._scratch_values = torch.empty(grown, dtype=self._dtype, device=self._device)

    def _run_singles(self, singles: _Singles, layer_idx: int, query: Tensor) -> Tensor:
        config = self._config
        num = singles.reading.num_requests
        keys, values = self._read(singles.reading, layer_idx)
        # The query heads that share a key head become query positions of it.
        folded = query.reshape(num, config.num_kv_heads, -1, config.head_dim)
        attended = functional.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=singles.mask
        )
        return attended.reshape(num, config.num_heads, config.head_dim)

    def _run_chunk(
        self, query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None
    ) -> Tensor:
        config = self._config
        count, groups = len(query), config.num_heads // config.num_kv_heads
        shape = (config.num_kv_heads, groups, len(keys), config.head_dim)
        grouped = query.view(count, config.num_kv_heads, groups, config.head_dim)
        attended = functional.scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(shape),
            values.transpose(0, 1).unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return attended.permute(2, 0, 1, 3).reshape(count, config.num_heads, config.head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU each page takes memory only when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
