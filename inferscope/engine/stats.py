"""The engine's plain counters, as its server's `/metrics` shows them."""

from __future__ import annotations

from typing import get_args

import msgspec

from inferscope.engine.request import Finish


class EngineStats(msgspec.Struct, array_like=True):
    """Totals since the start, and the state between two steps.

    Attributes:
        finished: requests by the reason of their end; every reason is there.
        prompt_tokens: of requests admitted for the first time, cached ones included.
        cached_tokens: of these, found in the prefix cache.
        generated_tokens: sampled.
        preemptions: requests that lost their KV blocks.
        steps: steps run, failed ones included.
        failed_steps: steps that raised; their requests ended with an error.
        blocks_cached: KV blocks that no request holds and a prompt can still find.
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
