"""Weights in the layout of the forward pass: fused query, key and value; fused gate and up.

A fused matrix needs one product instead of three, which on small batches is most of a layer's cost.
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
from inferscope.engine.feed_forward import GatedWeights, MixtureWeights
from inferscope.engine.parallel import WHOLE, Place
from inferscope.engine.quantization import Matrix, Quantize, keep
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
    """Weights of one transformer layer.

    Attributes:
        attention_norm: [hidden]
        qkv: [(heads + 2 kv_heads) * head_dim, hidden]
        qkv_bias: [(heads + 2 kv_heads) * head_dim], Qwen2 only.
        qk_norm: [heads + kv_heads, head_dim], Qwen3 only: one row per rotated head.
        out: [hidden, heads * head_dim]
        ffn_norm: [hidden]
        feed_forward: Gated network, or mixture of experts.
    """

    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    ffn_norm: Tensor
    feed_forward: GatedWeights | MixtureWeights


@dataclass(frozen=True)
class ModelWeights:
    """Weights of a model; `head` is `embedding` if they are tied. Both [vocab, hidden]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantize = keep,
    place: Place = WHOLE,
) -> ModelWeights:
    """Load the weights of a Hugging Face checkpoint from safetensors files.

    Raises:
        BadInput: safetensors are missing, or their tensors do not match the configuration.
    """
    with ExitStack() as files:
        checkpoint = _Checkpoint(folder, files)
        checkpoint.check(config)

        def source(name: str) -> Tensor:
            loaded = checkpoint.tensor(name)
            if not torch.stack(loaded.aminmax()).isfinite().all():
                raise BadInput(f"{folder}: {name} holds infinite or NaN values. Download it again.")
            return loaded.to(device=device, dtype=dtype)

        return _assemble(config, source, quantize, place)


def random_weights(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantize = keep,
    place: Place = WHOLE,
) -> ModelWeights:
    """Draw seeded weights, scaled so that activations keep their magnitude across layers.

    A seed gives the same numbers in every dtype, up to rounding.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = _tensor_shapes(config)

    def source(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1 and not name.endswith("bias"):
            return torch.ones(shape, dtype=dtype, device=device)
        deviation = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        drawn = torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator)
        return drawn.to(dtype)

    return _assemble(config, source, quantize, place)


def _assemble(
    config: ModelConfig, source: TensorSource, quantize: Quantize, place: Place
) -> ModelWeights:
    embedding = source("model.embed_tokens.weight").contiguous()
    return ModelWeights(
        embedding=embedding,
        # Layers of other stages are made too: random weights are one sequence.
        layers=tuple(
            layer
            for idx in range(config.num_layers)
            for layer in (_layer(config, idx, source, quantize, place),)
            if place.has_layer(idx, config)
        ),
        norm=source("model.norm.weight"),
        head=embedding if config.is_tied else source("lm_head.weight").contiguous(),
    )


def _layer(
    config: ModelConfig, layer_idx: int, source: TensorSource, quantize: Quantize, place: Place
) -> LayerWeights:
    def own(name: str) -> Tensor:
        return source(f"model.layers.{layer_idx}.{name}").contiguous()

    def rows(name: str) -> Tensor:
        return place.cut(own(name), 0)

    def columns(name: str) -> Tensor:
        return place.cut(own(name), 1)

    block, gate, up, down = _feed_forward_names(config)

    def gated(network: str) -> GatedWeights:
        gate_up = torch.cat([rows(f"{network}.{gate}.weight"), rows(f"{network}.{up}.weight")])
        return GatedWeights(quantize(gate_up), quantize(columns(f"{network}.{down}.weight")))

    qkv_bias = qk_norm = None
    qkv = torch.cat([rows(f"self_attn.{letter}_proj.weight") for letter in "qkv"])
    if config.has_qkv_bias:
        qkv_bias = torch.cat([rows(f"self_attn.{letter}_proj.bias") for letter in "qkv"])
    if config.has_qk_norm:
        part = place.part(config)
        query = own("self_attn.q_norm.weight").expand(part.num_heads, -1)
        key = own("self_attn.k_norm.weight").expand(part.num_kv_heads, -1)
        qk_norm = torch.cat([query, key])
    return LayerWeights(
        attention_norm=own("input_layernorm.weight"),
        qkv=quantize(qkv),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        out=quantize(columns("self_attn.o_proj.weight")),
        ffn_norm=own("post_attention_layernorm.weight"),
        feed_forward=MixtureWeights(
            own(f"{block}.gate.weight"),
            tuple(gated(f"{block}.experts.{expert}") for expert in range(config.num_experts)),
        )
        if config.num_experts
        else gated(block),
    )


def _feed_forward_names(config: ModelConfig) -> tuple[str, str, str, str]:
    """Return a checkpoint's names of the feed-forward block, and of a network's three matrices."""
    if config.architecture == "mixtral":
        return "block_sparse_moe", "w1", "w3", "w2"
    return "mlp", "gate_proj", "up_proj", "down_proj"


def _tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a checkpoint by name, in the order of the model."""
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (config.hidden,)}
    for letter, width in (("q", query), ("k", key), ("v", key)):
        layer[f"self_attn.{letter}_proj.weight"] = (width, config.hidden)
        if config.has_qkv_bias:
            layer[f"self_attn.{letter}_proj.bias"] = (width,)
    if config.has_qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    layer |= {
        "self_attn.o_proj.weight": (config.hidden, query),
        "post_attention_layernorm.weight": (config.hidden,),
    }
    block, gate, up, down = _feed_forward_names(config)
    networks = [f"{block}.experts.{expert}" for expert in range(config.num_experts)] or [block]
    if config.num_experts:
        layer[f"{block}.gate.weight"] = (config.num_experts, config.hidden)
    for network in networks:
        layer[f"{network}.{gate}.weight"] = (config.ffn, config.hidden)
        layer[f"{network}.{up}.weight"] = (config.ffn, config.hidden)
        layer[f"{network}.{down}.weight"] = (config.hidden, config.ffn)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        **{
            f"model.layers.{idx}.{name}": shape
            for idx in range(config.num_layers)
            for name, shape in layer.items()
        },
        "model.norm.weight": (config.hidden,),
    }
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


_READ_DTYPES = ("F64", "F32", "F16", "BF16")


class _Checkpoint:
    """Safetensors files of a folder, opened on first use and closed with `files`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._file_by_tensor = _file_by_tensor(folder)
        self._opened: dict[str, Any] = {}

    def check(self, config: ModelConfig) -> None:
        """Check the files' headers against the configuration.

        Raises:
            BadInput: a tensor is missing, unknown, or of another shape or dtype.
        """
        expected = _tensor_shapes(config)
        wrong = [text for name, shape in expected.items() if (text := self._wrong(name, shape))]
        for name in self._file_by_tensor:
            # lm_head duplicates a tied embedding, and inv_freq is computed.
            is_known = name in expected or (name == "lm_head.weight" and config.is_tied)
            if not is_known and not name.endswith("rotary_emb.inv_freq"):
                wrong.append(f"the tensor {name} is not part of that model")
        if wrong:
            more = f" ({len(wrong) - 1} more tensors are wrong)" if len(wrong) > 1 else ""
            raise BadInput(
                f"{self._folder} does not hold the weights of the model in its config.json: "
                f"{wrong[0]}{more}. Download both again: one is damaged or of another model."
            )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; `check` has validated its name."""
        loaded: Tensor = self._open(name).get_tensor(name)
        return loaded

    def _wrong(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the mismatch of a tensor as text; empty if it matches."""
        missing = f"the tensor {name} of shape {shape} is missing"
        if name not in self._file_by_tensor:
            return missing
        try:
            stored = self._open(name).get_slice(name)
        except SafetensorError:  # the index names a file without this tensor
            return missing
        found = tuple(stored.get_shape())
        if found != shape:
            hint = ", which is transposed" if found == shape[::-1] else ""
            return f"the tensor {name} has the shape {found}{hint}, and should have {shape}"
        if stored.get_dtype() not in _READ_DTYPES:
            read = ", ".join(_READ_DTYPES)
            return f"the tensor {name} is stored as {stored.get_dtype()}, and only {read} are read"
        return ""

    def _open(self, name: str) -> Any:
        file = self._file_by_tensor[name]
        if file not in self._opened:
            self._opened[file] = self._files.enter_context(_open(self._folder / file))
        return self._opened[file]


def _file_by_tensor(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
