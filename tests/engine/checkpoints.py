"""Tiny random checkpoints of every architecture, as transformers saves them, and prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True)),
}


@dataclass(frozen=True)
class Checkpoint:
    """A saved model, and transformers' own copy of it to compare with."""

    folder: Path
    reference: Any


def randomise(model: Any, seed: int = 0) -> Any:
    """Give every weight a value that matters: biases and norms too, which start as 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.1 * drawn if parameter.dim() == 2 else parameter.data + 0.2 * drawn
    return model.eval()


def prompts(num: int, *, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of mixed lengths, every second one behind the same 48 tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocab) for _ in range(48)]
    return [
        (shared if idx % 2 else []) + [draw.randrange(vocab) for _ in range(draw.randint(1, 60))]
        for idx in range(num)
    ]


def save(name: str, folder: Path) -> Checkpoint:
    """Save a random model of the architecture."""
    reference = randomise(MODELS[name]())
    reference.save_pretrained(folder)
    return Checkpoint(folder, reference)
