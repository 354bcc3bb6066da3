"""Work of known size: decodes and prefills of the reference engine, each in steps of their own."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import torch
from part import Setting

from inferscope.cost.flops import flop_rates
from inferscope.cost.hbm import hbm_rates
from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.load import describe
from inferscope.records import Shape

FOREVER = 1 << 14
"""Output tokens of a request that is to decode until it is cancelled."""


class Phase(NamedTuple):
    """Steps of one kind, run one after another.

    Attributes:
        start_ns: on the monotonic clock, the device idle.
        end_ns: likewise.
        num_steps: between these.
        read_bytes: modelled, all steps together.
        write_bytes: likewise.
        flops: likewise.
    """

    start_ns: int
    end_ns: int
    num_steps: int
    read_bytes: int
    write_bytes: int
    flops: int

    @property
    def step_ns(self) -> float:
        """Return the mean step, launches included."""
        return (self.end_ns - self.start_ns) / self.num_steps

    @property
    def bytes(self) -> int:
        """Return what was modelled to be moved."""
        return self.read_bytes + self.write_bytes


def open_engine(setting: Setting, *, max_running: int = 64, token_budget: int = 2048) -> Engine:
    """Load the model; a dry run's fits a laptop."""
    torch.manual_seed(0)
    num_blocks = 256 if setting.is_dry else None
    longest = 512 if setting.is_dry else 8192
    return load_engine(
        setting.model,
        EngineOptions(
            device=setting.device,
            max_running=max_running,
            token_budget=min(token_budget, longest),
            num_blocks=num_blocks,
            max_model_tokens=longest,
            prefix_cache=False,
            max_waiting=4096,
        ),
    )


def shape_of(engine: Engine) -> Shape:
    """Return the model's shape."""
    shape = describe(engine, name="").shape
    assert shape is not None, "the reference engine knows its models' shapes"
    return shape


def wait_for(engine: Engine) -> None:
    """Let the device come to its end."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


class Decoding:
    """A batch that decodes, all of it at about the same context, until it is closed."""

    def __init__(self, engine: Engine, *, batch: int, context: int) -> None:
        """Submit the batch and run its prefill."""
        self._engine, self._batch = engine, batch
        draw = random.Random(batch)
        prompts = [draw.choices(range(engine.model.config.vocab), k=context) for _ in range(batch)]
        sampling = Sampling(max_tokens=FOREVER, ignore_eos=True)
        self._names = [engine.submit(prompt, sampling) for prompt in prompts]
        self._context = context
        while len(engine.scheduler.running) < batch or any(
            request.computed < request.num_prompt for request in engine.scheduler.running
        ):
            engine.step()

    def run(self, num_steps: int) -> Phase:
        """Decode so many steps."""
        engine = self._engine
        contexts = [request.computed for request in engine.scheduler.running]
        wait_for(engine)
        start_ns = time.monotonic_ns()
        for _ in range(num_steps):
            engine.step()
        wait_for(engine)
        end_ns = time.monotonic_ns()
        slices = [[(1, at + step, 1) for at in contexts] for step in range(num_steps)]
        return _phase(shape_of(engine), start_ns, end_ns, slices)

    def close(self) -> None:
        """End the batch."""
        for name in self._names:
            self._engine.cancel(name)
        while self._engine.has_work:
            self._engine.step()


def prefill(engine: Engine, *, num_tokens: int, num_prompts: int) -> Phase:
    """Run prompts of one step each, one after another; each step samples one token."""
    draw = random.Random(num_tokens)
    slices = []
    wait_for(engine)
    start_ns = time.monotonic_ns()
    for _ in range(num_prompts):
        prompt = draw.choices(range(engine.model.config.vocab), k=num_tokens)
        engine.submit(prompt, Sampling(max_tokens=1, ignore_eos=True))
        engine.step()
        slices.append([(num_tokens, 0, 1)])
    wait_for(engine)
    return _phase(shape_of(engine), start_ns, time.monotonic_ns(), slices)


def _phase(
    shape: Shape, start_ns: int, end_ns: int, steps: list[list[tuple[int, int, int]]]
) -> Phase:
    """Add up what steps are modelled to do; slices are tokens, context, sampled rows."""
    bytes_, flops = hbm_rates(shape), flop_rates(shape)
    read = written = done = 0
    for slices in steps:
        num_tokens, num_rows = sum(part[0] for part in slices), sum(part[2] for part in slices)
        read += bytes_.weights.of_step(num_tokens, num_rows)
        for tokens, context, rows in slices:
            read += int(bytes_.reads(tokens, context, rows))
            written += int(bytes_.writes(tokens, rows))
            done += int(flops.of_slices(tokens, context, rows))
    return Phase(start_ns, end_ns, len(steps), read, written, done)
