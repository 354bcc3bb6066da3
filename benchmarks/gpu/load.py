"""Work of known size: decodes and prefills of the reference engine, each in steps of their own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch
from part import Setting, release

from inferscope.cost.flops import flop_rates
from inferscope.cost.hbm import hbm_rates
from inferscope.engine import Engine, EngineOptions, Sampling, devices, load_engine, runner
from inferscope.engine.config import QuantizationName
from inferscope.engine.load import describe
from inferscope.records import Shape

FOREVER = 1 << 14
"""Output tokens of a request that is to decode until it is cancelled."""
_BLOCK_TOKENS = 16
_LONGEST_LINE = 400
_DRY_BLOCKS, _DRY_LONGEST, _LONGEST = 256, 512, 8192


class Phase(NamedTuple):
    """Steps of one kind, run one after another.

    Attributes:
        start_ns: on the monotonic clock, the device idle.
        end_ns: likewise.
        num_steps: between these.
        read_bytes: modelled, all steps together.
        write_bytes: likewise.
        flops: likewise.
        gather_bytes: that copying keys and values into scratch reads and writes, all steps
            together; no part of the model's (`gathered_bytes`).
    """

    start_ns: int
    end_ns: int
    num_steps: int
    read_bytes: int
    write_bytes: int
    flops: int
    gather_bytes: int

    @property
    def step_ns(self) -> float:
        """Return the mean step, launches included."""
        return (self.end_ns - self.start_ns) / self.num_steps

    @property
    def bytes(self) -> int:
        """Return what was modelled to be moved."""
        return self.read_bytes + self.write_bytes


def open_engine(
    setting: Setting,
    *,
    num_blocks: int,
    max_running: int = 64,
    token_budget: int = 2048,
    quantization: QuantizationName | None = None,
    cuda_graphs: bool = True,
) -> Engine:
    """Load the model; a dry run's fits a laptop.

    If the steps of whole weights fail as CUDA graphs, they run without, and if they fail again,
    without Triton: the counters' rows need neither.

    Args:
        setting: of the part.
        num_blocks: of the KV pool (`blocks_for`). Never as many as fit: a part has other use for
            the memory, and a pool's worth of it takes time to be cleared.
        max_running: requests at once.
        token_budget: of a step.
        quantization: of the layers' weights; None keeps them whole.
        cuda_graphs: whether decode steps are to be CUDA graphs.
    """
    torch.manual_seed(0)
    longest = _DRY_LONGEST if setting.is_dry else _LONGEST
    options = EngineOptions(
        device=setting.device,
        max_running=max_running,
        token_budget=min(token_budget, longest),
        block_tokens=_BLOCK_TOKENS,
        num_blocks=_DRY_BLOCKS if setting.is_dry else num_blocks,
        max_model_tokens=longest,
        prefix_cache=False,
        max_waiting=4096,
        cuda_graphs=cuda_graphs,
        quantization=quantization,
    )
    if not setting.is_cuda or quantization is not None:
        return load_engine(setting.model, options)
    eager = replace(options, cuda_graphs=False)
    attempts = [("CUDA graphs", options), ("Triton kernels", eager)]
    for part, each in attempts if cuda_graphs else attempts[1:]:
        try:
            return tried(load_engine(setting.model, each))
        except Exception as error:  # of any kind: drivers and compilers raise their own
            print(f"no {part} here: {type(error).__name__}: {error}"[:_LONGEST_LINE], flush=True)
        release()  # its weights, which the error's frames held until here
    devices.has_triton = _no_triton  # every kernel of the engine asks this
    return load_engine(setting.model, eager)


def _no_triton() -> bool:
    """Return that there is no Triton; in place of the engine's own answer."""
    return False


def tried(engine: Engine) -> Engine:
    """Return an engine that has decoded a step."""
    with closing(Decoding(engine, batch=1, context=_BLOCK_TOKENS)) as decoding:
        decoding.run(1)
    return engine


def blocks_for(batch: int, num_tokens: int) -> int:
    """Return the KV blocks of requests that grow to `num_tokens`, and one spare block each."""
    return batch * (-(-num_tokens // _BLOCK_TOKENS) + 1)


def shape_of(engine: Engine) -> Shape:
    """Return the model's shape."""
    shape = describe(engine, name="").shape
    assert shape is not None, "the reference engine knows its models' shapes"
    return shape


def wait_for(engine: Engine) -> None:
    """Synchronize with the device."""
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
        most_steps = batch * context // engine.options.token_budget + batch + 16
        try:
            while not self._decodes():
                engine.step()
                most_steps -= 1
                if not most_steps:
                    raise RuntimeError(f"{batch} requests of {context} tokens never run at once")
        except Exception:
            self.close()  # the next batch is not to find these in its way
            raise

    def _decodes(self) -> bool:
        """Return whether the whole batch runs and none of it prefills."""
        running = self._engine.scheduler.running
        is_prefilled = all(request.computed >= request.num_prompt for request in running)
        return len(running) == self._batch and is_prefilled

    def run(self, num_steps: int) -> Phase:
        """Decode `num_steps` steps.

        Raises:
            RuntimeError: a request of the batch no longer runs: context or KV blocks are used up.
        """
        engine = self._engine
        running = list(engine.scheduler.running)
        if len(running) != self._batch:
            raise RuntimeError(f"{len(running)} of {self._batch} requests are left to decode")
        contexts = [request.computed for request in running]
        wait_for(engine)
        start_ns = time.monotonic_ns()
        for _ in range(num_steps):
            engine.step()
        wait_for(engine)
        end_ns = time.monotonic_ns()
        slices = [[(1, at + step, 1) for at in contexts] for step in range(num_steps)]
        gathered = 0
        if not runner.has_kernels(engine.model.config, engine.model.device):
            # Blocks are only ever added: what a request has now, each step saw the beginning of.
            blocks = [request.blocks for request in running]
            gathered = sum(
                gathered_bytes(max(contexts) + step + 1, blocks, token_bytes=kv_token_bytes(engine))
                for step in range(num_steps)
            )
        return _phase(shape_of(engine), start_ns, end_ns, slices, gather_bytes=gathered)

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
    # Nothing precedes these chunks, so nothing is gathered.
    return _phase(shape_of(engine), start_ns, time.monotonic_ns(), slices, gather_bytes=0)


def kv_token_bytes(engine: Engine) -> int:
    """Return what a token's keys and values take in all layers."""
    return engine.model.config.kv_token_bytes(engine.model.dtype.itemsize)


def gathered_bytes(longest: int, blocks: Sequence[Sequence[int]], *, token_bytes: int) -> int:
    """Return what a decode step reads and writes to have its keys and values in one place.

    As `engine/attention.py` does, where there is no Triton: the blocks of several requests are
    copied into scratch, of each as many as the longest has; one request's are read where they are
    if they follow each other. Attention then reads the copy, which is what the model counts. A copy
    that stays in the L2 cache costs memory less than this.

    Args:
        longest: tokens of the longest request, its own one included.
        blocks: of each request.
        token_bytes: of a token's keys and values in all layers.
    """
    num_blocks = -(-longest // _BLOCK_TOKENS)
    if len(blocks) == 1:
        first = blocks[0][:num_blocks]
        if list(first) == list(range(first[0], first[0] + len(first))):
            return 0
    return 2 * len(blocks) * num_blocks * _BLOCK_TOKENS * token_bytes


def _phase(
    shape: Shape,
    start_ns: int,
    end_ns: int,
    steps: list[list[tuple[int, int, int]]],
    *,
    gather_bytes: int,
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
    return Phase(start_ns, end_ns, len(steps), read, written, done, gather_bytes)
