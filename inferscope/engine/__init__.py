"""The reference engine: each technique of a serving engine in its simplest correct form.

Names are imported on first use. An API server holds no model and never imports torch, which saves
two seconds and 200 MB per process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferscope.engine.config import EngineOptions, ModelConfig
    from inferscope.engine.core import Engine, Output
    from inferscope.engine.load import load_engine
    from inferscope.engine.model_names import load_tokenizer
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

_MODULES = {
    "Engine": "core",
    "EngineOptions": "config",
    "ModelConfig": "config",
    "Output": "core",
    "TextStream": "tokenizer",
    "Tokenizer": "tokenizer",
    "load_engine": "load",
    "load_tokenizer": "model_names",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'request')}")
    return getattr(module, name)
