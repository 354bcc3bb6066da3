"""Number of KV blocks in the pool, and maximum sequence length.

    bytes of a block = block_tokens * 2 * layers * kv_heads * head_dim * bytes of an element

The default pool holds `max_running` sequences of maximum length, within a share of the available
memory. On a CPU this is an upper limit: the kernel provides pages when blocks are first used.
"""

from __future__ import annotations

from pathlib import Path

import torch

from inferscope.engine.config import EngineOptions
from inferscope.engine.model import Model, Outline
from inferscope.errors import BadInput

_CUDA_POOL_SHARE = 0.8
_CPU_POOL_SHARE = 0.25
"""Share of the available memory; other programs on the host need the rest."""
_MEMORY = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def max_model_tokens(model: Model | Outline, options: EngineOptions, num_blocks: int) -> int:
    """Return the maximum number of prompt plus output tokens of a request."""
    return min(_wanted_tokens(model, options), num_blocks * options.block_tokens)


def pool_blocks(model: Model | Outline, options: EngineOptions) -> int:
    """Return the number of KV blocks in an engine's pool.

    Raises:
        BadInput: `options.num_blocks`, or a single block, does not fit in memory.
    """
    most_bytes = available_bytes(model.device) // options.num_ranks  # of one host
    block_bytes = _block_bytes(model, options)
    num_blocks = options.num_blocks
    if num_blocks is None:
        share = _CUDA_POOL_SHARE if model.device.type == "cuda" else _CPU_POOL_SHARE
        most_bytes = int(most_bytes * share)
        wanted = options.max_running * _blocks_for(_wanted_tokens(model, options), options)
        num_blocks = min(wanted, most_bytes // block_bytes)
    taken_bytes = max(1, num_blocks) * block_bytes
    if taken_bytes > most_bytes:
        raise BadInput(
            f"{max(1, num_blocks)} KV blocks of {block_bytes} bytes take {_amount(taken_bytes)}, "
            f"and the KV pool may have {_amount(most_bytes)}. Lower num_blocks or block_tokens."
        )
    return num_blocks


def check_length(model: Model | Outline, options: EngineOptions, num_blocks: int) -> None:
    """Reject a sequence length or number of blocks in the options that cannot be honored.

    Raises:
        BadInput: the model or the pool is too small for one sequence.
    """
    if options.num_blocks is None and options.max_model_tokens is None:
        return
    positions = model.config.max_positions
    longest = options.max_model_tokens or positions
    need = _blocks_for(longest, options)
    block_bytes = _block_bytes(model, options)
    arithmetic = (
        f"One sequence of {longest} tokens needs {need} KV blocks of {block_bytes} bytes, "
        f"{_amount(need * block_bytes)}; {_amount(available_bytes(model.device))} are available"
    )
    if longest > positions:
        raise BadInput(
            f"max_model_tokens is {longest}, and the model has {positions} positions. "
            f"{arithmetic}. Give a --max-model-len of at most {positions}."
        )
    if num_blocks < need:
        held = num_blocks * options.block_tokens
        raise BadInput(
            f"the KV pool has {num_blocks} blocks of {options.block_tokens} tokens, which hold "
            f"{held}. {arithmetic}. Give at least {need} --num-blocks, or a --max-model-len of at "
            f"most {held}."
        )


def describe_pool(model: Model | Outline, options: EngineOptions, num_blocks: int) -> str:
    """Return a one-line description of the pool."""
    longest = max_model_tokens(model, options, num_blocks)
    positions = model.config.max_positions
    limit = f" of the model's {positions}" if longest < positions else ""
    when = " when all are in use" if model.device.type == "cpu" else ""
    return (
        f"KV pool: {num_blocks} blocks of {options.block_tokens} tokens, "
        f"{_amount(num_blocks * _block_bytes(model, options))}{when}; prompt and output may have "
        f"{longest}{limit} tokens"
    )


def available_bytes(device: torch.device) -> int:
    """Return the bytes a pool may use: a GPU's free memory, or the host's available memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = _MEMORY.read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    try:
        return min(available, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or "max"
        return available


def _wanted_tokens(model: Model | Outline, options: EngineOptions) -> int:
    return min(options.max_model_tokens or model.num_positions, model.num_positions)


def _blocks_for(num_tokens: int, options: EngineOptions) -> int:
    return -(-num_tokens // options.block_tokens)


def _block_bytes(model: Model | Outline, options: EngineOptions) -> int:
    return options.block_tokens * model.kv_token_bytes


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
