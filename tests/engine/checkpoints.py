"""Small random checkpoints of every architecture, saved by transformers, and prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inferscope.engine.feed_forward import MixtureWeights
from inferscope.engine.model import Model
from inferscope.engine.quantization import Matrix

VOCAB = 384
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": "Llama",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
"""Model types of transformers; the first does not tie its embeddings."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved model, and transformers' instance of it as the reference."""

    folder: Path
    reference: Any


_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def randomise(model: Any, seed: int = 0) -> Any:
    """Set every weight to a random value, including biases and norms, which start as 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.1 * drawn if parameter.dim() >= 2 else parameter.data + 0.2 * drawn
    return model.eval()


def build(name: str, **more: Any) -> Any:
    """Return a new model of the architecture, with `more` in its configuration."""
    import transformers  # takes three seconds, and most test workers do not need it

    settings = {**_SHAPE, "tie_word_embeddings": name != "llama", **more}
    settings = {**_OWN_SETTINGS.get(name, {}), **settings}
    config = getattr(transformers, f"{MODELS[name]}Config")(**settings)
    return getattr(transformers, f"{MODELS[name]}ForCausalLM")(config)


def prompts(num: int, *, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of mixed lengths; every second one starts with the same 48 tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocab) for _ in range(48)]
    return [
        (shared if idx % 2 else []) + [draw.randrange(vocab) for _ in range(draw.randint(1, 60))]
        for idx in range(num)
    ]


def save(name: str, folder: Path, **more: Any) -> Checkpoint:
    """Save a random model of the architecture, with `more` in its configuration."""
    reference = randomise(build(name, **more))
    reference.save_pretrained(folder)
    return Checkpoint(folder, reference)


def matrices_of(model: Model) -> list[Matrix]:
    """Return all matrices of a model's layers, those of every expert and the router included."""
    found: list[Matrix] = []
    for layer in model.weights.layers:
        block = layer.feed_forward
        networks = block.experts if isinstance(block, MixtureWeights) else (block,)
        found += [layer.qkv, layer.out]
        found += [matrix for each in networks for matrix in (each.gate_up, each.down)]
        found += [block.router] if isinstance(block, MixtureWeights) else []
    return found
