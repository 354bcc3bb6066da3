"""A varied load on the real engine, folded into a cost model that is then frozen.

The load and the steps that are taken apart later are drawn from the same ranges, with other random
numbers: a model is asked about steps like those it has seen, and never about one that it has seen.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ablation import Part, StepShape

from inferscope.cost.model import MAX_TOKENS, StepModel
from inferscope.engine import Engine, EngineOptions, Sampling
from inferscope.engine.load import describe, load_model
from inferscope.engine.runner import Runner
from inferscope.probe import Probe
from inferscope.readers.source import open_replay


@dataclass(frozen=True)
class Ranges:
    """Sizes of the requests and steps that are drawn.

    Attributes:
        token_budget: tokens of a step.
        max_running: requests at once.
        shortest_prompt: tokens; a smaller chunk's share of a large step cannot be measured.
        longest_prompt: tokens.
        longest_output: tokens.
    """

    token_budget: int
    max_running: int
    shortest_prompt: int
    longest_prompt: int
    longest_output: int

    @property
    def longest_request(self) -> int:
        """Return the tokens of prompt and output together."""
        return self.longest_prompt + self.longest_output

    def context(self, draw: random.Random) -> int:
        """Draw the tokens before a chunk or a decode."""
        return round(log_uniform(draw, self.shortest_prompt, self.longest_prompt))


ON_CPU = Ranges(256, 64, 16, 512, 96)
ON_GPU = Ranges(2048, 64, 128, 4096, 96)
"""A GPU takes longer for these steps than the host takes to launch them."""
LARGEST_WITH_ALL_SUBSETS = 6
_NUM_BLOCKS = 2400
_STEPS_PER_LEVEL = (4, 32)
_LULL = 0.4
"""Share of load levels that start only after all earlier requests have ended."""
_ARRIVALS = (0.1, 6.0)
"""Mean arrivals per step: from unused budget to overload."""


@dataclass(frozen=True)
class Frozen:
    """A cost model as the served steps have taught it.

    Attributes:
        model: in force after the last of them.
        healthy_ratio: measured over modelled time of a healthy step.
        residual: median of measured over modelled time, less one.
        sha256: of all coefficients.
        num_steps: served.
    """

    model: StepModel
    healthy_ratio: float
    residual: float
    sha256: str
    num_steps: int


def open_engine(name: str, dtype: str) -> tuple[Engine, Runner]:
    """Load a model that one thread of this process runs."""
    torch.set_num_threads(1)
    options = EngineOptions(
        token_budget=ON_CPU.token_budget,
        max_running=ON_CPU.max_running,
        num_blocks=_NUM_BLOCKS,
        max_model_tokens=ON_CPU.longest_request,
        prefix_cache=False,
        dtype=dtype,
    )
    model = load_model(name, options)
    runner = Runner.of(model, options, num_blocks=_NUM_BLOCKS)
    return Engine(model, options, runner=runner), runner


def learn(engine: Engine, name: str, draw: random.Random, num_steps: int) -> Frozen:
    """Serve a load under the probe, fold its records and freeze the model."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        engine.probe = Probe.open(describe(engine, name=name))
        num_steps = serve(engine, draw, num_steps)
        engine.probe.close()
        engine.probe = Probe.disabled()
        source = open_replay(Path(folder))
        source.advance()
        source.close()
    (fold,) = source.collector.engines.values()
    mode = fold.book.mode("eager")
    assert mode.model.source == "fit", "too few steps to learn from"
    assert mode.healthy_ratio is not None
    assert mode.residual is not None
    return Frozen(mode.model, mode.healthy_ratio, mode.residual, digest(mode.model), num_steps)


def digest(model: StepModel) -> str:
    """Return the SHA-256 of a model's coefficients."""
    scalars = (
        model.single_ns, model.padded_ns, model.chunk_ns, model.pair_ns, model.context_ns,
        model.decoding_ns,
    )  # fmt: skip
    model.reach(MAX_TOKENS)
    tables = model.f_ns.tobytes() + model.g_ns.tobytes()
    return hashlib.sha256(tables + np.array(scalars).tobytes()).hexdigest()


def serve(engine: Engine, draw: random.Random, num_steps: int, ranges: Ranges = ON_CPU) -> int:
    """Serve requests of all lengths, now few of them at once, now many, and now and then none.

    Returns:
        how many steps that took, at least `num_steps`.
    """
    scheduler = engine.scheduler
    done = 0
    while done < num_steps:
        wanted = round(log_uniform(draw, 1, ranges.max_running))
        pace = log_uniform(draw, *_ARRIVALS)
        until = done + draw.randint(*_STEPS_PER_LEVEL)
        while done < until:
            missing = wanted - len(scheduler.running) - len(scheduler.waiting)
            coming = int(pace + draw.random())
            for _ in range(min(missing, coming if engine.has_work else max(1, coming))):
                num_prompt = ranges.context(draw)
                prompt = [draw.randrange(1, engine.model.config.vocab) for _ in range(num_prompt)]
                num_output = draw.randint(1, ranges.longest_output)
                engine.submit(prompt, Sampling(max_tokens=num_output, ignore_eos=True))
            engine.step()
            done += 1
        if draw.random() < _LULL:
            done += _drain(engine)
    return done + _drain(engine)


def _drain(engine: Engine) -> int:
    """Run all requests to completion; return the number of steps."""
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return num_steps


def step_shapes(draw: random.Random, num_steps: int, ranges: Ranges = ON_CPU) -> list[StepShape]:
    """Draw mixed steps: a quarter of them small, the others up to a full batch."""
    num_small = num_steps // 4
    small = [4 + at % (LARGEST_WITH_ALL_SUBSETS - 3) for at in range(num_small)]
    num_large = num_steps - num_small
    first = LARGEST_WITH_ALL_SUBSETS + 2
    ratio = (ranges.max_running / first) ** (1 / max(1, num_large - 1))
    large = [round(first * ratio**at) for at in range(num_large)]
    return [_small(draw, num, ranges) for num in small] + [
        _large(draw, num, 1 + (at % 3 == 2), ranges) for at, num in enumerate(large)
    ]


def _small(draw: random.Random, num: int, ranges: Ranges) -> StepShape:
    """Draw a step whose decodes have different contexts."""
    num_chunks = draw.randint(1, 3)
    num_decodes = num - num_chunks
    decodes = [Part(1, ranges.context(draw), is_sampled=True) for _ in range(num_decodes)]
    return StepShape(
        _chunks(draw, num_chunks, num_decodes, ranges), tuple(decodes), is_pooled=False
    )


def _large(draw: random.Random, num: int, num_chunks: int, ranges: Ranges) -> StepShape:
    """Draw a step whose decodes differ by a token or two, as in any real batch."""
    num_decodes, context = num - num_chunks, ranges.context(draw)
    decodes = [Part(1, context + at % 3, is_sampled=True) for at in range(num_decodes)]
    return StepShape(_chunks(draw, num_chunks, num_decodes, ranges), tuple(decodes), is_pooled=True)


def _chunks(draw: random.Random, num: int, num_decodes: int, ranges: Ranges) -> tuple[Part, ...]:
    """Draw chunks that fit into the budget; half of them begin, half of them end a prompt."""
    left = ranges.token_budget - num_decodes
    chunks = []
    for at in range(num):
        most = left - ranges.shortest_prompt * (num - 1 - at)
        tokens = round(log_uniform(draw, ranges.shortest_prompt, most))
        context = min(draw.choice((0, ranges.context(draw))), ranges.longest_request - tokens)
        chunks.append(Part(tokens, context, is_sampled=draw.random() < 0.5))
        left -= tokens
    return tuple(chunks)


def log_uniform(draw: random.Random, least: float, most: float) -> float:
    """Draw a number from a log-uniform distribution."""
    return float(least * (most / least) ** draw.random())
