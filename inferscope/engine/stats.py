"""Counters of the engine for its server's `/metrics`."""

from __future__ import annotations

from typing import get_args

import msgspec

from inferscope.engine.request import Finish


class EngineStats(msgspec.Struct, array_like=True):
    """Totals since the engine's start, and its state between two steps.

    Attributes:
        finished: number of ended requests by finish reason; every reason has an entry.
        prompt_tokens: prompt tokens of requests at their first admission, cached included.
        cached_tokens: prompt tokens found in the prefix cache.
        generated_tokens: sampled tokens.
        preemptions: number of evictions of requests from the KV pool.
        steps: number of steps, failed ones included.
        failed_steps: number of steps that raised; their requests ended with an error.
        blocks_cached: published KV blocks that no request holds.
        block_tokens: tokens of a KV block.
    """

    finished: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(get_args(Finish), 0)
    )
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    block_tokens: int = 0
