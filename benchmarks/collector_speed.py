"""Speed of the fold: steps per second of one core, at 64 slices per step.

Writes records of a busy engine (64 requests decoding, one prefill chunk in every fourth step,
requests finishing and arriving) and folds them as `attach` would, in fold order with Ticks. The
records are made up, their number and make-up are not: what is timed is decoding, joining,
splitting, the ledger, the windows and the digest. Prints microseconds per step, the share of a core
at 5,000 steps a second, and the memory before and after.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from inferscope.fold.fold import Collector
from inferscope.readers.merge import Merger
from inferscope.records import (
    ADMITTED,
    DECODE,
    FINISHED,
    PREFILL,
    QUEUED,
    Emitted,
    EngineInfo,
    Record,
    RequestEvent,
    RingOpened,
    Shape,
    StepPlan,
    StepSlices,
    StepSpan,
    decode,
    encode,
)

STEP_NS = 9_000_000
GAP_NS = 300_000
CHUNK_TOKENS = 256
PROMPT_TOKENS = 4096
LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, 16, 16, 16)


def columns(*values: list[int]) -> list[bytes]:
    """Return u32 columns."""
    return [array("I", column).tobytes() for column in values]


def busy_engine(
    num_steps: int,
    batch: int,
    seed: int = 0,
    *,
    num_parts: int = 0,
    step_ns: int = STEP_NS,
    gap_ns: int = GAP_NS,
    start_ns: int = 1_000_000_000,
) -> Iterator[Record]:
    """Yield the records of an engine's ring, in the order of writing.

    Args:
        num_steps: of them.
        batch: requests in each.
        seed: of the requests' lengths.
        num_parts: with which each prompt is labelled.
        step_ns: what a step takes.
        gap_ns: between two steps.
        start_ns: when the first begins.
    """
    draw = random.Random(seed)
    parts = tuple((f"part_{'x' * at}", PROMPT_TOKENS // num_parts) for at in range(num_parts))
    yield EngineInfo(1, "made-up", shape=LLAMA_8B, device="NVIDIA H200", token_budget=2048)
    now_ns = start_ns
    next_index = 0
    running: list[list[int]] = []  # index, context, tokens left
    for step in range(num_steps):
        events: list[Record] = []
        prefilling = None
        while len(running) < batch:
            index = next_index
            next_index += 1
            name = f"request-{index}"
            events.append(
                RequestEvent(
                    now_ns, index, QUEUED, now_ns, name, None, PROMPT_TOKENS, prompt_parts=parts
                )
            )
            events.append(RequestEvent(now_ns, index, ADMITTED, now_ns, cached_tokens=0))
            left = draw.randint(40, 400) if step else draw.randint(1, 400)
            running.append([index, draw.randint(300, 3000), left])
            prefilling = index if step else None
        yield from events
        yield StepPlan(now_ns, step, now_ns - 200_000, now_ns - 100_000, 3, batch, 9000, 0, 32000)
        start_ns, now_ns = now_ns, now_ns + step_ns + draw.randint(0, 400_000)
        indices = [r[0] for r in running]
        is_chunk = [i == prefilling or (step % 4 == 0 and n == 0) for n, i in enumerate(indices)]
        tokens = [CHUNK_TOKENS if chunk else 1 for chunk in is_chunk]
        requests, counts, contexts = columns(indices, tokens, [r[1] for r in running])
        phases = bytes(PREFILL if chunk else DECODE for chunk in is_chunk)
        sampled = array("H", [1] * len(running)).tobytes()
        yield StepSlices(now_ns, step, 7, requests, phases, counts, contexts, b"", sampled)
        yield StepSpan(now_ns, step, 7, start_ns, start_ns + 90_000, now_ns)
        ones = array("I", [1] * len(running)).tobytes()
        yield Emitted(now_ns + 40_000, requests, ones, step)
        for request in running:
            request[1] += 1
            request[2] -= 1
        for request in [r for r in running if r[2] <= 0]:
            running.remove(request)
            yield RequestEvent(
                now_ns + 60_000, request[0], FINISHED, now_ns + 60_000, reason="stop"
            )
        now_ns += gap_ns


def memory_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def fold_rates(frames: list[tuple[int, bytes]], num_steps: int) -> tuple[Collector, list[float]]:
    """Fold a ring's frames in ten parts.

    Returns:
        The fold, and the µs of processor time that a step took in each tenth, best first.
    """
    collector = Collector()
    collector.fold(0, RingOpened(1, 1, "made-up", "core", 0, 1, "host", "boot", 1, 1))
    merger = Merger()
    rates = []
    part = len(frames) // 10
    for begin in range(0, len(frames) - part + 1, part):
        steps_before = collector.num_records
        began = time.process_time()
        for sequence, (code, payload) in enumerate(frames[begin : begin + part], begin):
            merger.add(1, sequence, decode(code, payload), payload)
            if sequence % 400 == 0:
                for item in merger.take(None):
                    collector.fold(item.ring, item.record)
        for item in merger.take(None):
            collector.fold(item.ring, item.record)
        share = (collector.num_records - steps_before) / len(frames)
        rates.append((time.process_time() - began) / (share * num_steps) * 1e6)
    return collector, sorted(rates)


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=20_000)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--parts", type=int, default=0, help="with which prompts are labelled")
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    records = busy_engine(options.steps, options.batch, num_parts=options.parts)
    frames = [(r.CODE, encode(r)) for r in records]
    before_mb = memory_mb()
    collector, rates = fold_rates(frames, options.steps)
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "steps": options.steps,
        "batch": options.batch,
        "parts_of_prompts": options.parts,
        "us_per_step": {
            "min": round(rates[0], 1),
            "median": round(rates[len(rates) // 2], 1),
            "max": round(rates[-1], 1),
        },
        "share_of_core_at_5000_steps_s": round(rates[len(rates) // 2] * 5000 / 1e6, 3),
        "memory_mb": {"before": round(before_mb, 1), "after": round(memory_mb(), 1)},
        "unjoined": collector.num_unjoined,
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
