"""Reduction of a step's routing to a record of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.probe.columns import (
    LARGEST_INT64,
    LARGEST_U32,
    LEAST_INT64,
    OddValues,
    column,
    whole,
)
from inferscope.records import ExpertLoad

MOST_EXPERTS, MOST_LAYERS = 4096, 1024
"""Limits of a record: 22 kB."""


def expert_load(
    t_ns: int,
    step: int,
    counts: Sequence[Sequence[int]],
    per_token: int,
    first_layer: int,
    odd: OddValues,
) -> ExpertLoad:
    """Return the record of a step's routing.

    Args:
        t_ns: time of the record.
        step: the step's number.
        counts: number of tokens routed to each expert, by layer.
        per_token: number of experts of each token in each layer.
        first_layer: index of the first of these layers in the model.
        odd: counter of values that no record can hold.

    Raises:
        Exception: any, if these are not counts of at most `MOST_EXPERTS` in `MOST_LAYERS` layers.
    """
    num_experts = len(counts[0])
    if num_experts > MOST_EXPERTS or len(counts) > MOST_LAYERS:
        raise ValueError(f"{num_experts} experts in {len(counts)} layers")
    busiest = [max(layer) for layer in counts]
    per_token = whole(per_token, 1, num_experts, odd)
    return ExpertLoad(
        t_ns,
        whole(step, LEAST_INT64, LARGEST_INT64, odd),
        whole(sum(counts[0]) // per_token, 0, LARGEST_U32, odd),
        per_token,
        column("I", [sum(layers) for layers in zip(*counts, strict=True)], odd),
        column("I", busiest, odd),
        column("H", [layer.index(most) for layer, most in zip(counts, busiest, strict=True)], odd),
        whole(first_layer, 0, LARGEST_U32, odd),
    )
