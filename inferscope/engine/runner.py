"""Turns a plan into tensors and runs the model on them.

Everything a step needs is written into buffers that live as long as the engine; the block table is
kept row by row, and a step writes only the blocks that are new.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from inferscope.engine.attention import PagedAttention, RaggedBatch
from inferscope.engine.capacity import max_model_tokens
from inferscope.engine.config import EngineOptions
from inferscope.engine.model import Model, forward
from inferscope.engine.request import Request
from inferscope.engine.sampler import choose_tokens
from inferscope.engine.scheduler import Plan, Slice
from inferscope.probe import Probe


@dataclass(frozen=True)
class Batch:
    """A plan, ready to run.

    Attributes:
        ids: [tokens] int64 on the device.
        positions: [tokens] int64 on the device.
        rows: [rows] int64 on the device, the last token of each sampled slice.
        sampled: The slices that the rows belong to, in their order.
        is_cold: No step of about this size and kind has run before in this engine.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    ragged: RaggedBatch
    sampled: list[Slice]
    is_cold: bool


Ran: TypeAlias = tuple[list[Slice], list[int]]
"""A step's sampled slices, and the token chosen for each."""


Launched: TypeAlias = Callable[[], None]
"""Called when all of a step is launched, before anything waits for its outputs."""


class StepRunner(Protocol):
    """Runs the steps that the loop has planned.

    Attributes:
        is_asynchronous: A step computes elsewhere than in the thread that launches it.
    """

    is_asynchronous: bool

    def run(self, step: int, plan: Plan, probe: Probe, launched: Launched) -> Ran:
        """Run a step and have it timed by whoever sees it begin and end."""

    def close(self) -> None:
        """Give back what it holds; safe to call twice."""


class Runner:
    """Owns the step's buffers and the block table."""

    @classmethod
    def of(cls, model: Model, options: EngineOptions, *, num_blocks: int) -> Runner:
        """Make the runner that an engine's options ask for."""
        width = options.block_tokens
        longest = max_model_tokens(model, options, num_blocks)
        attention = PagedAttention(
            model.config,
            num_blocks=num_blocks,
            block_tokens=width,
            dtype=model.dtype,
            device=model.device,
        )
        return cls(
            model,
            attention,
            token_budget=options.token_budget,
            max_running=options.max_running,
            max_blocks=-(-longest // width),
            block_tokens=width,
        )

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        *,
        token_budget: int,
        max_running: int,
        max_blocks: int,
        block_tokens: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_tokens = block_tokens
        self.is_asynchronous = is_cuda = model.device.type == "cuda"
        self._ids, self._positions, self._slots, self._rows = (
            torch.empty(length, dtype=torch.int64, pin_memory=is_cuda)
            for length in (token_budget, token_budget, token_budget, max_running)
        )
        self._table = np.zeros((max_running, max_blocks), dtype=np.int64)
        self._num_tabled = [0] * max_running
        self._seen_buckets: set[tuple[int, bool]] = set()
        new_event: Any = torch.cuda.Event  # untyped in torch
        self._copied: Any = new_event() if is_cuda else None
        self._on: AbstractContextManager[object] = nullcontext()
        if is_cuda:
            # Which device is current is each thread's own, and events go to that one's stream.
            self._on = torch.cuda.device(model.device)

    def run(self, step: int, plan: Plan, probe: Probe, launched: Launched) -> Ran:
        """Run a step, timed by the probe."""
        with self._on:
            batch = self.prepare(plan)
            probe.start(step, mode="eager", cold=batch.is_cold)
            tokens = self.execute(batch)
            # Before the host waits: on a device the end event follows the last kernel. On a CPU
            # everything has been computed by now.
            probe.stop(step)
            launched()
            return batch.sampled, tokens.tolist()

    def close(self) -> None:
        """Do nothing: the buffers go with the runner."""

    def prepare(self, plan: Plan) -> Batch:
        """Write a plan into the buffers; one batch is valid until the next is prepared."""
        if self._copied is not None:
            # A chunk without an output ends before the device has begun: it may not have read yet.
            self._copied.synchronize()
        slices = [part for part in plan.slices if part.num_tokens == 1]
        num_singles = len(slices)
        slices += [part for part in plan.slices if part.num_tokens != 1]
        self._update_table(slices, plan.admitted)

        seats = np.array([part.request.seat for part in slices])
        contexts = np.array([part.context for part in slices])
        counts = np.array([part.num_tokens for part in slices])
        ends = counts.cumsum()
        num_tokens = plan.num_tokens
        token_seats, positions = seats, contexts
        if num_tokens > len(slices):
            token_seats = seats.repeat(counts)
            positions = np.arange(num_tokens) + (contexts - ends + counts).repeat(counts)
        blocks, offsets = np.divmod(positions, self._block_tokens)
        self._ids.numpy()[:num_tokens] = _token_ids(slices, num_singles)
        self._positions.numpy()[:num_tokens] = positions
        self._slots.numpy()[:num_tokens] = (
            self._table[token_seats, blocks] * self._block_tokens + offsets
        )
        sampled = [part for part in slices if part.is_sampled]
        self._rows.numpy()[: len(sampled)] = ends[[part.is_sampled for part in slices]] - 1

        longest = int((contexts + counts).max())
        widest = -(-longest // self._block_tokens)
        batch = Batch(
            ids=self._on_device(self._ids, num_tokens),
            positions=self._on_device(self._positions, num_tokens),
            rows=self._on_device(self._rows, len(sampled)),
            ragged=RaggedBatch(
                slots=self._on_device(self._slots, num_tokens),
                counts=counts,
                contexts=contexts,
                blocks=self._table[seats, :widest],
                num_singles=num_singles,
            ),
            sampled=sampled,
            is_cold=self._is_cold(num_tokens, is_decode=num_tokens == len(slices)),
        )
        # Before the probe starts the step: the host's planning is not device time.
        self._attention.plan(batch.ragged)
        if self._copied is not None:
            self._copied.record()
        return batch

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Launch the model and return the tokens chosen for the batch's sampled slices.

        Nothing here waits for the device; reading the result does.
        """
        logits = forward(
            self._model,
            batch.ids,
            positions=batch.positions,
            attend=self._attention.run,
            rows=batch.rows,
        )
        if not batch.sampled:
            return torch.empty(0, dtype=torch.int64)
        return choose_tokens(logits, [part.request for part in batch.sampled])

    def _update_table(self, slices: list[Slice], admitted: list[Request]) -> None:
        for request in admitted:
            self._num_tabled[request.seat] = 0
        for part in slices:
            request = part.request
            num_tabled, num_blocks = self._num_tabled[request.seat], len(request.blocks)
            if num_tabled < num_blocks:
                self._table[request.seat, num_tabled:num_blocks] = request.blocks[num_tabled:]
                self._num_tabled[request.seat] = num_blocks

    def _on_device(self, buffer: Tensor, length: int) -> Tensor:
        return buffer[:length].to(self._model.device, non_blocking=True)

    def _is_cold(self, num_tokens: int, *, is_decode: bool) -> bool:
        bucket = ((num_tokens - 1).bit_length(), is_decode)
        if bucket in self._seen_buckets:
            return False
        self._seen_buckets.add(bucket)
        return True


def _token_ids(slices: list[Slice], num_singles: int) -> list[int]:
    ids = [part.request.tokens[part.context] for part in slices[:num_singles]]
    for part in slices[num_singles:]:
        ids += part.request.tokens[part.context : part.context + part.num_tokens]
    return ids
