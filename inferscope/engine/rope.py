"""Rotary position embeddings: frequencies by the checkpoint's scaling, and rotation tables.

A pair of a head's elements is rotated by `position * frequency`. Scalings that extend a model's
context lower the frequencies: `linear` all of them, `llama3` and `yarn` only those whose rotations
are slow over the positions of the training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inferscope.engine.config import LinearRope, Llama3Rope, ModelConfig, YarnRope


def rotation_tables(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, head_dim / 2] each, in float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(config))
    scaling = config.rope_scaling
    factor = scaling.attention_factor if isinstance(scaling, YarnRope) else 1.0
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair, [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Rope):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, YarnRope):
        return _yarn(frequencies, scaling, config)
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Stretch wavelengths beyond the original context and blend those near it.

    Source: `apply_scaling` in Meta's llama-models, models/llama3/model.py.
    """
    wavelength = 2 * math.pi / frequencies
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = (scaling.original_positions / wavelength - scaling.low_freq_factor) / span
    kept_share = kept_share.clamp(0.0, 1.0)
    return frequencies * (kept_share + (1 - kept_share) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: YarnRope, config: ModelConfig) -> Tensor:
    """Keep fast frequencies, divide slow ones, and blend linearly by index between them.

    Source: "NTK-by-parts" of the YaRN paper, arXiv 2309.00071, section 3.2.
    """
    first = _index_of(scaling.fast_rotations, scaling, config)
    last = _index_of(scaling.slow_rotations, scaling, config)
    if scaling.is_rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    span = last - first or 0.001
    indices = torch.arange(len(frequencies), dtype=torch.float32)
    divided_share = ((indices - first) / span).clamp(0.0, 1.0)
    return frequencies * (1 - divided_share + divided_share / scaling.factor)


def _index_of(num_rotations: float, scaling: YarnRope, config: ModelConfig) -> float:
    """Return the index of the frequency with this many rotations over the original positions."""
    frequency = 2 * math.pi * num_rotations / scaling.original_positions
    return -config.head_dim / 2 * math.log(frequency, config.rope_theta)
