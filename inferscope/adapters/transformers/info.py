"""Descriptions of transformers' models, and the timers of their steps."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from inferscope.adapters.sampling_attributes import asked
from inferscope.adapters.shapes import shape_of
from inferscope.probe import EngineInfo, EventTimer, HostTimer, StepTimer, TorchEvents


def describe(model: Any, *, processor: Any = None) -> tuple[EngineInfo, StepTimer]:
    """Return the description of a model for the records, and the timer of its device.

    Args:
        model: a `PreTrainedModel`.
        processor: its continuous batching, where it is known.
    """
    torch, transformers = sys.modules["torch"], sys.modules["transformers"]
    config, device = model.config, model.device
    is_cuda = device.type == "cuda"
    cache = getattr(processor, "cache", None)
    scheduler = getattr(processor, "scheduler", None)
    name = getattr(config, "name_or_path", "") or type(model).__name__
    properties = torch.cuda.get_device_properties(device) if is_cuda else None
    info = EngineInfo(
        0,
        "transformers",
        version=str(transformers.__version__),
        model=name,
        served_name=name,
        shape=shape_of(config, activation_bits=8 * model.dtype.itemsize),
        device=properties.name if properties is not None else device.type,
        device_uuid=str(getattr(properties, "uuid", "")),
        max_running=getattr(scheduler, "max_requests_per_batch", 0),
        token_budget=getattr(cache, "max_batch_tokens", 0),
        block_tokens=_block_tokens(cache),
        num_blocks=getattr(cache, "num_blocks", 0),
        options_hash=hashlib.sha256(repr(config).encode()).hexdigest()[:16],
        num_threads=0 if is_cuda else torch.get_num_threads(),
    )
    return info, EventTimer(TorchEvents(device)) if is_cuda else HostTimer()


def is_asynchronous(model: Any) -> bool:
    """Return whether a model still computes when its forward has returned: on a CPU none does."""
    return bool(model.device.type == "cuda")


def asked_of(config: Any, *, is_stream: bool | None = None) -> dict[str, str]:
    """Return what was asked of a request's sampling, by its `GenerationConfig`.

    Where the likeliest token is taken, what would shape the choice is not in force. A temperature
    of 0 is none to transformers, but what its server is given for that.
    """
    numbers = {
        "max_tokens": getattr(config, "max_new_tokens", None),
        "n": getattr(config, "num_return_sequences", None),
    }
    is_sampling, temperature = (
        getattr(config, "do_sample", None),
        getattr(config, "temperature", None),
    )
    if is_sampling or temperature == 0:
        numbers["temperature"] = temperature
    if is_sampling:
        numbers |= {word: getattr(config, word, None) for word in ("top_p", "top_k")}
    return asked(numbers, is_stream=is_stream)


def _block_tokens(cache: Any) -> int:
    allocators = getattr(cache, "cache_allocators", None)
    if not allocators:
        return 0
    return int(max(getattr(each, "tokens_per_page", 0) for each in allocators.values()))
