"""FLOPs and bytes of model shapes: exact counts, no efficiencies.

A slice computes `tokens` new positions behind `context` cached ones. Attention is causal: new
token j sees context + j + 1 keys, so a slice has tokens·context + tokens·(tokens + 1)/2 pairs of
query and key, not tokens·(context + tokens). KV is billed by KV heads, logits by sampled rows.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from inferscope.records import Shape

Count = TypeVar("Count", int, NDArray[np.int64], NDArray[np.float64])


def pairs(tokens: Count, context: Count) -> Count:
    """Return the query-key pairs of causal slices."""
    return tokens * context + tokens * (tokens + 1) // 2


def linear_parameters(shape: Shape) -> int:
    """Return the weights that every token is multiplied with, lm_head and embedding left out.

    For a mixture of experts: those of the experts a token is routed to, and the shared ones.
    """
    attention = shape.hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    feed_forward = 3 * shape.hidden * shape.ffn
    if shape.num_experts:
        active = shape.experts_per_token + shape.num_shared_experts
        feed_forward = feed_forward * active + shape.hidden * shape.num_experts
    return shape.num_layers * (attention + feed_forward)


def resident_parameters(shape: Shape) -> int:
    """Return the weights of all layers, every expert counted, lm_head and embedding left out."""
    if not shape.num_experts:
        return linear_parameters(shape)
    experts = 3 * shape.hidden * shape.ffn * (shape.num_experts + shape.num_shared_experts)
    attention = shape.hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    return shape.num_layers * (attention + experts + shape.hidden * shape.num_experts)


def kv_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values that one cached token takes, all layers together."""
    per_layer = 2 * shape.num_kv_heads * shape.head_dim * shape.kv_bits // 8
    return shape.num_layers * per_layer


class FlopRates(NamedTuple):
    """What a shape's slices compute, as coefficients."""

    per_token: int
    half_pair: int
    """Half the FLOPs of a query-key pair: pairs are counted twice, for halving arrays is slow."""
    per_row: int
    """Of logits."""

    def of_slices(self, tokens: Count, context: Count, sampled: Count) -> Count:
        """Return the FLOPs of slices."""
        pairs_twice = 2 * context + tokens
        return tokens * (self.per_token + self.half_pair * pairs_twice) + self.per_row * sampled

    def of_singles(self, num: int, contexts: Count) -> Count:
        """Return the FLOPs of `num` slices of one token, each sampled, from their contexts' sum."""
        each = self.per_token + self.half_pair + self.per_row
        return num * each + 2 * self.half_pair * contexts


def flop_rates(shape: Shape) -> FlopRates:
    """Return a shape's coefficients."""
    half_pair = 2 * shape.num_heads * shape.head_dim * shape.num_layers
    return FlopRates(
        2 * linear_parameters(shape) + half_pair, half_pair, 2 * shape.hidden * shape.vocab
    )


def slice_flops(shape: Shape, tokens: Count, context: Count, sampled: Count) -> Count:
    """Return the FLOPs of slices: projections, attention and sampled logits.

    A multiply-add is two. Norms, rotary embeddings and activations are left out, as they are from
    torch's FlopCounterMode, which this equals on the reference engine's matmuls.
    """
    return flop_rates(shape).of_slices(tokens, context, sampled)
