"""Weights as the forward pass wants them: query, key and value fused, gate and up fused.

A fused matrix is one product instead of three, which on small batches is most of a layer's cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferscope.engine.config import DtypeName, ModelConfig
from inferscope.errors import BadInput

TensorSource: TypeAlias = Callable[[str], Tensor]

DTYPES: Mapping[DtypeName, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """Return a dtype's name among `DTYPES`."""
    return next(name for name, known in DTYPES.items() if known is dtype)


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        attention_norm: [hidden]
        qkv: [(heads + 2 kv_heads) * head_dim, hidden]
        qkv_bias: [(heads + 2 kv_heads) * head_dim], Qwen2 only.
        qk_norm: [heads + kv_heads, head_dim], Qwen3 only: one row per rotated head.
        out: [hidden, heads * head_dim]
        ffn_norm: [hidden]
        gate_up: [2 * ffn, hidden]
        down: [hidden, ffn]
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """A whole model; `head` is `embedding` itself when they are tied. Both [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Load a Hugging Face checkpoint, in one safetensors file or sharded.

    Raises:
        BadInput: If there are no safetensors, or a tensor is missing or has another shape.
    """
    with ExitStack() as files:
        checkpoint = _Checkpoint(folder, files)

        def source(name: str) -> Tensor:
            return checkpoint.tensor(name).to(device=device, dtype=dtype)

        weights = _assemble(config, source)
    expected = (config.vocab, config.hidden)
    if tuple(weights.embedding.shape) != expected:
        raise BadInput(
            f"{folder} has an embedding of shape {tuple(weights.embedding.shape)} where its "
            f"config.json says {expected}. That file belongs to another model."
        )
    return weights


def random_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Draw seeded weights, scaled so that activations keep their size through the layers.

    One seed gives the same numbers in every dtype, up to rounding.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = _tensor_shapes(config)

    def source(name: str) -> Tensor:
        shape = shapes[name.split(".", 3)[-1] if name.startswith("model.layers.") else name]
        if len(shape) == 1 and not name.endswith("bias"):
            return torch.ones(shape, dtype=dtype, device=device)
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        drawn = torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator)
        return drawn.to(dtype)

    return _assemble(config, source)


def _assemble(config: ModelConfig, source: TensorSource) -> ModelWeights:
    embedding = source("model.embed_tokens.weight").contiguous()
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(config, idx, source) for idx in range(config.num_layers)),
        norm=source("model.norm.weight"),
        head=embedding if config.is_tied else source("lm_head.weight").contiguous(),
    )


def _layer(config: ModelConfig, layer_idx: int, source: TensorSource) -> LayerWeights:
    def own(name: str) -> Tensor:
        return source(f"model.layers.{layer_idx}.{name}").contiguous()

    qkv_bias = qk_norm = None
    qkv = torch.cat([own(f"self_attn.{letter}_proj.weight") for letter in "qkv"])
    if config.has_qkv_bias:
        qkv_bias = torch.cat([own(f"self_attn.{letter}_proj.bias") for letter in "qkv"])
    if config.has_qk_norm:
        query = own("self_attn.q_norm.weight").expand(config.num_heads, -1)
        key = own("self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
        qk_norm = torch.cat([query, key])
    return LayerWeights(
        attention_norm=own("input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        out=own("self_attn.o_proj.weight"),
        ffn_norm=own("post_attention_layernorm.weight"),
        gate_up=torch.cat([own("mlp.gate_proj.weight"), own("mlp.up_proj.weight")]),
        down=own("mlp.down_proj.weight"),
    )


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
        "lm_head.weight": (config.vocab, config.hidden),
        "input_layernorm.weight": (config.hidden,),
        "post_attention_layernorm.weight": (config.hidden,),
        "self_attn.o_proj.weight": (config.hidden, query),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (config.ffn, config.hidden),
        "mlp.up_proj.weight": (config.ffn, config.hidden),
        "mlp.down_proj.weight": (config.hidden, config.ffn),
    }
    for letter, width in (("q", query), ("k", key), ("v", key)):
        shapes[f"self_attn.{letter}_proj.weight"] = (width, config.hidden)
        shapes[f"self_attn.{letter}_proj.bias"] = (width,)
    return shapes


class _Checkpoint:
    """The safetensors files of one folder, opened when first needed, closed with `files`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._file_by_tensor = _file_by_tensor(folder)
        self._opened: dict[str, Any] = {}

    def tensor(self, name: str) -> Tensor:
        file = self._file_by_tensor.get(name)
        if file is None:
            raise BadInput(
                f"{self._folder} lacks the tensor {name}. Its weights do not fit its config.json; "
                "download the checkpoint again."
            )
        if file not in self._opened:
            self._opened[file] = self._files.enter_context(_open(self._folder / file))
        loaded: Tensor = self._opened[file].get_tensor(name)
        return loaded


def _file_by_tensor(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError) as error:
            raise BadInput(f"cannot read {index}: {error}. Download it again.") from None
    single = folder / "model.safetensors"
    if not single.exists():
        raise BadInput(
            f"{folder} has no model.safetensors. Convert the checkpoint with transformers' "
            "save_pretrained, which writes safetensors."
        )
    with _open(single) as opened:
        return dict.fromkeys(opened.keys(), single.name)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"cannot read {path}: {error}. Download the checkpoint again.") from None
