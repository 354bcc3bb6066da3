"""Description of a vLLM server from its configuration, as an `EngineInfo`.

Each field is read by itself: one that this version calls otherwise is left empty.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

from inferscope.adapters.shapes import dtype_bits, shape_of
from inferscope.host_signals import pass_on
from inferscope.records import EngineInfo

Field = TypeVar("Field")

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def engine_info(
    config: Any, *, device: str = "", device_uuid: str = "", rank: int = 0
) -> EngineInfo:
    """Describe a server.

    Args:
        config: its `VllmConfig`.
        device: name of this process's device, where it has one.
        device_uuid: of that.
        rank: of a worker among those that hold one copy of the model.
    """
    model, cache = config.model_config, config.cache_config
    scheduler, parallel = config.scheduler_config, config.parallel_config
    tensor = _read(lambda: int(parallel.tensor_parallel_size), 1)
    return EngineInfo(
        0,
        "vllm",
        version=_read(lambda: version("vllm"), ""),
        model=_read(lambda: str(model.model), ""),
        served_name=_read(lambda: _first(model.served_model_name), ""),
        revision=_read(lambda: str(model.revision or ""), ""),
        shape=_read(lambda: _shape(config), None),
        device=device,
        device_uuid=device_uuid,
        ranks=(rank % tensor, rank // tensor, data_rank(config), 0),
        sizes=(
            tensor,
            _read(lambda: int(parallel.pipeline_parallel_size), 1),
            _read(lambda: int(parallel.data_parallel_size), 1),
            1,
        ),
        role=_read(lambda: _ROLES.get(config.kv_transfer_config.kv_role, "both"), "both"),
        max_running=_read(lambda: int(scheduler.max_num_seqs), 0),
        token_budget=_read(lambda: int(scheduler.max_num_batched_tokens), 0),
        block_tokens=_read(lambda: int(cache.block_size), 0),
        num_blocks=_read(lambda: int(cache.num_gpu_blocks), 0),
        options_hash=_read(lambda: str(config.compute_hash()), ""),
        num_threads=_read(_num_threads, 0) if device == "cpu" else 0,
    )


def data_rank(config: Any) -> int:
    """Return which replica of the model this process belongs to.

    `data_parallel_index` keeps it where the replicas are independent and `data_parallel_rank` is 0.
    """
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(index if index is not None else getattr(parallel, "data_parallel_rank", 0))


def _read(read: Callable[[], Field], otherwise: Field) -> Field:
    try:
        return read()
    except Exception as error:  # a configuration of another version; each field stands for itself
        pass_on(error)
        return otherwise


def _first(names: Any) -> str:
    return str(names if isinstance(names, str) else next(iter(names), ""))


def _num_threads() -> int:
    return int(import_module("torch").get_num_threads())


def _shape(config: Any) -> Any:
    activation_bits = dtype_bits(config.model_config.dtype)
    cache_dtype = config.cache_config.cache_dtype
    return shape_of(
        config.model_config.hf_config,
        activation_bits=activation_bits,
        kv_bits=activation_bits if cache_dtype == "auto" else dtype_bits(cache_dtype),
    )
