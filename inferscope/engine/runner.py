"""Conversion of a plan to tensors and execution of the model on them.

A step's inputs are written into buffers that live as long as the engine. The block table has a row
per sequence slot, and a step writes only the new blocks. On a GPU with Triton, decode steps are
graphs (`graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inferscope.engine import devices
from inferscope.engine.attention import KvTensors, PagedAttention, RaggedBatch
from inferscope.engine.capacity import max_model_tokens
from inferscope.engine.config import EngineOptions, ModelConfig
from inferscope.engine.draft_model import DraftModel
from inferscope.engine.graphs import DecodeGraphs, StepTensors, cuda_capture, graph_sizes
from inferscope.engine.logprobs import StepLogprobs
from inferscope.engine.model import Model, forward
from inferscope.engine.overlap import FutureTokens
from inferscope.engine.request import Request
from inferscope.engine.sampler import choose_tokens
from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.speculative import verified
from inferscope.probe import Marks, Probe

_new_event: Any = torch.cuda.Event  # untyped in torch
_LARGEST_HEAD_DIM = 128
"""Maximum of the kernels: a tile of larger heads does not fit into a processor's shared memory."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Tensors of a plan.

    Attributes:
        ids: [tokens] int64 on the device.
        positions: [tokens] int64 on the device.
        rows: [rows] int64 on the device, index of the last known token of each sampled slice, and
            of each of its drafts.
        sampled: Slices of the rows, in their order.
        is_cold: Whether no step of this size bucket and kind has run in this engine.
        logprobs: Log probabilities that its requests ask for; None without any.
        graph_size: Number of tokens that the step is padded to, as a graph; 0 for an eager step.
        routing: Number of tokens of each expert, by layer of a mixture, once the step is executed.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    ragged: RaggedBatch
    sampled: list[Slice]
    is_cold: bool
    logprobs: StepLogprobs | None
    graph_size: int
    routing: list[list[int]] = []

    def added(self, chosen: list[int]) -> list[list[int]]:
        """Return the tokens that each sampled slice adds, from those chosen for the rows.

        The log probabilities are stored in the requests.
        """
        if self.logprobs is not None:
            self.logprobs.store()
        if len(chosen) == len(self.sampled):
            return [[token] for token in chosen]
        added, end = [], 0
        for part in self.sampled:
            start, end = end, end + 1 + part.num_drafts
            added.append(verified(part.request.draft, chosen[start:end]))
        return added


Ran: TypeAlias = tuple[list[Slice], list[list[int]]]
"""Sampled slices of a step, and the tokens that each adds: accepted drafts, and one more."""


Collect: TypeAlias = Callable[[], Ran]
"""Function that waits for the outputs of a launched step; call them in the order of the steps."""


class Attention(Protocol):
    """Attention over a KV pool."""

    @property
    def kv(self) -> KvTensors:
        """Tensors of the pool."""

    def plan(self, batch: RaggedBatch) -> None:
        """Plan how the `run` calls of this step read the pool."""

    def run(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values and compute its attention."""


class StepRunner(Protocol):
    """Runner of the steps that the loop plans.

    Attributes:
        is_asynchronous: Whether a step computes outside the thread that launches it.
    """

    is_asynchronous: bool

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Launch a step, and record its start and end in the process that runs it."""

    def close(self) -> None:
        """Release all resources; safe to call twice."""


class _HostBuffer:
    """Persistent host memory from which a step's values are copied to the device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._device = device
        self._tensor = torch.empty(length, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._array: npt.NDArray[np.int64] = self._tensor.numpy()

    def on_device(self, values: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """Return the values on the device, without waiting for it."""
        num = len(values)
        self._array[:num] = values
        return self._tensor[:num].to(self._device, non_blocking=True)


class Runner:
    """Runner of steps in this process, with the step buffers and the block table."""

    @classmethod
    def of(cls, model: Model, options: EngineOptions, *, num_blocks: int) -> Runner:
        """Return the runner for an engine's options."""
        width = options.block_tokens
        max_blocks = -(-max_model_tokens(model, options, num_blocks) // width)
        draft = None
        if model.draft is not None:
            # The draft model also reads each request's last token but one.
            budget = options.token_budget + options.max_running
            draft_options = replace(options, token_budget=budget)
            draft = DraftModel(cls.of(model.draft, draft_options, num_blocks=num_blocks))
        kv = KvTensors(
            model.config,
            num_blocks=num_blocks,
            block_tokens=width,
            dtype=model.dtype,
            device=model.device,
        )
        graphs = None
        attention: Attention
        if has_kernels(model.config, model.device):
            from inferscope.engine.kernels import TritonAttention  # needs Triton

            attention = in_place = TritonAttention(kv)
            # A mixture waits for its router in each layer, which no graph can.
            if options.cuda_graphs and not model.config.num_experts:
                with torch.cuda.device(model.device):
                    graphs = DecodeGraphs(
                        model,
                        in_place,
                        sizes=graph_sizes(min(options.max_running, options.token_budget)),
                        max_blocks=max_blocks,
                        capture=cuda_capture(),
                    )
        else:
            attention = PagedAttention(kv)
        return cls(
            model,
            attention,
            token_budget=options.token_budget,
            max_running=options.max_running,
            max_blocks=max_blocks,
            block_tokens=width,
            draft=draft,
            overlap=options.overlap,
            graphs=graphs,
        )

    def __init__(
        self,
        model: Model,
        attention: Attention,
        *,
        token_budget: int,
        max_running: int,
        max_blocks: int,
        block_tokens: int,
        draft: DraftModel | None = None,
        overlap: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._draft = draft
        self._model = model
        self._attention = attention
        self._graphs = graphs
        self._block_tokens = block_tokens
        self.is_asynchronous = is_cuda = model.device.type == "cuda"
        self._ids, self._positions, self._slots, self._rows = (
            _HostBuffer(token_budget, model.device) for _ in range(4)
        )
        self._table = np.zeros((max_running, max_blocks), dtype=np.int64)
        self._num_tabled = [0] * max_running
        self._future = FutureTokens(max_running, model.device) if overlap else None
        self._seen_buckets: set[tuple[int, bool]] = set()
        self._copied: Any = _new_event() if is_cuda else None
        self._probe: Probe | None = None
        """Probe of the step launched last."""
        self._marks: Marks | None = None
        """Notes of its steps, on a device that computes beside the host."""
        self._on: AbstractContextManager[object] = nullcontext()
        if is_cuda:
            # The current device is per thread, and events are recorded on its stream.
            self._on = torch.cuda.device(model.device)

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Launch a step, timed by the probe; on a CPU it is complete on return.

        The step of a draft model has the number before it.
        """
        with self._on:
            if self._draft is not None:
                self._draft.propose(step - 1, plan, probe)
            batch = self.prepare(plan)
            mode = "graph" if batch.graph_size else "eager"
            if self.is_asynchronous and self._probe is not probe:
                self._probe, self._marks = probe, probe.marks()
            marks = self._marks
            if marks is None:
                probe.start(step, mode=mode, cold=batch.is_cold)
            else:
                marks.begin(step, mode, batch.is_cold)
            tokens = self.execute(batch)
            # Before the host waits: on a device the end event follows the last kernel.
            if marks is None:
                probe.stop(step, padded_tokens=batch.graph_size)
            else:
                marks.end(step, batch.graph_size)
                marks.book()
            if batch.routing and probe.on:
                self._record_routing(step, batch.routing, probe)
            fetch = self._start_fetch(tokens)
        return lambda: (batch.sampled, batch.added(fetch()))

    def close(self) -> None:
        """Do nothing: the buffers are freed with the runner."""

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        """Return the bytes of the keys and values of a request's first tokens."""
        with self._on:
            kv = self._attention.kv.read_tokens(blocks, num_tokens).cpu()
        return kv.view(torch.uint8).numpy().data.cast("B")

    def prepare(self, plan: Plan) -> Batch:
        """Write a plan into the buffers; a batch is valid until the next is prepared."""
        for request in plan.admitted:
            if request.received is not None:
                start = request.num_published * self._block_tokens
                content, request.received = request.received.read(), None
                self._attention.kv.write_tokens(request.blocks, start, content)
        if self._copied is not None:
            # The device may not have read the buffers of the step before yet.
            self._copied.synchronize()
        slices = plan.slices
        num_singles = len(slices)
        if plan.num_tokens > num_singles:
            slices = [part for part in plan.slices if part.num_tokens == 1]
            num_singles = len(slices)
            slices += [part for part in plan.slices if part.num_tokens != 1]
        self._update_table(slices, plan.admitted)

        sequence_slots = np.array([part.request.sequence_slot for part in slices])
        contexts = np.array([part.context for part in slices])
        counts = np.array([part.num_tokens for part in slices])
        ends = counts.cumsum()
        num_tokens = plan.num_tokens
        token_sequence_slots, positions = sequence_slots, contexts
        if num_tokens > len(slices):
            token_sequence_slots = sequence_slots.repeat(counts)
            positions = np.arange(num_tokens) + (contexts - ends + counts).repeat(counts)
        blocks, offsets = np.divmod(positions, self._block_tokens)
        ids = _token_ids(slices, num_singles)
        slots = self._table[token_sequence_slots, blocks] * self._block_tokens + offsets
        sampled = [part for part in slices if part.is_sampled]
        rows = ends - 1
        if len(sampled) < len(slices):
            rows = rows[[part.is_sampled for part in slices]]
        if plan.has_drafts:
            num_rows = np.array([1 + part.num_drafts for part in sampled])
            first = (rows + 1 - num_rows).repeat(num_rows)
            rows = first + np.arange(len(first)) - (num_rows.cumsum() - num_rows).repeat(num_rows)

        widest = -(-int((contexts + counts).max()) // self._block_tokens)
        block_lists = self._table[sequence_slots, :widest]
        graph_size = 0 if self._graphs is None else self._graphs.size_for(slices)
        if self._graphs is not None and graph_size:
            on_device = self._graphs.inputs.write(
                graph_size, ids=ids, positions=positions, slots=slots, blocks=block_lists
            )
        else:
            on_device = StepTensors(
                ids=self._ids.on_device(ids),
                positions=self._positions.on_device(positions),
                slots=self._slots.on_device(slots),
                rows=self._rows.on_device(rows),
            )
        batch = Batch(
            ids=on_device.ids,
            positions=on_device.positions,
            rows=on_device.rows,
            ragged=RaggedBatch(
                slots=on_device.slots,
                counts=counts,
                contexts=contexts,
                blocks=block_lists,
                num_singles=num_singles,
            ),
            sampled=sampled,
            is_cold=self._mark_shape_seen(num_tokens, is_decode=num_tokens == len(slices)),
            logprobs=StepLogprobs.of(sampled),
            graph_size=graph_size,
        )
        # Before the probe starts the step: the host's planning is not device time.
        if not graph_size:
            self._attention.plan(batch.ragged)
        if self._copied is not None:
            self._copied.record()
        return batch

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Launch the model and return the tokens sampled for the batch.

        Nothing here waits for the device; reading the result does.
        """
        ids = batch.ids if self._future is None else self._future.fill(batch.ids)
        if self._graphs is not None and batch.graph_size:
            if ids is not batch.ids:
                batch.ids.copy_(ids)  # where the graph reads them
            logits = self._graphs.logits(batch.graph_size)[: len(batch.sampled)]
        else:
            logits = forward(
                self._model,
                ids,
                positions=batch.positions,
                attend=self._attention.run,
                rows=batch.rows,
                routed=batch.routing.append,
            )
        if not batch.sampled:
            return torch.empty(0, dtype=torch.int64)
        if batch.logprobs is not None:
            batch.logprobs.compute(logits)
        tokens = choose_tokens(logits, *_sampled_rows(batch.sampled, len(logits)))
        if self._future is not None:
            self._future.store(batch.sampled, tokens)
        if batch.logprobs is not None:
            batch.logprobs.select(tokens)
        return tokens

    def _start_fetch(self, tokens: Tensor) -> Callable[[], list[int]]:
        """Start the copy of tokens to the host; return a function that waits for it alone."""
        if self._copied is None:
            return lambda: tokens.tolist()
        # `tolist` would also wait for the steps launched since.
        on_host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        is_here = _new_event()
        is_here.record()

        def fetch() -> list[int]:
            is_here.synchronize()
            return on_host.tolist()

        return fetch

    @property
    def waited_ns(self) -> int:
        """Time that the last step waited for other ranks."""
        return 0 if self._model.group is None else self._model.group.waited_ns

    def _record_routing(self, step: int, routing: list[list[int]], probe: Probe) -> None:
        config, group = self._model.config, self._model.group
        if group is not None and group.place.tensor_rank:
            return  # it is the same on all tensor ranks
        stage = 0 if group is None else group.place.stage
        first = stage * config.num_layers
        probe.routed(step, routing, per_token=config.experts_per_token, first_layer=first)

    def _update_table(self, slices: list[Slice], admitted: list[Request]) -> None:
        for request in admitted:
            self._num_tabled[request.sequence_slot] = 0
        for part in slices:
            request = part.request
            num_tabled, num_blocks = self._num_tabled[request.sequence_slot], len(request.blocks)
            if num_tabled < num_blocks:
                self._table[request.sequence_slot, num_tabled:num_blocks] = request.blocks[
                    num_tabled:
                ]
                self._num_tabled[request.sequence_slot] = num_blocks

    def _mark_shape_seen(self, num_tokens: int, *, is_decode: bool) -> bool:
        bucket = ((num_tokens - 1).bit_length(), is_decode)
        if bucket in self._seen_buckets:
            return False
        self._seen_buckets.add(bucket)
        return True


def has_kernels(config: ModelConfig, device: torch.device) -> bool:
    """Return whether the Triton kernels serve a model on a device."""
    return device.type == "cuda" and config.head_dim <= _LARGEST_HEAD_DIM and devices.has_triton()


def _sampled_rows(sampled: list[Slice], num_rows: int) -> tuple[list[Request], list[int]]:
    """Return the request of each row of logits, and the position that it chooses a token for."""
    if len(sampled) == num_rows:
        ends = [part.context + part.num_tokens for part in sampled]
        return [part.request for part in sampled], ends
    requests: list[Request] = []
    positions: list[int] = []
    for part in sampled:
        num_known = part.context + part.num_tokens - part.num_drafts
        requests += [part.request] * (1 + part.num_drafts)
        positions += range(num_known, num_known + 1 + part.num_drafts)
    return requests, positions


def _token_ids(slices: list[Slice], num_singles: int) -> list[int]:
    ids = [part.request.token_at(part.context) for part in slices[:num_singles]]
    for part in slices[num_singles:]:
        ids += part.request.tokens[part.context : part.context + part.num_tokens]
        ids += part.request.draft[: part.num_drafts]
    return ids
