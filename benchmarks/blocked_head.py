"""The scheduler's time per step while the queue's head waits for KV blocks.

One request decodes and holds the pool; the head shares its prompt and does not fit. What is timed
is `Scheduler.schedule()` alone, by the number of blocks that the head finds in the prefix cache.
The rule: at most 150 us per step at 1,000 blocks.

    python benchmarks/blocked_head.py --out blocked_head.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from probe_cost import machine

from inferscope.engine.kv import BlockPool
from inferscope.engine.request import Request, Sampling
from inferscope.engine.scheduler import Scheduler
from inferscope.records import RequestIndex

TARGET_US = 150.0
SHARED_BLOCKS = (10, 100, 1000)
_WIDTH = 16
_STEPS = 1000


def request(index: int, prompt: list[int]) -> Request:
    """Return a request that never stops by itself."""
    return Request(
        index=RequestIndex(index),
        request_id=str(index),
        tokens=prompt,
        num_prompt=len(prompt),
        max_tokens=_STEPS,
        sampling=Sampling(max_tokens=_STEPS),
        stop_ids=frozenset(),
        seed=0,
    )


def step_us(shared_blocks: int) -> float:
    """Return the median time of a step's scheduling."""
    prompt = list(range(shared_blocks * _WIDTH))
    spare = _STEPS // _WIDTH + 2
    pool = BlockPool(shared_blocks + spare, block_tokens=_WIDTH)
    scheduler = Scheduler(pool, token_budget=1 << 20, max_running=4, prefix_cache=True)
    scheduler.enqueue(request(0, [*prompt, 1]))
    scheduler.enqueue(request(1, prompt + [2] * _WIDTH * spare))
    took_ns = []
    for _ in range(_STEPS):
        start_ns = time.perf_counter_ns()
        plan = scheduler.schedule()
        took_ns.append(time.perf_counter_ns() - start_ns)
        for part in plan.slices:
            scheduler.advance(part)
            part.request.tokens.append(0)
        assert len(plan.slices) == 1, "the head was admitted"
    return statistics.median(took_ns) / 1e3


def main() -> int:
    """Print and store the times; fail beyond the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {str(num): round(step_us(num), 2) for num in SHARED_BLOCKS}
    for num, took_us in found.items():
        print(f"{num:>5} blocks shared: {took_us:8.2f} us per step")
    if options.out:
        told = {"machine": machine(), "step_us_by_shared_blocks": found}
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(found[str(SHARED_BLOCKS[-1])] > TARGET_US)


if __name__ == "__main__":
    raise SystemExit(main())
