"""Tensor and pipeline parallelism: parts of one model on several ranks, a process each.

    tensor ranks       each computes some of the heads and of the feed-forward's columns, and they
                       add up their partial sums after attention and after the feed-forward
    pipeline stages    each computes some of the layers and sends its activations to the next; the
                       last one sends the logits to all

    step loop ─┬─> rank 0 ─┐ sums, in      ──> rank 2 ─┐ sums ──> logits to all ranks
               └─> rank 1 ─┘ each layer    ──> rank 3 ─┘
                   stage 0                     stage 1

All ranks run each step and sample the same tokens, so requests, drafts and overlap need no code
here. Embedding, norms, routers and lm_head are on every rank. Each rank has the KV of its heads and
layers.

A rank that waits within a step is not busy. In a sum it waits from its own arrival until that of
the last rank; the ranks of a host have one clock and exchange their arrivals once a step.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from inferscope.engine.config import EngineOptions, ModelConfig
from inferscope.errors import BadInput, InferScopeError

SLOW_RANK_VARIABLE = "INFERSCOPE_SLOW_RANK"
"""Environment variable with a rank and the milliseconds added to each of its steps: `1:5`."""
_PATIENCE_S = 600.0
"""Seconds that a rank waits for another; the exit of one is seen at once."""
_LOOPBACK = "lo"


class Place(msgspec.Struct, frozen=True):
    """Place of a rank: tensor ranks of a stage have consecutive numbers."""

    rank: int = 0
    tensor_ranks: int = 1
    num_stages: int = 1

    @classmethod
    def of(cls, rank: int, options: EngineOptions) -> Place:
        """Return the place of a rank of an engine."""
        return cls(rank, options.tensor_parallel, options.pipeline_parallel)

    @property
    def tensor_rank(self) -> int:
        """Index among the ranks of its stage."""
        return self.rank % self.tensor_ranks

    @property
    def stage(self) -> int:
        """Index of its pipeline stage."""
        return self.rank // self.tensor_ranks

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return self.tensor_ranks * self.num_stages

    def part(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of a rank's part of a model.

        Raises:
            BadInput: the model cannot be divided evenly.
        """
        for name, num, divisor, option in (
            ("heads", config.num_heads, self.tensor_ranks, "tensor-parallel"),
            ("key/value heads", config.num_kv_heads, self.tensor_ranks, "tensor-parallel"),
            ("feed-forward columns", config.ffn, self.tensor_ranks, "tensor-parallel"),
            ("layers", config.num_layers, self.num_stages, "pipeline-parallel"),
        ):
            if num % divisor:
                raise BadInput(
                    f"{num} {name} do not divide among --{option} {divisor}: {num} = "
                    f"{num // divisor} x {divisor} + {num % divisor}. Choose a divisor of {num}."
                )
        return replace(
            config,
            num_heads=config.num_heads // self.tensor_ranks,
            num_kv_heads=config.num_kv_heads // self.tensor_ranks,
            ffn=config.ffn // self.tensor_ranks,
            num_layers=config.num_layers // self.num_stages,
        )

    def whole(self, part: ModelConfig) -> ModelConfig:
        """Return the configuration of the model that `part` was made of."""
        return replace(
            part,
            num_heads=part.num_heads * self.tensor_ranks,
            num_kv_heads=part.num_kv_heads * self.tensor_ranks,
            ffn=part.ffn * self.tensor_ranks,
            num_layers=part.num_layers * self.num_stages,
        )

    def cut(self, matrix: Tensor, dim: int) -> Tensor:
        """Return the part of a matrix's rows (0) or columns (1) that the rank computes."""
        if self.tensor_ranks == 1:
            return matrix
        return matrix.chunk(self.tensor_ranks, dim)[self.tensor_rank].contiguous()

    def has_layer(self, layer_idx: int, config: ModelConfig) -> bool:
        """Return whether a layer of the whole model belongs to the rank's stage."""
        return layer_idx * self.num_stages // config.num_layers == self.stage


WHOLE = Place()
"""Place of an engine without parallelism."""


class RankGroup:
    """Communication of a rank with the others of its engine.

    Attributes:
        place: place of this rank.
        waited_ns: time that this rank waited for others in the last step.
    """

    def __init__(self, place: Place, meeting: str) -> None:
        """Meet the other ranks at a file that does not exist yet."""
        self._slow_s = _slow_s(place.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}",
                rank=place.rank,
                world_size=place.num_ranks,
                timeout=timedelta(seconds=_PATIENCE_S),
            )
        except RuntimeError as error:
            raise InferScopeError(
                f"rank {place.rank} cannot meet the others by gloo: {error}. Set "
                "GLOO_SOCKET_IFNAME to a network interface of this host."
            ) from None
        self.place = place
        self.waited_ns = 0
        self._arrived_ns: list[int] = []
        """Times at which this rank began the sums of the step."""
        for stage in range(place.num_stages):  # every rank takes part in making every group
            first = stage * place.tensor_ranks
            made = dist.new_group(range(first, first + place.tensor_ranks))
            if stage == place.stage:
                self._peers = made

    def begin(self, embedded: Tensor) -> Tensor:
        """Begin a step; return the inputs of the first layer of the stage [tokens, hidden].

        Args:
            embedded: embeddings of the tokens, the inputs of the first stage.
        """
        self.waited_ns = 0
        self._arrived_ns = []
        if self.place.stage:
            start_ns = time.monotonic_ns()
            dist.recv(embedded, src=self.place.rank - self.place.tensor_ranks)
            self.waited_ns += time.monotonic_ns() - start_ns
        if self._slow_s:
            time.sleep(self._slow_s)
        return embedded

    def summed(self, partial: Tensor) -> Tensor:
        """Return the sum of all tensor ranks' tensors."""
        if self.place.tensor_ranks > 1:
            partial = partial.contiguous()
            self._arrived_ns.append(time.monotonic_ns())
            dist.all_reduce(partial, group=self._peers)
        return partial

    def end(self, stream: Tensor) -> bool:
        """End the layers of the stage; return whether it is the last, which computes the logits."""
        place = self.place
        if self._arrived_ns:
            own = torch.tensor(self._arrived_ns)
            arrivals = [torch.empty_like(own) for _ in range(place.tensor_ranks)]
            dist.all_gather(arrivals, own, group=self._peers)
            self.waited_ns += int((torch.stack(arrivals).amax(dim=0) - own).sum())
        if place.stage == place.num_stages - 1:
            return True
        dist.send(stream, dst=place.rank + place.tensor_ranks)
        return False

    def share(self, logits: Tensor) -> Tensor:
        """Return the last stage's logits on every rank; those of the others are overwritten."""
        place = self.place
        if place.num_stages > 1 and len(logits):
            start_ns = time.monotonic_ns()
            dist.broadcast(logits, src=place.num_ranks - place.tensor_ranks)
            if place.stage < place.num_stages - 1:
                self.waited_ns += time.monotonic_ns() - start_ns
        return logits

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        found = torch.tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found.item())


def _slow_s(rank: int) -> float:
    """Return the seconds by which the environment delays each step of a rank.

    Raises:
        BadInput: the variable is not a rank and a number of milliseconds.
    """
    given = os.environ.get(SLOW_RANK_VARIABLE, "")
    if not given:
        return 0.0
    which, _, amount_ms = given.partition(":")
    try:
        delayed, slow_s = int(which), float(amount_ms) / 1e3
    except ValueError:
        slow_s = -1.0
    if not 0 <= slow_s <= 60:
        raise BadInput(
            f"{SLOW_RANK_VARIABLE} is {given!r}. Give a rank and milliseconds, such as 1:5."
        )
    return slow_s if delayed == rank else 0.0
