"""The reference engine: each technique of a serving engine in its simplest correct form.

Names are imported on first use. An API server holds no model and never imports torch, which saves
two seconds and 200 MB per process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.lazy import lazy_names

if TYPE_CHECKING:
    from inferscope.engine.capacity import pool_blocks
    from inferscope.engine.ceilings import measure_ceilings
    from inferscope.engine.config import EngineOptions, ModelConfig, Speculation
    from inferscope.engine.core import Engine, Output
    from inferscope.engine.devices import (
        device_name,
        device_uuid,
        find_device,
        highest_clocks_mhz,
        step_timer,
    )
    from inferscope.engine.frontend import FrontEnd
    from inferscope.engine.load import describe, describe_model, load_engine, load_model
    from inferscope.engine.model import Outline
    from inferscope.engine.model_names import load_tokenizer
    from inferscope.engine.request import BadRequest, QueueFull, Request, Sampling
    from inferscope.engine.start import imports_that_stay
    from inferscope.engine.steptimes import StepTime, measure_steps
    from inferscope.engine.tokenizer import TextStream, Tokenizer

__all__ = [
    "BadRequest",
    "Engine",
    "EngineOptions",
    "FrontEnd",
    "ModelConfig",
    "Outline",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "Speculation",
    "StepTime",
    "TextStream",
    "Tokenizer",
    "describe",
    "describe_model",
    "device_name",
    "device_uuid",
    "find_device",
    "highest_clocks_mhz",
    "imports_that_stay",
    "load_engine",
    "load_model",
    "load_tokenizer",
    "measure_ceilings",
    "measure_steps",
    "pool_blocks",
    "step_timer",
]

__getattr__ = lazy_names(
    __name__,
    {
        "capacity": ["pool_blocks"],
        "ceilings": ["measure_ceilings"],
        "config": ["EngineOptions", "ModelConfig", "Speculation"],
        "core": ["Engine", "Output"],
        "devices": [
            "device_name",
            "device_uuid",
            "find_device",
            "highest_clocks_mhz",
            "step_timer",
        ],
        "frontend": ["FrontEnd"],
        "load": ["describe", "describe_model", "load_engine", "load_model"],
        "model": ["Outline"],
        "model_names": ["load_tokenizer"],
        "request": ["BadRequest", "QueueFull", "Request", "Sampling"],
        "start": ["imports_that_stay"],
        "steptimes": ["StepTime", "measure_steps"],
        "tokenizer": ["TextStream", "Tokenizer"],
    },
)
