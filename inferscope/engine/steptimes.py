"""The reference engine's step times on one model, by what is in the step.

Real steps of the real engine, under a load that spans what steps are made of: prompts of all
lengths alone, in chunks behind a context, beside decodes; decodes of few and of many requests, at
short and at long contexts. Timed are the model's run and the choice of tokens, as the probe times
them, on a device that nobody else asks for anything.
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
from inferscope.engine.runner import Launched, Ran, Runner
from inferscope.engine.scheduler import Plan
from inferscope.probe import Probe

_OUTPUT_TOKENS = 16
_LOAD_BUDGETS = 8
"""Prompts of one load, in steps' token budgets: more would be the same prefill again and again."""
_POOL_SHARE = 2
"""Of the KV pool's tokens, a half at most is asked for at once: nothing shall be preempted."""


class StepTime(NamedTuple):
    """One step: what each request computed, and how long all took together.

    Attributes:
        tokens: [requests].
        contexts: [requests], cached before.
        sampled: [requests], rows of logits.
        took_ns: on the device.
    """

    tokens: list[int]
    contexts: list[int]
    sampled: list[int]
    took_ns: int


class TimedRunner:
    """Runs steps and keeps their times; cold ones are left out."""

    is_asynchronous = False

    def __init__(self, runner: Runner, device: torch.device) -> None:
        """Take the runner, and where its model is."""
        self.taken: list[StepTime] = []
        self._runner = runner
        self._device = device

    def run(self, step: int, plan: Plan, probe: Probe, launched: Launched) -> Ran:
        """Run a step."""
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
        return batch.sampled, tokens.tolist()

    def close(self) -> None:
        """Give the runner up."""
        self._runner.close()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_steps(model: Model, options: EngineOptions, *, seconds: float) -> list[StepTime]:
    """Return the times of warm steps, measured for about so many seconds.

    Each look at the grid of loads is in another order, so that whatever the time allows spans it.
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
    """Yield numbers of requests and lengths of prompts: powers of two, as far as they go."""
    longest = engine.max_model_tokens - _OUTPUT_TOKENS
    num_requests = 1
    while num_requests <= options.max_running:
        num_tokens = 8
        while num_tokens <= longest:
            if num_requests * (num_tokens + _OUTPUT_TOKENS) <= most_tokens:
                yield num_requests, num_tokens
            num_tokens *= 2
        num_requests *= 2
