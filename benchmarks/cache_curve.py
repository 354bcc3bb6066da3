"""Modelled hit ratio by size of the KV cache against an engine's own cache, which evicts.

    python benchmarks/cache_curve.py [--engine reference|vllm] [--draws N] [--out FILE]

    conversations ─► cache of 900 blocks ─► samples of the probe ─► curve
                 └─► caches of eight sizes, from the peak in flight to 8 × 900 ─► truth

    reference   the reference engine's block pool
    vllm        vLLM's KVCacheManager, which hashes the prompts too. Run it with the Python of an
                environment that has vLLM, PYTHONPATH on this checkout

Conversations share system prompts, grow turn by turn, and are revisited in no order. Two requests
are in flight. The samples are those that the engine's probe records: keyed digests, at most as many
per prompt as fit a record. Which blocks are sampled depends on a key that is drawn at each start;
the curve is made with several keys, and the largest error of all counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from inferscope.engine.kv import BlockPool
from inferscope.fold.miss_ratio import LONGEST, Curve, MissRatio, curve
from inferscope.prefix import BlockSampler, block_keys, packed

POOL, BLOCK_TOKENS = 900, 16
IN_FLIGHT = 2
SIZES = 8
HELD_OUT_SEEDS = (11, 12, 13)
_TOKENS = 4000


class Found(NamedTuple):
    """What a prompt found in a cache."""

    hit: int
    """Tokens."""
    raw_keys: bytes
    """Keys of its whole blocks one after another."""


class Cache(Protocol):
    """A KV cache that shares blocks and evicts."""

    @property
    def num_used(self) -> int:
        """Number of blocks that requests hold."""

    @property
    def num_held(self) -> int:
        """Number of requests that hold blocks."""

    def take(self, prompt: list[int]) -> Found | None:
        """Serve a prompt; return what it found, None if there is no room."""

    def release(self) -> None:
        """End the oldest request."""


class ReferenceCache:
    """The reference engine's block pool."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, block_tokens=BLOCK_TOKENS)
        self._held: deque[list[int]] = deque()

    @property
    def num_used(self) -> int:
        """Number of blocks that requests hold."""
        return self._pool.num_used

    @property
    def num_held(self) -> int:
        """Number of requests that hold blocks."""
        return len(self._held)

    def take(self, prompt: list[int]) -> Found | None:
        """Serve a prompt; return what it found, None if there is no room."""
        pool = self._pool
        match = pool.match(prompt, max_blocks=(len(prompt) - 1) // BLOCK_TOKENS)
        num_new = pool.blocks_for(len(prompt)) - len(match.blocks)
        if num_new > pool.num_available - match.num_cached:
            return None
        pool.acquire(match.blocks)
        blocks = match.blocks + pool.allocate(num_new)
        chain = match.chain
        for at in range(len(match.blocks), len(prompt) // BLOCK_TOKENS):
            tokens = tuple(prompt[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            chain = pool.publish(blocks[at], chain=chain, tokens=tokens)
        self._held.append(blocks)
        keys = block_keys(array("I", prompt), BLOCK_TOKENS * 4)
        return Found(len(match.blocks) * BLOCK_TOKENS, packed(keys))

    def release(self) -> None:
        """End the oldest request."""
        self._pool.release(self._held.popleft())


def cache_of(engine: str, num_blocks: int) -> Cache:
    """Return an empty cache of an engine."""
    if engine == "reference":
        return ReferenceCache(num_blocks)
    from cache_curve_vllm import VllmCache

    return VllmCache(num_blocks, block_tokens=BLOCK_TOKENS)


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


def serve(prompts: list[list[int]], cache: Cache) -> tuple[list[Found], int]:
    """Return what each prompt found in the cache, and the peak of blocks held."""
    every, peak = [], 0
    for prompt in prompts:
        while (found := cache.take(prompt)) is None:
            cache.release()
        every.append(found)
        peak = max(peak, cache.num_used)
        while cache.num_held > IN_FLIGHT:
            cache.release()
    return every, peak


def modelled(
    prompts: list[list[int]], every: list[Found], *, peak: int, sizes: Sequence[float]
) -> Curve:
    """Return the curve from a sample with a key of its own."""
    sampler, ratio = BlockSampler(POOL), MissRatio(POOL)
    for prompt, found in zip(prompts, every, strict=True):
        # As `CacheWatch` does: the blocks before the last token.
        width = len(found.raw_keys) // (len(prompt) // BLOCK_TOKENS)
        num_blocks = (len(prompt) - 1) // BLOCK_TOKENS
        sample = sampler.sample(found.raw_keys[: num_blocks * width], num_blocks)
        ratio.prompt(
            len(prompt),
            array("Q", sample.digests).tolist(),
            num_blocks=sample.num_blocks,
            block_tokens=BLOCK_TOKENS,
            rate=sample.rate,
            tenant="",
            hit_tokens=found.hit,
        )
    found_curve = curve([ratio], peak_blocks=peak, sizes=sizes)
    assert found_curve is not None
    return found_curve


def measured(engine: str, seed: int, *, num: int, num_draws: int) -> dict[str, object]:
    """Return modelled and real hit ratios of one workload."""
    prompts = conversations(seed, num)
    num_tokens = sum(map(len, prompts))
    every, peak = serve(prompts, cache_of(engine, POOL))
    first = peak / POOL
    sizes = [first * (LONGEST / first) ** (at / (SIZES - 1)) for at in range(SIZES)]
    draws = [modelled(prompts, every, peak=peak, sizes=sizes) for _ in range(num_draws)]
    points = []
    for at, point in enumerate(draws[0].points):
        truth, _ = serve(prompts, cache_of(engine, point.blocks))
        actual = sum(found.hit for found in truth) / num_tokens
        shares = [draw.points[at].hit_share for draw in draws]
        errors = [share - actual for share in shares if share is not None]
        assert len(errors) == num_draws
        points.append(
            {
                "blocks": point.blocks,
                "actual": round(actual, 4),
                "errors": [round(error, 4) for error in errors],
            }
        )
    return {
        "seed": seed,
        "sampled_shares": [draw.sampled_share for draw in draws],
        "peak_blocks": peak,
        "largest_error": max(abs(error) for point in points for error in point["errors"]),
        "points": points,
    }


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    arguments.add_argument("--requests", type=int, default=1400)
    arguments.add_argument("--draws", type=int, default=10, help="keys of the sample per workload")
    arguments.add_argument("--seeds", type=int, nargs="+", default=HELD_OUT_SEEDS)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    result = {
        "engine": options.engine,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests": options.requests,
        "runs": [
            measured(options.engine, seed, num=options.requests, num_draws=options.draws)
            for seed in options.seeds
        ],
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
