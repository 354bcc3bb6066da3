"""From a model's name (see `names.py`) to an engine that runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

from inferscope import __version__
from inferscope.engine import shapes
from inferscope.engine.config import EngineOptions, ModelConfig, read_checkpoint_config
from inferscope.engine.core import Engine
from inferscope.engine.devices import device_name, device_uuid, find_device
from inferscope.engine.model import Model, Outline, build_model
from inferscope.engine.names import BUILTIN, model_folder
from inferscope.engine.remote import RemoteRunner
from inferscope.engine.weights import DTYPES, load_weights, random_weights
from inferscope.probe import EngineInfo, Probe, Shape


def load_engine(
    model: str,
    options: EngineOptions | None = None,
    *,
    open_probe: Callable[[EngineInfo], Probe] | None = None,
    in_worker: bool = False,
) -> Engine:
    """Load a model and build an engine around it.

    Args:
        model: "builtin", "random:SHAPE", or the path of a checkpoint.
        options: How to run it.
        open_probe: Given what the engine is, returns its probe: `Probe.open` to observe it.
        in_worker: Load and run the model in a process of its own.

    Raises:
        BadInput: If the name is no model, or the model needs what this engine does not compute.
    """
    options = options or EngineOptions()
    torch.set_num_threads(options.num_threads)
    if in_worker:
        runner = RemoteRunner(model, options)
        options = replace(options, num_blocks=runner.num_blocks)
        engine = Engine(runner.outline, options, runner=runner)
    else:
        engine = Engine(load_model(model, options), options)
    if open_probe is not None:
        engine.probe = open_probe(describe(engine, name=model))
    return engine


def load_model(model: str, options: EngineOptions) -> Model:
    """Load a model's weights, or draw them, on the device and in the dtype of the options.

    The built-in model is fastest in float32 on a CPU, whatever its file has.
    """
    device = find_device(options.device)
    if model.startswith(shapes.PREFIX):
        config = shapes.parse_shape(model.removeprefix(shapes.PREFIX))
        dtype = DTYPES[config.dtype if options.dtype == "auto" else options.dtype]
        weights = random_weights(config, seed=options.seed, dtype=dtype, device=device)
    else:
        folder = model_folder(model)
        config = read_checkpoint_config(folder)
        usual = "float32" if model == BUILTIN and device.type == "cpu" else config.dtype
        dtype = DTYPES[usual if options.dtype == "auto" else options.dtype]
        weights = load_weights(folder, config, dtype=dtype, device=device)
    max_tokens = min(config.max_positions, options.max_model_tokens or config.max_positions)
    return build_model(config, weights, max_tokens=max_tokens)


def describe(engine: Engine, *, name: str) -> EngineInfo:
    """Return what the probe's records say about an engine."""
    return describe_model(
        engine.model, engine.options, name=name, num_blocks=engine.pool.num_blocks
    )


def describe_model(
    model: Model | Outline, options: EngineOptions, *, name: str, num_blocks: int
) -> EngineInfo:
    """Return what the probe's records say about a model and how it is run."""
    device = model.device
    return EngineInfo(
        0,
        "inferscope",
        version=__version__,
        model=name,
        served_name=name,
        shape=_shape(model.config, element_bits=8 * model.dtype.itemsize),
        device=device_name(device),
        device_uuid=device_uuid(device),
        max_running=options.max_running,
        token_budget=options.token_budget,
        block_tokens=options.block_tokens,
        num_blocks=num_blocks,
        options_hash=hashlib.sha256(repr(options).encode()).hexdigest()[:16],
        num_threads=options.num_threads if device.type == "cpu" else 0,
    )


def _shape(config: ModelConfig, *, element_bits: int) -> Shape:
    return Shape(
        num_layers=config.num_layers,
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
        weight_bits=element_bits,
        kv_bits=element_bits,
        activation_bits=element_bits,
        tied=config.is_tied,
    )
