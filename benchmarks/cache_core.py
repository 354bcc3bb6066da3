"""Cost of the prefix cache's forensics in the core of each engine, for prompts of 32k tokens.

    python benchmarks/cache_core.py [--engine reference|vllm|sglang] [--core python|rust]
                                    [--tokens N] [--rounds N] [--model MODEL] [--out FILE]

Prompts run through the engine's own scheduler and cache, as in `cache_truth.py`. All that the
adapter's hooks do with one is summed, with its records:

    new, hit, evicted    prompts that the cache has never held, that it holds, and that it lost
    submitted            keys of the blocks, computed by the thread that submits a prompt; only the
                         reference engine has them there
    evicted_block        what an eviction costs, per block: of a key's 32 tokens in SGLang, else of
                         16. Where each block is a call, as in vLLM and the reference engine, the
                         pool's own allocation is timed with the hook and without it

For vLLM, MODEL is a checkpoint's folder whose configuration allows prompts of that length. Run it
and SGLang with the Python of an environment that has the engine, PYTHONPATH on this checkout.

Each prompt is served before the next one, so the hooks begin with cold caches. Times are processor
time of the thread; other load slows it, but does not count. The median and the minimum of all
rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from cache_truth import ReferenceRig, Served, Tokens

STEP_TOKENS = 8192
"""Tokens that a step computes, so a prompt of 32k is computed in four."""


class CostRig(Protocol):
    """An engine whose hooks are timed."""

    vocab: int
    version: str

    def serve(self, prompts: list[Tokens]) -> list[Served]:
        """Serve prompts together, to their first token."""

    def close(self) -> None:
        """Close the rings."""


class Meter:
    """Processor time that some methods of an object take."""

    def __init__(self) -> None:
        self._ns_by_name: dict[str, int] = {}

    def watch(self, owner: Any, names: Iterable[str]) -> None:
        """Time these methods of an object from here on."""
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def take_us(self, *names: str) -> float:
        """Return the microseconds since the last call, in these methods, and forget them."""
        return sum(self._ns_by_name.pop(name, 0) for name in names) / 1000

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kw: Any) -> Any:
            start_ns = time.thread_time_ns()
            try:
                return method(*args, **kw)
            finally:
                spent_ns = time.thread_time_ns() - start_ns
                self._ns_by_name[name] = self._ns_by_name.get(name, 0) + spent_ns

        return timed


class Costs(ABC):
    """Costs of one engine."""

    prompt: tuple[str, ...]
    """Methods that are called for a prompt."""
    submission: tuple[str, ...] = ()
    """Methods that are called by the thread that submits it."""
    eviction: tuple[str, ...] = ()
    """Methods that are called for evicted blocks."""

    def __init__(self, rig: CostRig, num_tokens: int) -> None:
        self.rig = rig
        self.num_tokens = num_tokens
        self.meter = Meter()
        self.key = random.Random(1)

    def found(self, rounds: int) -> dict[str, Any]:
        """Return the cost per prompt and per evicted block."""
        us_by_name: dict[str, list[float]] = {}
        old = [self._text() for _ in range(rounds)]
        for prompt in old:
            self._serve(prompt)
        # The pool holds two prompts and a half: the old ones were evicted one by one, and so on.
        for prompt in old:
            self._note(us_by_name, "evicted", prompt)
            self._note(us_by_name, "hit", prompt)
            self._note(us_by_name, "new", self._text())
        return {name: _spread(times) for name, times in us_by_name.items()} | {
            "evicted_block_us": _spread(self.evicted_block_us(rounds))
        }

    @abstractmethod
    def evicted_block_us(self, rounds: int) -> list[float]:
        """Return what an evicted block costs in each round."""

    def _note(self, us_by_name: dict[str, list[float]], name: str, prompt: Tokens) -> None:
        self._serve(prompt)
        us_by_name.setdefault(f"{name}_us", []).append(self.meter.take_us(*self.prompt))
        if self.submission:
            us = self.meter.take_us(*self.submission)
            us_by_name.setdefault("submitted_us", []).append(us)

    def _serve(self, prompt: Tokens) -> None:
        self.meter.take_us(*self.prompt, *self.submission)
        self.rig.serve([prompt])

    def _text(self) -> Tokens:
        return [self.key.randrange(3, self.rig.vocab) for _ in range(self.num_tokens)]


class ReferenceCosts(Costs):
    """Costs in the reference engine."""

    prompt = ("admitted", "published")
    submission = ("keys_of",)

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        rig = ReferenceRig(
            folder,
            num_blocks=5 * args.tokens // 32,
            model=f"random:tiny,layers=1,positions={args.tokens + 16}",
            step_tokens=STEP_TOKENS,
        )
        super().__init__(rig, args.tokens)
        self._engine = rig.engine
        rig.serve([[3]])  # the first step opens the observer
        self.meter.watch(self._engine.scheduler.forensics, (*self.prompt, *self.submission))

    def evicted_block_us(self, rounds: int) -> list[float]:
        """Return the difference of an allocation with the observer and without."""
        pool, times = self._engine.pool, []
        observer = pool.observer
        for _ in range(rounds):
            spent = []
            for seen in (observer, None):
                self._serve(self._text())
                self._serve(self._text())  # so all blocks are cached, and none is free
                pool.observer = seen
                num = pool.num_cached // 2
                free = [pool.allocate(1)[0] for _ in range(pool.num_available - pool.num_cached)]
                start_ns = time.thread_time_ns()
                blocks = pool.allocate(num)
                spent.append(time.thread_time_ns() - start_ns)
                pool.observer = observer
                pool.release(blocks + free)
            times.append((spent[0] - spent[1]) / 1000 / num)
        return times


class VllmCosts(Costs):
    """Costs in vLLM's scheduler."""

    prompt = ("arrived",)
    eviction = ("planned",)

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from cache_truth_vllm import VllmRig
        from vllm.v1.core.block_pool import BlockPool

        self._original = BlockPool._maybe_evict_cached_block
        rig = VllmRig(
            folder,
            num_blocks=5 * args.tokens // 32,
            model=args.model,
            most_tokens=args.tokens + 16,
            step_tokens=STEP_TOKENS,
            prefill_tokens=0,
        )
        super().__init__(rig, args.tokens)
        self._pool = rig.pool
        self._recorder = rig.recorder
        self.meter.watch(self._recorder, (*self.prompt, *self.eviction))

    def evicted_block_us(self, rounds: int) -> list[float]:
        """Return what `planned` takes, and the hook: an allocation with and without it."""
        pool, times = self._pool, []
        hooked = type(pool)._maybe_evict_cached_block
        for _ in range(rounds):
            spent = []
            for method in (hooked, self._original):
                self._serve(self._text())
                self._serve(self._text())
                type(pool)._maybe_evict_cached_block = method
                num = pool.get_num_free_blocks() // 2
                self._recorder.evicted.clear()
                start_ns = time.thread_time_ns()
                blocks = pool.get_new_blocks(num)
                spent.append(time.thread_time_ns() - start_ns)
                type(pool)._maybe_evict_cached_block = hooked
                pool.free_blocks(reversed(blocks))
            self._recorder.evicted.clear()
            hook_us = (spent[0] - spent[1]) / 1000 / num
            self.meter.take_us("planned")
            self._serve(self._text())
            planned_us = self.meter.take_us("planned")
            times.append(hook_us + planned_us / (self.num_tokens // 16))
        return times


class SglangCosts(Costs):
    """Costs in SGLang's radix cache."""

    prompt = ("arrived", "inserted", "preparing", "prepared")
    eviction = ("evicting", "removed", "evicted")

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from cache_truth_sglang import SglangRig

        rig = SglangRig(
            folder,
            num_blocks=5 * args.tokens // 64,
            core=args.core,
            most_tokens=args.tokens + 16,
            step_tokens=STEP_TOKENS,
        )
        super().__init__(rig, args.tokens)
        self.meter.watch(rig.recorder, (*self.prompt, *self.eviction))

    def evicted_block_us(self, rounds: int) -> list[float]:
        """Return what the hooks of evictions take while a prompt replaces another."""
        times = []
        for _ in range(rounds):
            self.meter.take_us(*self.eviction)
            self._serve(self._text())
            times.append(self.meter.take_us(*self.eviction) / (self.num_tokens // 32))
        return times


ENGINES: dict[str, Callable[[Path, argparse.Namespace], Costs]] = {
    "reference": ReferenceCosts,
    "vllm": VllmCosts,
    "sglang": SglangCosts,
}


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 3), "min": round(min(times), 3)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), default="reference")
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt (default: 32768)")
    parser.add_argument("--rounds", type=int, default=10, help="prompts of each kind (default: 10)")
    parser.add_argument("--model", default="", help="vllm: folder of a checkpoint")
    parser.add_argument("--core", choices=("python", "rust"), default="python", help="sglang's")
    parser.add_argument("--out", type=Path, help="file for the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = ENGINES[args.engine](Path(folder), args)
        result = {
            "engine": args.engine,
            "version": costs.rig.version,
            "tokens": args.tokens,
            "rounds": args.rounds,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "load": round(os.getloadavg()[0], 1),
            **costs.found(args.rounds),
        }
        costs.rig.close()
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
