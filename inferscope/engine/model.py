"""The forward pass, as one function over a ragged batch.

A batch is the concatenation of all tokens of a step, `[tokens]`. Norms and products do not depend
on request boundaries; attention is a callable that has them. So a prefill chunk, a decode token and
a resumed request run the same code.
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
from inferscope.engine.feed_forward import Routed, feed_forward
from inferscope.engine.parallel import WHOLE, RankGroup
from inferscope.engine.quantization import linear
from inferscope.engine.rope import rotation_tables
from inferscope.engine.weights import ModelWeights

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Function of (layer, query [tokens, heads, dim], key, value [tokens, kv_heads, dim])
that returns the query's shape."""


@dataclass(frozen=True)
class Outline:
    """Properties of a model that the step loop needs, without the weights.

    Attributes:
        num_positions: Maximum prompt plus output tokens.
        kv_token_bytes: Bytes of a token's keys and values, a draft model's included.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_positions: int
    kv_token_bytes: int


@dataclass(frozen=True)
class Model:
    """A model ready to run.

    Attributes:
        cos: [positions, 1, head_dim], both halves equal.
        signed_sin: [positions, 1, head_dim], the first half negated, so that a rotation is
            `x * cos + roll(x, head_dim / 2) * signed_sin`: three operations where the textbook's
            `cat(-x2, x1)` takes six; one kernel on a GPU with Triton.
        draft: Model that proposes tokens for this one to verify; None without.
        group: Other ranks, of which each has a part of the model like this; None without.
    """

    config: ModelConfig
    weights: ModelWeights
    cos: Tensor
    signed_sin: Tensor
    draft: Model | None = None
    group: RankGroup | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations and KV."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device that holds the weights."""
        return self.weights.embedding.device

    @property
    def num_positions(self) -> int:
        """Maximum prompt plus output tokens."""
        return len(self.cos)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's keys and values, a draft model's included."""
        own_bytes = self.config.kv_token_bytes(self.dtype.itemsize)
        return own_bytes + (0 if self.draft is None else self.draft.kv_token_bytes)


def outline_of(model: Model) -> Outline:
    """Return the properties of the whole model of which `model` may be one rank's part."""
    place = WHOLE if model.group is None else model.group.place
    config, draft = place.whole(model.config), model.draft
    kv_token_bytes = config.kv_token_bytes(model.dtype.itemsize)
    kv_token_bytes += 0 if draft is None else draft.kv_token_bytes
    return Outline(config, model.dtype, model.device, model.num_positions, kv_token_bytes)


def build_model(config: ModelConfig, weights: ModelWeights, *, max_tokens: int) -> Model:
    """Combine weights with rotation tables for positions below `max_tokens`."""
    cos, sin = rotation_tables(config, max_tokens)
    like = weights.embedding
    return Model(
        config=config,
        weights=weights,
        cos=torch.cat([cos, cos], dim=-1).unsqueeze(1).to(like),
        signed_sin=torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(like),
    )


def forward(
    model: Model,
    ids: Tensor,
    *,
    positions: Tensor,
    attend: Attend,
    rows: Tensor,
    routed: Routed | None = None,
) -> Tensor:
    """Compute one step and return logits `[rows, vocab]`.

    Args:
        model: Model to run.
        ids: [tokens] int64, all requests' tokens concatenated.
        positions: [tokens] int64, position of each token in its request.
        attend: Function that stores keys and values and attends within each request.
        rows: [rows] int64, indices of the tokens whose next token is sampled.
        routed: Function that receives the routing of each layer of a mixture, in their order.
    """
    config, weights = model.config, model.weights
    num_rotated = config.num_heads + config.num_kv_heads
    cos, signed_sin = model.cos[positions], model.signed_sin[positions]
    stream = functional.embedding(ids, weights.embedding)
    group = model.group
    if group is not None:
        stream = group.begin(stream)
    summed = _alone if group is None else group.summed
    for layer_idx, layer in enumerate(weights.layers):
        normed = _norm(stream, layer.attention_norm, config)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        rotated = qkv[:, :num_rotated]
        if layer.qk_norm is not None:
            rotated = functional.rms_norm(rotated, (config.head_dim,), eps=config.norm_eps)
            rotated = rotated * layer.qk_norm
        rotated = _rotate(rotated, cos, signed_sin)
        attended = attend(
            layer_idx,
            rotated[:, : config.num_heads],
            rotated[:, config.num_heads :],
            qkv[:, num_rotated:],
        )
        stream = stream + summed(linear(attended.flatten(1), layer.out))
        normed = _norm(stream, layer.ffn_norm, config)
        stream = stream + summed(feed_forward(normed, layer.feed_forward, config, routed))
    if group is not None and not group.end(stream):
        return group.share(stream.new_empty(len(rows), config.vocab))
    logits = functional.linear(_norm(stream[rows], weights.norm, config), weights.head)
    return logits if group is None else group.share(logits)


def _alone(partial: Tensor) -> Tensor:
    """Return the sum over the only rank."""
    return partial


def _norm(stream: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return functional.rms_norm(stream, (config.hidden,), weight, config.norm_eps)


def _rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    if heads.is_cuda and devices.has_triton():
        from inferscope.engine.elementwise_kernels import rotate  # needs Triton

        return rotate(heads, cos, signed_sin)
    return rotate_by_torch(heads, cos, signed_sin)


def rotate_by_torch(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return rotated heads, see `Model.signed_sin`."""
    half = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, half, signed_sin)
