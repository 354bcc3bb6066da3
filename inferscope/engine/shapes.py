"""Shapes of random models: public shapes by name, or any shape by its parameters.

    random:llama-8b
    random:hidden=256,layers=4,heads=4,kv_heads=2,ffn=512,vocab=1024

The weights are random, but the work is that of the real model: time and memory per step depend only
on the shape. Parameters after a name change it: `random:llama-1b,layers=2`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from msgspec import structs

from inferscope.engine.config import (
    WITH_QK_NORM,
    WITH_QKV_BIAS,
    Architecture,
    Llama3Rope,
    ModelConfig,
)
from inferscope.errors import BadInput

PREFIX = "random:"
BUILTIN_VOCAB = 1024
"""Number of ids of the built-in tokenizer; random models with at least as many use it."""

_LLAMA_3 = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192
)

_TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=512,
    max_positions=2048,
    is_tied=True,
)

SHAPES: dict[str, ModelConfig] = {
    "tiny": _TINY,
    "tiny-moe": replace(
        _TINY,
        architecture="qwen3_moe",
        ffn=64,
        num_experts=8,
        experts_per_token=2,
        has_qk_norm=True,
    ),
    "small-100m": ModelConfig(
        architecture="llama",
        num_layers=12,
        hidden=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        ffn=2048,
        vocab=8192,
        max_positions=8192,
        is_tied=True,
    ),
    "llama-1b": ModelConfig(
        architecture="llama",
        num_layers=16,
        hidden=2048,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn=8192,
        vocab=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=structs.replace(_LLAMA_3, factor=32.0),
        is_tied=True,
    ),
    "llama-8b": ModelConfig(
        architecture="llama",
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn=14_336,
        vocab=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA_3,
    ),
    "qwen2-0.5b": ModelConfig(
        architecture="qwen2",
        num_layers=24,
        hidden=896,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        ffn=4864,
        vocab=151_936,
        max_positions=32_768,
        rope_theta=1_000_000.0,
        has_qkv_bias=True,
        is_tied=True,
    ),
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3",
        num_layers=28,
        hidden=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn=3072,
        vocab=151_936,
        max_positions=40_960,
        rope_theta=1_000_000.0,
        has_qk_norm=True,
        is_tied=True,
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        num_layers=36,
        hidden=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn=12_288,
        vocab=151_936,
        max_positions=40_960,
        rope_theta=1_000_000.0,
        has_qk_norm=True,
    ),
    "qwen3-30b-a3b": ModelConfig(
        architecture="qwen3_moe",
        num_layers=48,
        hidden=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn=768,
        vocab=151_936,
        max_positions=40_960,
        rope_theta=1_000_000.0,
        has_qk_norm=True,
        num_experts=128,
        experts_per_token=8,
    ),
}

_ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
_FIELD_BY_KEY = {
    "hidden": "hidden",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "ffn": "ffn",
    "vocab": "vocab",
    "positions": "max_positions",
    "experts": "num_experts",
    "experts_per_token": "experts_per_token",
}
# The byte tokenizer, used for small vocabularies, needs 256 ids.
_MIN_VOCAB = 256


def parse_shape(text: str) -> ModelConfig:
    """Parse the text after `random:`: a name, parameters, or a name and parameters.

    Omitted parameters keep the value of the named shape, or of `tiny` without a name. `head_dim`
    defaults to hidden / heads. `arch` is an `Architecture`; `MIXTURES` need `experts` and
    `experts_per_token`.

    Raises:
        BadInput: a name or parameter is unknown, or a value makes no valid model.
    """
    terms = [term.strip() for term in text.split(",") if term.strip()]
    shape = _TINY
    if terms and "=" not in terms[0]:
        name = terms.pop(0)
        if name not in SHAPES:
            raise BadInput(
                f"unknown shape {name!r}. Known: {', '.join(SHAPES)}; or give parameters: "
                "random:hidden=256,layers=4,heads=4,kv_heads=2,ffn=512,vocab=1024."
            )
        shape = SHAPES[name]
    elif not terms:
        raise BadInput(f"random: names no shape. Known: {', '.join(SHAPES)}.")
    values = _parameters(terms)
    architecture = _architecture(values.pop("arch", shape.architecture))
    numbers = {_FIELD_BY_KEY[key]: _positive(key, value) for key, value in values.items()}
    if numbers.get("vocab", shape.vocab) < _MIN_VOCAB:
        raise BadInput(f"vocab={values['vocab']} is too small. Give at least {_MIN_VOCAB}.")
    if "head_dim" not in numbers and {"hidden", "num_heads"} & numbers.keys():
        hidden = numbers.get("hidden", shape.hidden)
        numbers["head_dim"] = hidden // numbers.get("num_heads", shape.num_heads)
    of_architecture = {
        "architecture": architecture,
        "has_qkv_bias": architecture in WITH_QKV_BIAS,
        "has_qk_norm": architecture in WITH_QK_NORM,
    }
    return ModelConfig(**{**vars(shape), **numbers, **of_architecture})


def _parameters(terms: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for term in terms:
        key, _, value = term.partition("=")
        if key not in _FIELD_BY_KEY and key != "arch":
            raise BadInput(
                f"unknown parameter {term!r} of a random model. "
                f"Known: arch, {', '.join(_FIELD_BY_KEY)}."
            )
        values[key] = value
    return values


def _positive(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise BadInput(f"{key}={value} is invalid. Give a whole number of at least 1.")
    return int(value)


def _architecture(text: str) -> Architecture:
    for architecture in _ARCHITECTURES:
        if text == architecture:
            return architecture
    raise BadInput(f"arch={text} is unknown. Use {', '.join(_ARCHITECTURES)}.")
