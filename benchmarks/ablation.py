"""Runs of a real engine's step with subsets of its batch: the cost of every coalition.

A `Scene` is a step with its requests' keys and values in the pool. Any coalition of them can be run
as a step of its own, through the engine's own runner. Running one changes nothing that the next one
reads: a slice writes the keys and values of its own tokens, behind its context, and every run that
reads them writes them first. So what the whole step samples must not change from the first run to
the last, and `Scene.sample` lets that be checked. What a run does leave behind, in the caches, is
settled before the next one: `Scene.settle`.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inferscope.engine import Engine, Request, Sampling
from inferscope.engine.runner import Runner
from inferscope.engine.scheduler import Plan, Slice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """One request's slice of a step: `num_tokens` tokens after `context` computed ones."""

    num_tokens: int
    context: int
    is_sampled: bool


@dataclass(frozen=True)
class StepShape:
    """A step to be measured by coalitions.

    Attributes:
        chunks: slices of prompts.
        decodes: slices of one token each.
        is_pooled: whether the decodes' contexts are so similar that any k of them cost the same;
            then only their number varies.
    """

    chunks: tuple[Part, ...]
    decodes: tuple[Part, ...]
    is_pooled: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """All slices, in the order by which coalitions number them: chunks first."""
        return self.chunks + self.decodes


SETTLING_STEPS = 3
"""Number of steps after which most of a processor's cache content is restored."""

WorkTotals: TypeAlias = Callable[[], Tensor]
Stopwatch: TypeAlias = Callable[[WorkTotals], tuple[Tensor, int]]
"""Function that runs work and returns its result and its duration in nanoseconds."""


def thread_time(work: WorkTotals) -> tuple[Tensor, int]:
    """Time work by this thread's processor time, which excludes other processes on its core."""
    began_ns = time.thread_time_ns()
    tokens = work()
    return tokens, time.thread_time_ns() - began_ns


class Scene:
    """A step's requests, ready to run as any coalition."""

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        shape: StepShape,
        draw: random.Random,
        *,
        stopwatch: Stopwatch = thread_time,
        settling_steps: int = SETTLING_STEPS,
    ) -> None:
        """Allocate blocks and compute the contexts before the step.

        Args:
            engine: idle engine: all slots and blocks are free, in the order that traffic left.
            runner: the engine's runner.
            shape: the step's slices.
            draw: generator of the prompts.
            stopwatch: timer of a step. The default suits steps computed by one thread.
            settling_steps: decode steps before each run, for `settle`.
        """
        self._pool, self._runner = engine.pool, runner
        self._stopwatch, self._settling_steps = stopwatch, settling_steps
        self._slices = []
        for slot, part in enumerate(shape.parts):
            num = part.context + part.num_tokens
            request = Request(
                index=slot,
                request_id=str(slot),
                tokens=[draw.randrange(1, engine.model.config.vocab) for _ in range(num)],
                num_prompt=num,
                max_tokens=1,
                sampling=Sampling(),
                stop_ids=frozenset(),
                seed=0,
                blocks=self._pool.allocate(self._pool.blocks_for(num)),
                sequence_slot=slot,
            )
            self._slices.append(Slice(request, part.context, part.num_tokens, part.is_sampled))
            self._compute_context(self._slices[-1], engine.options.token_budget)

    def sample(self, members: Sequence[int]) -> tuple[list[int], int]:
        """Run a step of some requests; return the sampled tokens and its nanoseconds.

        As in a probe, the time before the first launch is excluded.
        """
        batch = self._runner.prepare(_plan([self._slices[at] for at in members]))
        tokens, took_ns = self._stopwatch(lambda: self._runner.execute(batch))
        return tokens.tolist(), took_ns

    def settle(self, members: Sequence[int]) -> None:
        """Run steps of these requests' decodes, as a server would have run just before.

        A step takes longer after steps of other sizes than after its like (one decode, built-in
        model: 1.3 ms for 1.0), as code and data for its size are out of the caches. In served
        traffic decodes follow on decodes. In a random order of coalitions they hardly ever do, and
        would be charged for the order.
        """
        decoding = [self._slices[at] for at in members if self._slices[at].num_tokens == 1]
        if decoding and self._settling_steps:
            batch = self._runner.prepare(_plan(decoding))
            for _ in range(self._settling_steps):
                self._runner.execute(batch)

    def close(self) -> None:
        """Release the blocks."""
        for part in self._slices:
            self._pool.release(part.request.blocks)

    def _compute_context(self, part: Slice, budget: int) -> None:
        admitted = [part.request]
        for start in range(0, part.context, budget):
            num_tokens = min(budget, part.context - start)
            chunk = Slice(part.request, start, num_tokens, is_sampled=False)
            self._runner.execute(self._runner.prepare(_plan([chunk], admitted)))
            admitted = []
        self._runner.execute(self._runner.prepare(_plan([part], admitted)))


def _plan(slices: list[Slice], admitted: Sequence[Request] = ()) -> Plan:
    num_tokens = sum(part.num_tokens for part in slices)
    return Plan(slices, num_tokens, list(admitted), preempted=[], binding="none")


@dataclass(frozen=True)
class Coalitions:
    """The measured coalitions of a step.

    Attributes:
        members: requests of each coalition; the first is empty, the last is the whole batch.
        decodes_at: [measured], numbers of pooled decodes; `members` then has, for each set of
            chunks, one coalition per number.
    """

    members: list[list[int]]
    decodes_at: Ints | None


def coalitions(shape: StepShape, most_gap: float) -> Coalitions:
    """Return the coalitions of a step: all, or with pooled decodes a ladder of their numbers.

    Args:
        shape: the step's slices.
        most_gap: largest factor between the ladder's rungs.
    """
    num_chunks, num = len(shape.chunks), len(shape.parts)
    if not shape.is_pooled:
        return Coalitions([_members(subset, num) for subset in range(2**num)], None)
    rungs = ladder(len(shape.decodes), most_gap)
    members = [
        _members(subset, num_chunks) + list(range(num_chunks, num_chunks + rung))
        for subset in range(2**num_chunks)
        for rung in rungs
    ]
    return Coalitions(members, np.array(rungs))


def ladder(num: int, most_gap: float) -> list[int]:
    """Return numbers from 0 to `num`, each at most `most_gap` times the one before it."""
    rungs = [0]
    while rungs[-1] < num:
        rungs.append(min(num, max(rungs[-1] + 1, int(rungs[-1] * most_gap))))
    return rungs


def _members(subset: int, num: int) -> list[int]:
    return [at for at in range(num) if subset >> at & 1]


@dataclass(frozen=True)
class Runs:
    """All runs of a step's coalitions, in run order.

    Attributes:
        coalition: [runs], number of the coalition.
        round: [runs]; each round runs every coalition except the empty one once.
        took_ns: [runs], durations.
    """

    coalition: Ints
    round: Ints
    took_ns: Floats

    def half(self, which: int) -> Runs:
        """Return every other round."""
        is_in = self.round % 2 == which
        return Runs(self.coalition[is_in], self.round[is_in], self.took_ns[is_in])


def measure(
    scene: Scene,
    members: Sequence[list[int]],
    *,
    repeats: int,
    draw: random.Random,
    until_s: float = math.inf,
) -> Runs:
    """Run every coalition many times, each round in its own random order.

    Args:
        scene: the step's requests.
        members: requests of each coalition, empty first, whole batch last.
        repeats: number of rounds.
        draw: generator of the orders.
        until_s: end on the monotonic clock; no round starts later, except two for the halves.

    Raises:
        AssertionError: the last coalition does not always sample the same tokens, so the other
            runs changed what it reads.
    """
    everybody = len(members) - 1
    runs = []
    first, _ = scene.sample(members[everybody])
    gc.collect()
    gc.disable()
    try:
        for at_round in range(repeats):
            if at_round >= 2 and time.monotonic() > until_s:
                break
            for at in draw.sample(range(1, len(members)), everybody):
                scene.settle(members[at])
                tokens, took_ns = scene.sample(members[at])
                assert at != everybody or tokens == first, "what the step reads has changed"
                runs.append((at, at_round, took_ns))
    finally:
        gc.enable()
    coalition, rounds, took = (np.array(column) for column in zip(*runs, strict=True))
    return Runs(coalition, rounds, took.astype(np.float64))


_WINDOW = 4
"""Number of runs before and after one that estimate the machine's speed."""
_ROUNDS_OF_FITTING = 6


def costs_ns(runs: Runs) -> Floats:
    """Return the cost of each coalition, the empty one first: [coalitions].

    Other load slows a machine for seconds at a time, and all coalitions alike. Each run is
    therefore corrected by the slowdown of its neighbors in time. A coalition's cost is the median
    of its corrected runs.
    """
    log = np.log(runs.took_ns)
    num = int(runs.coalition.max()) + 1
    own = [np.flatnonzero(runs.coalition == at) for at in range(1, num)]
    cost, slowness = np.zeros(num), np.zeros(len(log))
    for _ in range(_ROUNDS_OF_FITTING):
        for at, of_it in enumerate(own, 1):
            cost[at] = np.median(log[of_it] - slowness[of_it])
        slowness = _neighbours(log - cost[runs.coalition])
        slowness -= np.median(slowness)
    return np.concatenate([[0.0], np.exp(cost[1:])])


def _neighbours(values: Floats) -> Floats:
    """Return the median of each value's neighbors, excluding the value."""
    padded = np.pad(values, _WINDOW, constant_values=np.nan)
    beside = [at for at in range(2 * _WINDOW + 1) if at != _WINDOW]
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * _WINDOW + 1)[:, beside]
    return np.asarray(np.nanmedian(around, axis=1))
