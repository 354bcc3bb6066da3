"""Measured step times of the reference engine on one model, by batch composition.

The load spans the batches that occur: prompts of all lengths alone, in chunks after a context, and
with decodes; decodes of few and of many requests, at short and at long contexts. A step time covers
the forward pass and the sampling, as the probe measures it, on an otherwise idle device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from inferscope.engine.capacity import pool_blocks
from inferscope.engine.config import EngineOptions
from inferscope.engine.core import Engine
from inferscope.engine.model import Model
from inferscope.engine.request import Sampling
from inferscope.engine.runner import Collect, Runner
from inferscope.engine.scheduler import Plan
from inferscope.probe import Probe

_OUTPUT_TOKENS = 16
_LOAD_BUDGETS = 8
"""Maximum prompt tokens of one load, in token budgets; more would repeat the same prefill."""
_POOL_SHARE = 2
"""Divisor of the pool's tokens: a load uses at most half, so that nothing is preempted."""


class StepTime(NamedTuple):
    """Composition and duration of one step.

    Attributes:
        tokens: [requests], tokens computed.
        contexts: [requests], tokens in the KV cache before the step.
        sampled: [requests], number of rows of logits.
        took_ns: device time.
    """

    tokens: list[int]
    contexts: list[int]
    sampled: list[int]
    took_ns: int


class TimedRunner:
    """Runner of steps that keeps their times, cold steps excluded."""

    is_asynchronous = False

    def __init__(self, runner: Runner, device: torch.device) -> None:
        """Wrap a runner whose model is on `device`."""
        self.taken: list[StepTime] = []
        self._runner = runner
        self._device = device

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Run a step and keep its time."""
        batch = self._runner.prepare(plan)
        self._wait()
        start_ns = time.perf_counter_ns()
        tokens = self._runner.execute(batch)
        self._wait()
        took_ns = time.perf_counter_ns() - start_ns
        if not batch.is_cold:
            parts = plan.slices
            self.taken.append(
                StepTime(
                    [part.num_tokens for part in parts],
                    [part.context for part in parts],
                    [int(part.is_sampled) for part in parts],
                    took_ns,
                )
            )
        return lambda: (batch.sampled, batch.added(tokens.tolist()))

    def close(self) -> None:
        """Close the wrapped runner."""
        self._runner.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_steps(model: Model, options: EngineOptions, *, seconds: float) -> list[StepTime]:
    """Return the times of warm steps, measured for about `seconds` seconds.

    Each pass over the grid of loads has another order, so that an incomplete pass spans it too.
    """
    num_blocks = pool_blocks(model, options)
    runner = TimedRunner(Runner.of(model, options, num_blocks=num_blocks), model.device)
    engine = Engine(model, replace(options, num_blocks=num_blocks), runner=runner)
    pool_tokens = num_blocks * options.block_tokens
    most_tokens = min(pool_tokens // _POOL_SHARE, _LOAD_BUDGETS * options.token_budget)
    draw = random.Random(options.seed)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        grid = list(_grid(engine, options, most_tokens=most_tokens))
        draw.shuffle(grid)
        for num_requests, num_tokens in grid:
            for _ in range(num_requests):
                prompt = draw.choices(range(model.config.vocab), k=num_tokens)
                engine.submit(prompt, Sampling(max_tokens=_OUTPUT_TOKENS, ignore_eos=True))
            while engine.has_work and time.monotonic() < until_s:
                engine.step()
            if time.monotonic() >= until_s:
                break
    engine.close()
    return runner.taken


def _grid(engine: Engine, options: EngineOptions, *, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of request count and prompt tokens, in powers of two within the limits."""
    longest = engine.max_model_tokens - _OUTPUT_TOKENS
    num_requests = 1
    while num_requests <= options.max_running:
        num_tokens = 8
        while num_tokens <= longest:
            if num_requests * (num_tokens + _OUTPUT_TOKENS) <= most_tokens:
                yield num_requests, num_tokens
            num_tokens *= 2
        num_requests *= 2
