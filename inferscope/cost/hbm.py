"""Bytes that a step moves between memory and the device, modelled from the shape.

Bytes have no knee: they add up.

    weights       read once per step, however many tokens: all layers' by any token, lm_head by any
                  sampled row, of E experts those that N tokens touch, E(1 - (1 - k/E)^N) expected
                  where routing is even
    KV            read: what a slice sees, its own tokens included, once; written: its own tokens
    activations   each product, norm, rotation and gate reads its inputs and writes its outputs
                  once; a norm is one with the residual sum before it

What is left out: what caches save (small batches' activations stay in L2), what tiles of products
read again, results between operations that an engine does not fuse (docs/numbers.md has both, as
counted), scales of quantised weights, norms' weights, collectives, and copies that an engine makes
for itself (the reference engine gathers the KV of a batch into scratch before attention reads it:
read and written once more, as far as L2 does not hold it). All ranks' traffic is counted, so what
they hold twice (KV heads where ranks are more, the router, hidden states) is read twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import (
    Count,
    common_parameters,
    expert_parameters,
    layer_kv_bytes,
    rank_shape,
    visible,
    window_layers,
)
from inferscope.records import Shape

Floats = NDArray[np.float64]


class WeightBytes(NamedTuple):
    """Bytes read for a model's weights."""

    layers: int
    """Bytes of all weights but the routed experts, read for any token."""
    head: int
    """Bytes of lm_head, read for any sampled row."""
    experts: int
    """Bytes of all routed experts."""
    touch_share: float
    """Share of the experts that one token uses; 0 in a dense model."""

    def of_experts(self, num_tokens: int) -> int:
        """Return the expected bytes of the experts that `num_tokens` tokens use."""
        return round(self.experts * (1 - (1 - self.touch_share) ** num_tokens))

    def of_step(self, num_tokens: int, num_rows: int) -> int:
        """Return the weight bytes that a step reads."""
        if not num_tokens:
            return 0
        experts = self.of_experts(num_tokens) if self.experts else 0
        return self.layers + experts + (self.head if num_rows else 0)


class HbmRates(NamedTuple):
    """Bytes that slices move themselves, and the weights that they share."""

    weights: WeightBytes
    read_per_token: int
    read_per_row: int
    write_per_token: int
    """KV included."""
    write_per_row: int
    kv_per_token: int
    """Bytes read for each visible token in layers without a window; the next, in those with one."""
    window_kv_per_token: int
    window: int

    def reads(self, tokens: Count, context: Count, sampled: Count) -> Count:
        """Return the bytes that slices read, weights left out."""
        read = tokens * self.read_per_token + sampled * self.read_per_row
        read = read + self.kv_per_token * visible(tokens, context)
        if self.window_kv_per_token:
            read = read + self.window_kv_per_token * visible(tokens, context, self.window)
        return read

    def writes(self, tokens: Count, sampled: Count) -> Count:
        """Return the bytes that slices write."""
        return tokens * self.write_per_token + sampled * self.write_per_row


def hbm_rates(shape: Shape, num_ranks: int = 1) -> HbmRates:
    """Return the coefficients of a model for all its tensor-parallel ranks together.

    Raises:
        ValueError: the model cannot be divided so.
    """
    one = rank_shape(shape, num_ranks)
    num_window = window_layers(shape)
    layer_kv = layer_kv_bytes(one)
    read, written = (num_ranks * _bytes(n, shape.activation_bits) for n in _activations(one))
    row_bytes = _bytes(shape.hidden, shape.head_bits or shape.weight_bits)
    hidden, logits = num_ranks * shape.hidden, num_ranks * one.vocab
    return HbmRates(
        weights=weight_bytes(shape, num_ranks),
        read_per_token=read + row_bytes,  # of the embedding, which one rank has
        read_per_row=_bytes(2 * hidden + logits, shape.activation_bits),
        write_per_token=written + num_ranks * layer_kv * shape.num_layers,
        write_per_row=_bytes(hidden + logits, shape.activation_bits),
        kv_per_token=num_ranks * layer_kv * (shape.num_layers - num_window),
        window_kv_per_token=num_ranks * layer_kv * num_window,
        window=shape.window_tokens if num_window else 0,
    )


def weight_bytes(shape: Shape, num_ranks: int = 1) -> WeightBytes:
    """Return the bytes read for the weights, on all ranks together."""
    one, bits = rank_shape(shape, num_ranks), shape.weight_bits
    experts = num_ranks * _bytes(expert_parameters(one), bits) * shape.num_experts
    return WeightBytes(
        layers=num_ranks * _bytes(common_parameters(one), bits),
        head=num_ranks * _bytes(one.hidden * one.vocab, shape.head_bits or bits),
        experts=experts,
        touch_share=shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0,
    )


def activation_bytes(shape: Shape) -> int:
    """Return the activation bytes that one token reads and writes in all layers."""
    return sum(_bytes(num, shape.activation_bits) for num in _layers_activations(shape))


def _activations(shape: Shape) -> tuple[int, int]:
    """Return the elements that a token reads and writes in all layers and the embedding."""
    read, written = _layers_activations(shape)
    return read, written + shape.hidden


def _layers_activations(shape: Shape) -> tuple[int, int]:
    """Return the elements that a token reads and writes in all layers.

    ```
                     reads                    writes
    sum and norm     2 x 2 hidden             2 x 2 hidden
    qkv              hidden                   query + 2 key
    rotation         query + key              query + key
    attention        query                    query
    out              query                    hidden
    gate and up      hidden, per expert       2 ffn
    gating           2 ffn                    ffn
    down             ffn                      hidden, per expert
    router           hidden                   experts
    experts' sum     hidden, per expert       hidden
    ```
    """
    hidden, ffn = shape.hidden, shape.ffn
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    read = 5 * hidden + 3 * query + key
    written = 5 * hidden + 3 * query + 3 * key
    ways = shape.experts_per_token + shape.num_shared_experts if shape.num_experts else 1
    read += ways * (hidden + 3 * ffn)
    written += ways * (3 * ffn + hidden)
    if shape.num_experts:
        read += hidden + ways * hidden
        written += shape.num_experts + shape.num_shared_gates + hidden
    return shape.num_layers * read, shape.num_layers * written


def _bytes(num_elements: int, bits: int) -> int:
    return -(-num_elements * bits // 8)
