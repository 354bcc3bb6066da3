"""Description of an SGLang engine: model, ranks, limits, and device."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from inferscope.adapters.shapes import dtype_bits, shape_of
from inferscope.probe import EventTimer, HostTimer, StepTimer, TorchEvents
from inferscope.records import EngineInfo


class Place(NamedTuple):
    """Ranks of a scheduler within its engine."""

    ranks: tuple[int, int, int, int]
    """Tensor, pipeline, data and expert rank."""
    sizes: tuple[int, int, int, int]
    is_core: bool
    """Whether it is the first of its replica, which receives the requests."""

    @property
    def world_rank(self) -> int:
        """Return a number that no other scheduler of the engine has."""
        tensor, pipeline, data, _ = self.ranks
        return (data * self.sizes[1] + pipeline) * self.sizes[0] + tensor


def place(scheduler: Any) -> Place:
    """Return the ranks of a scheduler; SGLang must have set up its groups."""
    state = getattr(scheduler, "ps", None)
    if state is not None:
        return place_in(_context_of(state))
    from sglang.srt.runtime_context import get_parallel

    return place_in(get_parallel())


def place_in(parallel: Any) -> Place:
    """Return the ranks in SGLang's parallel context, or an object with its attributes."""
    # Replicas of the attention only have a scheduler each, as whole ones have, and batches of
    # their own; they divide the tensor ranks among them.
    num_shared = parallel.attn_dp_size
    num_tensor = parallel.tp_size // num_shared
    replica = (parallel.dp_rank or 0) * num_shared + parallel.tp_rank // num_tensor
    return Place(
        (parallel.tp_rank % num_tensor, parallel.pp_rank, replica, parallel.moe_ep_rank),
        (num_tensor, parallel.pp_size, parallel.dp_size * num_shared, parallel.ep_size),
        is_core=not (parallel.pp_rank or parallel.attn_tp_rank or parallel.attn_cp_rank),
    )


def _context_of(state: Any) -> Any:
    """Return the ranks that schedulers before 0.5.21 keep, by the names of the later context.

    There a replica of the attention alone counts as a data-parallel rank too.
    """
    is_shared = state.attn_dp_size > 1
    return SimpleNamespace(
        tp_rank=state.tp_rank,
        tp_size=state.tp_size,
        pp_rank=state.pp_rank,
        pp_size=state.pp_size,
        dp_rank=None if is_shared else state.dp_rank,
        dp_size=1 if is_shared else state.dp_size,
        moe_ep_rank=state.moe_ep_rank,
        ep_size=state.moe_ep_size,
        attn_dp_size=state.attn_dp_size,
        attn_tp_rank=state.attn_tp_rank,
        attn_cp_rank=state.attn_cp_rank,
    )


def engine_info(scheduler: Any, where: Place) -> EngineInfo:
    """Describe the engine that a scheduler belongs to."""
    import sglang

    options = scheduler.server_args
    model = scheduler.model_config
    block_tokens = scheduler.page_size
    device, uuid, num_threads = _device(scheduler)
    disaggregation = str(getattr(options, "disaggregation_mode", None) or "null")
    return EngineInfo(
        0,
        "sglang",
        version=sglang.__version__,
        model=model.model_path,
        served_name=getattr(options, "served_model_name", None) or model.model_path,
        revision=getattr(options, "revision", None) or "",
        shape=shape_of(
            model.hf_config,
            activation_bits=dtype_bits(model.dtype),
            kv_bits=dtype_bits(getattr(options, "kv_cache_dtype", "auto")),
        ),
        device=device,
        device_uuid=uuid,
        ranks=where.ranks,
        sizes=where.sizes,
        role=disaggregation if disaggregation in ("prefill", "decode") else "both",
        max_running=scheduler.max_running_requests,
        token_budget=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        block_tokens=block_tokens,
        num_blocks=scheduler.max_total_num_tokens // block_tokens,
        options_hash=hashlib.sha256(repr(options).encode()).hexdigest()[:16],
        num_threads=num_threads,
    )


def step_timer(scheduler: Any) -> StepTimer | None:
    """Return a timer for steps on the scheduler's device; None if no timer supports it."""
    if scheduler.device == "cpu":
        return HostTimer()
    if scheduler.device == "cuda":
        return EventTimer(TorchEvents(sys.modules["torch"].cuda.current_device()))
    return None


def is_asynchronous(scheduler: Any) -> bool:
    """Return whether a batch still computes when `run_batch` has returned: on a CPU none does."""
    return bool(scheduler.device != "cpu")


def free_and_cached(scheduler: Any) -> Callable[[], tuple[int, int]]:
    """Return what reads the KV pool's free tokens, and those that only the prefix cache holds."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    if scheduler.is_hybrid_swa:
        return lambda: (allocator.full_available_size(), cache.full_evictable_size())
    return lambda: (allocator.available_size(), cache.evictable_size())


def graph_sizes(scheduler: Any) -> list[int]:
    """Return the batch sizes whose decoding was captured as graphs.

    Before 0.5.21 no method of the worker returns them; what captured the graphs has them too.
    """
    worker = scheduler.tp_worker
    read = getattr(worker, "get_decode_cuda_graph_bs", None)
    if read is not None:
        return list(read())
    capturing = getattr(worker.model_runner, "decode_cuda_graph_runner", None)
    return list(getattr(capturing, "capture_bs", ()))


def adapter_names(scheduler: Any) -> Callable[[str], str]:
    """Return what names a LoRA adapter by SGLang's id, and gives the id back where none is known.

    Requests carry the id alone; SGLang makes a new one each time that an adapter is loaded.
    """
    runner = getattr(scheduler.tp_worker, "model_runner", None)

    def name(lora_id: str) -> str:
        loaded = getattr(getattr(runner, "lora_manager", None), "lora_refs", {})
        return str(getattr(loaded.get(lora_id), "lora_name", None) or lora_id)

    return name


def _device(scheduler: Any) -> tuple[str, str, int]:
    torch: Any = sys.modules["torch"]  # loaded long ago: the scheduler holds tensors
    if scheduler.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return properties.name, str(getattr(properties, "uuid", "")), 0
    num_threads = torch.get_num_threads() if scheduler.device == "cpu" else 0
    return scheduler.device, "", num_threads
