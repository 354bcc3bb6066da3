"""FLOPs of slices: exact counts of projections, attention and sampled logits.

A multiply-add is two. Norms, rotary embeddings and activation functions are left out, as they are
from torch's FlopCounterMode, which this equals on the reference engine's matrix products. Of how
many bits the weights are makes no difference, nor how many ranks share the work: the counts are
the model's, and what ranks repeat (a replicated KV head, the router) is not counted again. What one
rank executes, repetitions included, are the counts of its `rank_shape`.
"""

from __future__ import annotations

from typing import NamedTuple

from inferscope.cost.shape import Count, linear_parameters, pairs, window_layers
from inferscope.records import Shape


class FlopRates(NamedTuple):
    """FLOPs of a shape's slices, as coefficients."""

    per_token: int
    half_pair: int
    """Half the FLOPs of a query-key pair: pairs are counted twice, because halving arrays is
    slow."""
    per_window_pair: int
    """FLOPs of a pair in the layers that have a window; `half_pair` holds those of the others."""
    per_row: int
    """FLOPs of a row of logits."""
    window: int
    """Window length in tokens; 0 if no layer has one."""

    def of_slices(self, tokens: Count, context: Count, sampled: Count) -> Count:
        """Return the FLOPs of slices."""
        pairs_twice = 2 * context + tokens + 1
        flops = tokens * (self.per_token + self.half_pair * pairs_twice) + self.per_row * sampled
        if self.per_window_pair:
            flops = flops + self.per_window_pair * pairs(tokens, context, self.window)
        return flops


def flop_rates(shape: Shape) -> FlopRates:
    """Return the FLOP coefficients of a shape."""
    half_pair = 2 * shape.num_heads * shape.head_dim
    num_window = window_layers(shape)
    return FlopRates(
        per_token=2 * linear_parameters(shape),
        half_pair=half_pair * (shape.num_layers - num_window),
        per_window_pair=2 * half_pair * num_window,
        per_row=2 * shape.hidden * shape.vocab,
        window=shape.window_tokens if num_window else 0,
    )
