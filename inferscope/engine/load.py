"""Construction of an engine from a model's name (see `model_names.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

from inferscope import __version__
from inferscope.engine import shapes
from inferscope.engine.config import EngineOptions, ModelConfig, read_checkpoint_config
from inferscope.engine.core import Engine
from inferscope.engine.devices import device_name, device_uuid, find_device, has_fast_products
from inferscope.engine.model import Model, Outline, build_model
from inferscope.engine.model_names import BUILTIN, BUILTIN_DRAFT, model_folder
from inferscope.engine.parallel import WHOLE, Place
from inferscope.engine.quantization import WEIGHT_BITS, quantizer
from inferscope.engine.remote import RemoteRunner
from inferscope.engine.weights import DTYPES, load_weights, random_weights
from inferscope.errors import BadInput
from inferscope.probe import EngineInfo, Probe, Shape


def load_engine(
    model: str,
    options: EngineOptions | None = None,
    *,
    open_probe: Callable[[EngineInfo], Probe] | None = None,
    in_worker: bool = False,
) -> Engine:
    """Load a model and build an engine on it.

    Args:
        model: "builtin", "random:SHAPE", or the path of a checkpoint.
        options: Options of the engine.
        open_probe: Function from the engine's description to its probe, such as `Probe.open`.
        in_worker: Whether the model is loaded and run in a separate process. With several ranks it
            always is, and with overlap where the model runs on a CPU: there a step holds the thread
            that launches it.

    Raises:
        BadInput: the name is not a model, or the model needs a feature that is not computed.
    """
    options = options or EngineOptions()
    torch.set_num_threads(options.num_threads)
    is_cpu = find_device(options.device).type == "cpu"
    if in_worker or options.num_ranks > 1 or (options.overlap and is_cpu):
        runner = RemoteRunner(model, options)
        options = replace(options, num_blocks=runner.num_blocks)
        engine = Engine(runner.outline, options, runner=runner)
    else:
        engine = Engine(load_model(model, options), options)
    end, vocab = options.end_of_thinking, engine.model.config.vocab
    if end is not None and not 0 <= end < vocab:
        engine.close()
        raise BadInput(f"end_of_thinking is {end}; this model has the tokens 0 to {vocab - 1}.")
    if open_probe is not None:
        engine.probe = open_probe(describe(engine, name=model))
    return engine


def load_model(model: str, options: EngineOptions, place: Place = WHOLE) -> Model:
    """Load or draw the weights of a model, or of a rank's part of it, as the options want them.

    A draft model is never quantised.

    Raises:
        BadInput: the model or its draft model cannot be loaded, the device cannot compute it, or
            the two do not fit each other.
    """
    target = _load_one(model, options, place)
    if options.speculative != "draft":
        return target
    name = options.draft_model
    if name is None:
        if model != BUILTIN:
            raise BadInput(f"{model} has no draft model of its own. Name one with --draft-model.")
        name = BUILTIN_DRAFT
    draft = _load_one(name, replace(options, quantization=None))
    if draft.config.vocab != target.config.vocab:
        raise BadInput(
            f"the draft model {name} has a vocabulary of {draft.config.vocab} tokens, and {model} "
            f"one of {target.config.vocab}. Name a draft model with the same tokenizer."
        )
    if draft.num_positions < target.num_positions:
        raise BadInput(
            f"the draft model {name} has {draft.num_positions} positions, and {model} would use "
            f"{target.num_positions}. Give a --max-model-len of at most {draft.num_positions}."
        )
    return replace(target, draft=draft)


def _load_one(model: str, options: EngineOptions, place: Place = WHOLE) -> Model:
    device = find_device(options.device)
    if place.num_ranks > 1 and device.type != "cpu":
        raise BadInput(
            f"tensor and pipeline parallelism run on CPUs, and the device is {device.type}. "
            "Use --device cpu."
        )
    if model.startswith(shapes.PREFIX):
        config = shapes.parse_shape(model.removeprefix(shapes.PREFIX))
        dtype = _dtype_of(model, config, options, device)
        quantize = quantizer(options.quantization, dtype=dtype, device=device)
        place.part(config)  # before the weights are drawn
        weights = random_weights(
            config, seed=options.seed, dtype=dtype, device=device, quantize=quantize, place=place
        )
    else:
        folder = model_folder(model)
        config = read_checkpoint_config(folder)
        dtype = _dtype_of(model, config, options, device)
        quantize = quantizer(options.quantization, dtype=dtype, device=device)
        place.part(config)
        weights = load_weights(
            folder, config, dtype=dtype, device=device, quantize=quantize, place=place
        )
    max_tokens = min(config.max_positions, options.max_model_tokens or config.max_positions)
    return build_model(place.part(config), weights, max_tokens=max_tokens)


def _dtype_of(
    model: str, config: ModelConfig, options: EngineOptions, device: torch.device
) -> torch.dtype:
    """Return the dtype of the options; `auto` is the model's, or float32 where that is faster.

    A 16-bit weight is the same number in float32. Quantised products need 16-bit inputs.
    """
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    dtype = DTYPES[config.dtype]
    is_builtin_on_cpu = model in (BUILTIN, BUILTIN_DRAFT) and device.type == "cpu"
    is_slow = is_builtin_on_cpu or not has_fast_products(device, dtype)
    return torch.float32 if is_slow and options.quantization is None else dtype


def describe(engine: Engine, *, name: str) -> EngineInfo:
    """Return the description of an engine for its records."""
    return describe_model(
        engine.model, engine.options, name=name, num_blocks=engine.pool.num_blocks
    )


def describe_model(
    model: Model | Outline,
    options: EngineOptions,
    *,
    name: str,
    num_blocks: int,
    place: Place = WHOLE,
) -> EngineInfo:
    """Return the description of a model and its options for the records of a rank."""
    device = model.device
    return EngineInfo(
        0,
        "inferscope",
        version=__version__,
        model=name,
        served_name=name,
        shape=_shape(model, options),
        device=device_name(device),
        device_uuid=device_uuid(device),
        max_running=options.max_running,
        token_budget=options.token_budget,
        block_tokens=options.block_tokens,
        num_blocks=num_blocks,
        options_hash=hashlib.sha256(repr(options).encode()).hexdigest()[:16],
        num_threads=options.num_threads if device.type == "cpu" else 0,
        role=options.role,
        ranks=(place.tensor_rank, place.stage, 0, 0),
        sizes=(options.tensor_parallel, options.pipeline_parallel, 1, 1),
    )


def _shape(model: Model | Outline, options: EngineOptions) -> Shape:
    config, element_bits = model.config, 8 * model.dtype.itemsize
    name = options.quantization
    return Shape(
        num_layers=config.num_layers,
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn,
        vocab=config.vocab,
        weight_bits=element_bits if name is None else WEIGHT_BITS[name],
        kv_bits=element_bits,
        activation_bits=element_bits,
        tied=config.is_tied,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        head_bits=0 if name is None else element_bits,
    )
