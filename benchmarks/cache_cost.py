"""Cost of the prefix cache's forensics, per prompt, per evicted block, and in memory.

    python benchmarks/cache_cost.py [--tokens N] [--out FILE]

    evicted          one block leaves the cache
    core             an admission with the engine's own hashes, as in vLLM: the whole prompt hits,
                     is new, or was evicted; with its records
    keys             keys of the prompt's blocks, for engines whose own cannot be read. In SGLang
                     they come on top of the core's admission; in the reference engine the thread
                     that submits a prompt computes them
    front end        the comparison of a prompt with earlier ones: new, one token edited, equal
    memory           largest growth of the process, with prompts of the length that fills all
                     tables, and evictions up to just before the older half is forgotten

The loops here keep the CPU's caches warm; `cache_core.py` times the same in the engines.

Times are processor time of this process: other load slows it, but does not count. The median and
the minimum of several rounds are printed; a busy machine is seen in their distance.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferscope.prefix import BlockHistory, PromptHistory, block_keys, packed
from inferscope.prefix.likeness import MOST_HELD_PROMPTS, MOST_HELD_TOKENS
from inferscope.prefix.lookups import MOST_GHOSTS
from inferscope.probe import CacheWatch, EngineInfo, Probe

WIDTH = 16
SGLANG_WIDTH = 32
PROMPT_TOKENS = MOST_HELD_TOKENS // MOST_HELD_PROMPTS + 1
"""Tokens of the shortest prompts that fill the tables of tokens and, almost, of prompts."""
_ROUNDS = 40


def spent_us(work: Callable[[], object], num: int = 1) -> dict[str, float]:
    """Return microseconds of processor time of one of `num` units of work."""
    times = []
    for _ in range(_ROUNDS):
        start_ns = time.process_time_ns()
        work()
        times.append((time.process_time_ns() - start_ns) / 1000 / num)
    return {"median": round(statistics.median(times), 3), "min": round(min(times), 3)}


def resident_mb() -> float:
    """Return this process's resident memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def costs(num_tokens: int) -> dict[str, Any]:
    """Return all costs for a prompt of some tokens."""
    key = random.Random(1)
    probe = Probe.open(EngineInfo(0, "cost"))
    watch = CacheWatch.open(probe, block_tokens=WIDTH, num_blocks=40_000)
    assert watch is not None
    num_blocks = num_tokens // WIDTH
    index = probe.queued("r", prompt_tokens=num_tokens)

    def hashes() -> list[bytes]:
        return [key.randbytes(32) for _ in range(num_blocks)]

    def admit(keys: list[bytes], hit: int) -> None:
        # As in the adapter: a copy of the list, and the keys one after another.
        watch.admitted(
            index,
            num_tokens=num_tokens,
            hit=hit,
            keys=keys[:num_blocks],
            raw_keys=b"".join(keys),
        )

    same = hashes()
    lost = [one + b"\0\0\0\0" for one in same]
    news = iter([hashes() for _ in range(_ROUNDS)])
    found: dict[str, Any] = {}
    found["core_hit_us"] = spent_us(lambda: admit(same, num_tokens - WIDTH))
    found["core_new_us"] = spent_us(lambda: admit(next(news), 0))

    def evict() -> None:
        watch.make_room_for(index)
        # As in the adapter: without the group of layers.
        watch.evicted_blocks([one[:-4] for one in lost])

    found["evicted_block_us"] = spent_us(evict, len(lost))
    found["core_evicted_us"] = spent_us(lambda: admit(same, 0))

    def tokens() -> list[int]:
        return [key.randrange(150_000) for _ in range(num_tokens)]

    base = tokens()
    fresh = iter([tokens() for _ in range(_ROUNDS)])
    edits = iter(
        [[*base[: 7 * at + 5], 150_001 + at, *base[7 * at + 6 :]] for at in range(_ROUNDS)]
    )
    in_radix = array("q", base)
    found["keys_sglang_us"] = spent_us(lambda: packed(block_keys(in_radix, SGLANG_WIDTH * 8)))
    found["keys_reference_us"] = spent_us(lambda: packed(block_keys(array("I", base), WIDTH * 4)))
    probe.compare_prompt(index, base)
    found["front_new_us"] = spent_us(lambda: probe.compare_prompt(index, next(fresh)))
    probe.compare_prompt(index, base)
    found["front_edited_us"] = spent_us(lambda: probe.compare_prompt(index, next(edits)))
    found["front_equal_us"] = spent_us(lambda: probe.compare_prompt(index, base))
    probe.close()
    return found


def memory() -> dict[str, float]:
    """Return the growth of memory with full tables, in MB, in one process for all."""
    key = random.Random(2)
    before = resident_mb()
    prompts = PromptHistory()
    for at in range(5 * MOST_HELD_TOKENS // (4 * PROMPT_TOKENS)):
        cells = array("I", [key.randrange(150_000) for _ in range(PROMPT_TOKENS)])
        prompts.compare(at, cells.tobytes())
    compared = resident_mb()
    blocks = BlockHistory(WIDTH)
    for at in range(MOST_GHOSTS // 2 * 3 - 1):
        if at % 4 == 0:
            blocks.make_room_for(at)
        blocks.evicted_blocks([key.randbytes(32)])
    return {
        "prompts_mb": round(compared - before, 1),
        "blocks_mb": round(resident_mb() - compared, 1),
        "all_mb": round(resident_mb() - before, 1),
        "prompt_tokens": prompts.num_tokens,
        "anchors": prompts.num_anchors,
        "ghosts": blocks.num_ghosts,
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt (default: 32768)")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        full = memory()  # first: what is freed by the rest would be filled
        result = {
            "tokens": args.tokens,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 1),
            **costs(args.tokens),
            "memory": full,
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
