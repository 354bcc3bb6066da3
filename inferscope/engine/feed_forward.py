"""Feed-forward blocks: one gated network for all tokens, or a mixture of experts.

A mixture's router gives each token a probability for each expert. The token is computed by the
`experts_per_token` likeliest, and their outputs are summed, weighted by the probabilities:

    tokens   a b c              experts of a: 0 2, of b: 2 1, of c: 0 2
    sorted   0: a c   1: b   2: a b c        one product for each expert that has tokens
    summed   a: w0 y0 + w2 y2   ...

So a step reads the weights of the experts that its tokens chose, not of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inferscope.engine import devices
from inferscope.engine.config import ModelConfig
from inferscope.engine.quantization import Matrix, linear

Routed: TypeAlias = Callable[[list[int]], object]
"""Function that receives the number of tokens of each expert of a layer, [experts]."""


@dataclass(frozen=True)
class GatedWeights:
    """Weights of a gated feed-forward network.

    Attributes:
        gate_up: [2 * ffn, hidden]
        down: [hidden, ffn]
    """

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class MixtureWeights:
    """Weights of a mixture of experts.

    Attributes:
        router: [experts, hidden]
        experts: Networks of the experts.
    """

    router: Tensor
    experts: tuple[GatedWeights, ...]


def feed_forward(
    inputs: Tensor,
    weights: GatedWeights | MixtureWeights,
    config: ModelConfig,
    routed: Routed | None = None,
) -> Tensor:
    """Return the block's outputs for inputs [tokens, hidden]."""
    if isinstance(weights, GatedWeights):
        return _gated(inputs, weights)
    return _mixed(inputs, weights, config, routed)


def _gated(inputs: Tensor, weights: GatedWeights) -> Tensor:
    return linear(_gate(linear(inputs, weights.gate_up)), weights.down)


def _gate(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda and devices.has_triton():
        from inferscope.engine import elementwise_kernels  # needs Triton

        return elementwise_kernels.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _mixed(
    inputs: Tensor, mixture: MixtureWeights, config: ModelConfig, routed: Routed | None
) -> Tensor:
    """Return the weighted sum over each token's experts.

    Reading the number of tokens of each expert waits for the device, once in each layer.
    """
    per_token = config.experts_per_token
    probabilities = linear(inputs, mixture.router).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = probabilities.topk(per_token, dim=-1)
    if config.normalizes_experts:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    # [tokens * per_token]: entry i belongs to token i // per_token.
    by_expert = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=config.num_experts).tolist()
    if routed is not None:
        routed(counts)
    groups = torch.split(inputs[by_expert // per_token], counts)
    computed = [
        _gated(group, expert)
        for group, expert in zip(groups, mixture.experts, strict=True)
        if len(group)
    ]
    outputs = torch.empty(len(by_expert), inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
    outputs[by_expert] = torch.cat(computed)
    weighted = outputs.view(len(inputs), per_token, -1) * shares.to(inputs.dtype).unsqueeze(-1)
    return weighted.sum(dim=1)
