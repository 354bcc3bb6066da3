"""CUDA graphs of decode steps: one launch per step in place of hundreds.

A graph repeats the same kernels on the same addresses. So the forward pass is captured once for
each of a few batch sizes, on input buffers that live as long as the engine, and a step is padded to
the next size: padding has no KV slot, no context, and rows of logits that are not read.

    3 requests          ids 17 4 9 0     slots 52 80 3 -1     lengths 9 40 1 0     graph of size 4

Only a step of one sampled token per request is a graph; all other steps are eager. All sizes are
captured while the runner is built, before the engine's first step, so no event of a step can be
queried meanwhile; and a capture ignores what other threads of the process do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inferscope.engine.attention import request_rows
from inferscope.engine.model import Model, forward
from inferscope.engine.scheduler import Slice

Replay: TypeAlias = Callable[[], Tensor]
"""Function that launches a captured forward pass and returns its logits, overwritten each time."""
Capture: TypeAlias = Callable[[Replay], Replay]
"""Function that runs a forward pass and returns its replay."""

_Array = TypeVar("_Array", bound=Any)
_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels and allocates workspaces."""


class BoundAttention(Protocol):
    """Attention over single tokens whose requests are read from fixed tensors."""

    def bind(self, *, slots: Tensor, requests: Tensor, blocks: Tensor) -> None:
        """Set the tensors that the next `run` calls read."""

    def run(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values and compute its attention."""


def graph_sizes(most_requests: int) -> tuple[int, ...]:
    """Return the batch sizes to capture: powers of two, and the largest batch."""
    return (*(1 << power for power in range((most_requests - 1).bit_length())), most_requests)


def padded_size(slices: Sequence[Slice], sizes: Sequence[int]) -> int:
    """Return the captured size for a step, 0 for an eager one."""
    if len(slices) > sizes[-1]:
        return 0
    if not all(part.num_tokens == 1 and part.is_sampled for part in slices):
        return 0
    return sizes[bisect_left(sizes, len(slices))]


class StepTensors(NamedTuple):
    """Inputs of a step on the device, int64: [tokens], and [rows] for the rows of logits."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor


class DecodeInputs:
    """Inputs of a decode step at fixed addresses, and their twins in pinned host memory.

    Both are one buffer of int64, so that a step takes one copy: the token ids, positions and KV
    slots of all rows, then what kernels read of each request, then the block lists.

    Attributes:
        ids: [most_requests] token of each request.
        positions: [most_requests] position of it.
        slots: [most_requests] its KV slot, -1 for padding.
        requests: [most_requests, 4], see `request_rows`.
        blocks: Block lists of the requests.
        rows: [most_requests] row of logits of each request, its number.
    """

    def __init__(self, most_requests: int, max_blocks: int, device: torch.device) -> None:
        length = most_requests * (7 + max_blocks)
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(length, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(length, dtype=torch.int64, device=device)
        self._most_requests = most_requests
        self.ids, self.positions, self.slots, self.requests, self.blocks = self._split(self._device)
        self.slots.fill_(-1)
        self.rows = torch.arange(most_requests, device=device)

    def write(
        self,
        size: int,
        *,
        ids: Sequence[int],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
    ) -> StepTensors:
        """Copy a step of one token per request to the device, padded to `size` requests.

        The former copy must be complete. Returned are the inputs without the padding.
        """
        num = len(ids)
        to_ids, to_positions, to_slots, to_requests, to_blocks = self._split(self._host.numpy())
        to_ids[:num], to_ids[num:size] = ids, 0
        to_positions[:num], to_positions[num:size] = positions, 0
        to_slots[:num], to_slots[num:size] = slots, -1
        ones = np.ones(num, dtype=np.int64)
        to_requests[:num], to_requests[num:size] = request_rows(ones, positions, blocks.shape[1]), 0
        to_blocks[: blocks.size] = blocks.reshape(-1)
        length = 7 * self._most_requests + blocks.size
        self._device[:length].copy_(self._host[:length], non_blocking=True)
        return StepTensors(self.ids[:num], self.positions[:num], self.slots[:num], self.rows[:num])

    def _split(self, buffer: _Array) -> tuple[_Array, _Array, _Array, _Array, _Array]:
        most = self._most_requests
        rows = buffer[: 3 * most].reshape(3, most)
        requests = buffer[3 * most : 7 * most].reshape(most, 4)
        return rows[0], rows[1], rows[2], requests, buffer[7 * most :]


class DecodeGraphs:
    """Captured forward passes by batch size.

    Attributes:
        inputs: Inputs of the next launch.
    """

    def __init__(
        self,
        model: Model,
        attention: BoundAttention,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """Capture a forward pass for each of `sizes`, ascending.

        Args:
            model: Model to run.
            attention: Attention of its layers.
            sizes: Batch sizes.
            max_blocks: Maximum blocks of a request.
            capture: `cuda_capture()` on a GPU.
        """
        self._model, self._attention = model, attention
        self._sizes = sizes
        self.inputs = DecodeInputs(sizes[-1], max_blocks, model.device)
        # The largest first: the others reuse its memory.
        self._replays = {size: capture(partial(self._run, size)) for size in reversed(sizes)}

    def size_for(self, slices: Sequence[Slice]) -> int:
        """Return the size of the graph that runs these slices, 0 for an eager step."""
        return padded_size(slices, self._sizes)

    def logits(self, size: int) -> Tensor:
        """Launch a graph on the inputs and return its logits [size, vocab].

        The next launch overwrites them.
        """
        return self._replays[size]()

    @torch.inference_mode()
    def _run(self, size: int) -> Tensor:
        inputs = self.inputs
        self._attention.bind(
            slots=inputs.slots[:size], requests=inputs.requests[:size], blocks=inputs.blocks
        )
        return forward(
            self._model,
            inputs.ids[:size],
            positions=inputs.positions[:size],
            attend=self._attention.run,
            rows=inputs.rows[:size],
        )


def cuda_capture() -> Capture:
    """Return a function that captures forward passes of the current device, in one memory pool."""
    pool = torch.cuda.graph_pool_handle()
    new_stream: Any = torch.cuda.Stream  # untyped in torch

    def capture(run: Replay) -> Replay:
        aside = new_stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # By default a call of another thread, such as an event query, would end the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture
