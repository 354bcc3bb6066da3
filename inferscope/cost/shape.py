"""Counts from a model's shape: its parameters, and the query-key pairs of a slice.

A slice computes `tokens` new positions behind `context` cached ones. Attention is causal: new
token j sees context + j + 1 keys, or the last `window` of them, so a slice has tokens·context +
tokens·(tokens + 1)/2 pairs of query and key, not tokens·(context + tokens). KV is billed by KV
heads, logits by sampled rows.

Not every architecture can be counted. Of latent attention, whether a chunk expands its cached
latents or absorbs the projections is the kernel's choice and no property of the shape; hybrids with
linear attention have layers that no field here describes. Their steps are attributed by time alone:
their FLOPs and bytes are None, and readers see the words `time-only`.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.records import Shape

TIME_ONLY = "time-only"
"""Word that replaces counts in reports."""

_MOST_PARAMETERS = 1 << 45
"""Thirty times those of the largest models; a shape that has more is damaged."""
_MOST_BITS = 64

Count = TypeVar("Count", int, NDArray[np.int64])


def is_counted(shape: Shape | None) -> bool:
    """Return whether FLOPs and bytes follow from a shape; otherwise only time is attributed."""
    if shape is None or shape.latent_ranks is not None:
        return False
    sizes = (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    bits = (shape.weight_bits, shape.kv_bits, shape.activation_bits)
    more = (shape.num_experts, shape.num_shared_experts, shape.num_shared_gates, shape.head_bits)
    if min(*sizes, *bits, shape.ffn, shape.vocab) <= 0 or min(*more, shape.window_tokens) < 0:
        return False
    has_experts = not shape.num_experts or 0 < shape.experts_per_token <= shape.num_experts
    has_layers = 0 <= shape.num_full_layers <= shape.num_layers
    head = 2 * shape.hidden * shape.vocab
    is_possible = resident_parameters(shape) + head <= _MOST_PARAMETERS
    return has_experts and has_layers and is_possible and max(*bits, shape.head_bits) <= _MOST_BITS


def pairs(tokens: Count, context: Count, window: int = 0) -> Count:
    """Return the query-key pairs of causal slices; a window of 0 is none."""
    if not window:
        return tokens * context + tokens * (tokens + 1) // 2
    growing = _between(0, window - context, tokens)
    """New tokens that see all that is before them; the others see just the window."""
    found: Count = growing * context + growing * (growing + 1) // 2 + (tokens - growing) * window
    return found


def visible(tokens: Count, context: Count, window: int = 0) -> Count:
    """Return how many tokens' keys and values slices must read, each once, their own included."""
    if not window:
        return tokens + context
    return tokens + _between(0, context, window - 1)


def _between(least: int, value: Count, most: Count | int) -> Count:
    if isinstance(value, int):
        return max(least, min(value, int(most)))
    clipped: NDArray[np.int64] = np.maximum(np.minimum(value, most), least)
    return clipped


def window_layers(shape: Shape) -> int:
    """Return how many layers see their window only."""
    return shape.num_layers - shape.num_full_layers if shape.window_tokens else 0


def linear_parameters(shape: Shape) -> int:
    """Return the weights that every token is multiplied with, lm_head and embedding left out.

    For a mixture of experts: those of the experts a token is routed to, and the shared ones.
    """
    experts = shape.experts_per_token * expert_parameters(shape)
    return common_parameters(shape) + experts


def resident_parameters(shape: Shape) -> int:
    """Return the weights of all layers, every expert counted, lm_head and embedding left out."""
    return common_parameters(shape) + shape.num_experts * expert_parameters(shape)


def common_parameters(shape: Shape) -> int:
    """Return the weights of all layers that no token goes without: all but the routed experts."""
    attention = shape.hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    feed_forward = 3 * shape.hidden * shape.ffn
    if shape.num_experts:
        router = shape.hidden * (shape.num_experts + shape.num_shared_gates)
        feed_forward = feed_forward * shape.num_shared_experts + router
    return shape.num_layers * (attention + feed_forward)


def expert_parameters(shape: Shape) -> int:
    """Return the weights of one routed expert, in all layers together; 0 in a dense model."""
    return 3 * shape.hidden * shape.ffn * shape.num_layers if shape.num_experts else 0


def kv_bytes_per_token(shape: Shape) -> int:
    """Return the bytes of keys and values that one cached token takes, all layers together."""
    return shape.num_layers * layer_kv_bytes(shape)


def layer_kv_bytes(shape: Shape) -> int:
    """Return the same of one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * shape.kv_bits // 8


def rank_shape(shape: Shape, num_ranks: int) -> Shape:
    """Return what one of several tensor-parallel ranks computes, as a shape of its own.

    Heads, feed-forward columns and vocabulary are divided; hidden states and the router are every
    rank's. Where there are fewer KV heads than ranks, several ranks hold the same one.

    Raises:
        ValueError: the heads cannot be divided so.
    """
    kv_heads = shape.num_kv_heads
    if (
        num_ranks < 1
        or shape.num_heads % num_ranks
        or (kv_heads % num_ranks and num_ranks % kv_heads)
    ):
        raise ValueError(f"{shape.num_heads} heads and {kv_heads} of KV on {num_ranks} ranks")
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=max(1, kv_heads // num_ranks),
        ffn=-(-shape.ffn // num_ranks),
        vocab=-(-shape.vocab // num_ranks),
    )
