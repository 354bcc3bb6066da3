"""The reference engine: every technique of a serving engine in its plainest correct form."""

from __future__ import annotations

from inferscope.engine.config import EngineOptions, ModelConfig
from inferscope.engine.core import Engine, Output
from inferscope.engine.load import load_engine, load_tokenizer
from inferscope.engine.request import BadRequest, QueueFull, Request, Sampling
from inferscope.engine.tokenizer import TextStream, Tokenizer

__all__ = [
    "BadRequest",
    "Engine",
    "EngineOptions",
    "ModelConfig",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "TextStream",
    "Tokenizer",
    "load_engine",
    "load_tokenizer",
]
