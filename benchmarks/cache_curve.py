"""Modelled hit ratio by size of the KV cache against the reference engine's real block pool.

    conversations ─► BlockPool of 900 blocks ─► samples of the probe ─► curve
                 └─► BlockPools of eight sizes, from the peak in flight to 8 × 900 ─► truth

Conversations share system prompts, grow turn by turn, and are revisited in no order. Two requests
are in flight. The samples are those that the engine's probe records: keyed digests, at most as many
per prompt as fit a record. Prints the error at each size.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path

from inferscope.engine.kv import BlockPool
from inferscope.fold.miss_ratio import LONGEST, MissRatio, curve
from inferscope.prefix import BlockSampler, block_keys, packed

POOL, BLOCK_TOKENS = 900, 16
IN_FLIGHT = 2
SIZES = 8
HELD_OUT_SEEDS = (11, 12, 13)
_TOKENS = 4000
Admitted = Callable[[list[int], int], None]


def conversations(seed: int, num: int) -> list[list[int]]:
    """Return the prompts of a chat service, in the order of their arrival."""
    draw = random.Random(seed)

    def text(num_tokens: int) -> list[int]:
        return [draw.randrange(_TOKENS) for _ in range(num_tokens)]

    systems = [text(draw.randrange(600, 1400)) for _ in range(6)]
    open_chats: list[list[int]] = []
    prompts = []
    for _ in range(num):
        if not open_chats or draw.random() < 0.18:
            open_chats.append(list(systems[min(int(draw.paretovariate(1.0)) - 1, 5)]))
            if len(open_chats) > 70:
                open_chats.pop(draw.randrange(len(open_chats)))
        recent = min(int(draw.expovariate(1 / 18)), len(open_chats) - 1)
        chat = draw.choice(open_chats) if draw.random() < 0.2 else open_chats[-1 - recent]
        chat += text(draw.randrange(40, 400))
        prompts.append(list(chat))
        if len(chat) > 6000:
            open_chats.remove(chat)
    return prompts


def serve(
    prompts: list[list[int]], num_blocks: int, admitted: Admitted = lambda prompt, hit: None
) -> tuple[float, int]:
    """Return the share of prompt tokens from the cache, and the peak of blocks held."""
    pool = BlockPool(num_blocks, block_tokens=BLOCK_TOKENS)
    held: deque[list[int]] = deque()
    hit = peak = 0
    for prompt in prompts:
        whole_blocks = (len(prompt) - 1) // BLOCK_TOKENS
        match = pool.match(prompt, max_blocks=whole_blocks)
        needed = pool.blocks_for(len(prompt))
        while needed - len(match.blocks) > pool.num_available - match.num_cached:
            pool.release(held.popleft())
            match = pool.match(prompt, max_blocks=whole_blocks)
        admitted(prompt, len(match.blocks) * BLOCK_TOKENS)
        pool.acquire(match.blocks)
        blocks = match.blocks + pool.allocate(needed - len(match.blocks))
        chain = match.chain
        for at in range(len(match.blocks), len(prompt) // BLOCK_TOKENS):
            tokens = tuple(prompt[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            chain = pool.publish(blocks[at], chain=chain, tokens=tokens)
        hit += len(match.blocks) * BLOCK_TOKENS
        peak = max(peak, pool.num_used)
        held.append(blocks)
        while len(held) > IN_FLIGHT:
            pool.release(held.popleft())
    return hit / sum(map(len, prompts)), peak


def measured(seed: int, num: int) -> dict[str, object]:
    """Return modelled and real hit ratios of one workload."""
    prompts = conversations(seed, num)
    sampler, ratio = BlockSampler(POOL), MissRatio(POOL)

    def sample(prompt: list[int], hit: int) -> None:
        keys = block_keys(array("I", prompt).tobytes(), BLOCK_TOKENS * 4)
        keys = keys[: (len(prompt) - 1) // BLOCK_TOKENS]
        found = sampler.sample(packed(keys), len(keys))
        ratio.prompt(
            len(prompt),
            array("Q", found.digests).tolist(),
            num_blocks=found.num_blocks,
            block_tokens=BLOCK_TOKENS,
            rate=found.rate,
            tenant="",
            hit_tokens=hit,
        )

    _, peak = serve(prompts, POOL, sample)
    first = peak / POOL
    sizes = [first * (LONGEST / first) ** (at / (SIZES - 1)) for at in range(SIZES)]
    modelled = curve([ratio], peak_blocks=peak, sizes=sizes)
    assert modelled is not None
    points = []
    for point in modelled.points:
        actual, _ = serve(prompts, point.blocks)
        assert point.hit_share is not None
        points.append(
            {
                "blocks": point.blocks,
                "actual": round(actual, 4),
                "modelled": round(point.hit_share, 4),
                "error": round(point.hit_share - actual, 4),
            }
        )
    return {
        "seed": seed,
        "sampled_share": modelled.sampled_share,
        "peak_blocks": peak,
        "largest_error": max(abs(float(point["error"])) for point in points),
        "points": points,
    }


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--requests", type=int, default=1400)
    arguments.add_argument("--seeds", type=int, nargs="+", default=HELD_OUT_SEEDS)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests": options.requests,
        "runs": [measured(seed, options.requests) for seed in options.seeds],
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
