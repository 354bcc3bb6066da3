"""A step of the real engine, run again and again with parts of its batch: what each would cost.

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
    """One request's part of a step: `num_tokens` tokens after `context` computed ones."""

    num_tokens: int
    context: int
    is_sampled: bool


@dataclass(frozen=True)
class StepShape:
    """A step to be taken apart.

    Attributes:
        chunks: of prompts.
        decodes: one token each.
        is_pooled: the decodes' contexts are so much alike that any k of them cost what any other k
            do, so only their number is varied.
    """

    chunks: tuple[Part, ...]
    decodes: tuple[Part, ...]
    is_pooled: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        """All, in the order by which coalitions number them: chunks first."""
        return self.chunks + self.decodes


SETTLING_STEPS = 3
"""By when most of what a processor's caches had lost is back."""

Work: TypeAlias = Callable[[], Tensor]
Stopwatch: TypeAlias = Callable[[Work], tuple[Tensor, int]]
"""Does work; returns its result and how many ns it took."""


def thread_time(work: Work) -> tuple[Tensor, int]:
    """Time by this thread's processor time: another process on its core does not count."""
    began_ns = time.thread_time_ns()
    tokens = work()
    return tokens, time.thread_time_ns() - began_ns


class Scene:
    """A step's requests, ready to be run in any company."""

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
        """Take blocks and compute what precedes the step.

        Args:
            engine: idle: all sequence slots and blocks are free, in the order that traffic left.
            runner: the engine's.
            shape: of the step.
            draw: of the prompts.
            stopwatch: times a step. The default is right where one thread computes it all.
            settling_steps: decodes before each run, for `settle`.
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
        """Run a step of some requests; return the sampled tokens and how many ns it took.

        As a probe times it: what precedes the first launch is left out.
        """
        batch = self._runner.prepare(_plan([self._slices[at] for at in members]))
        tokens, took_ns = self._stopwatch(lambda: self._runner.execute(batch))
        return tokens.tolist(), took_ns

    def settle(self, members: Sequence[int]) -> None:
        """Run what a server of these requests alone has run just before: steps of its decodes.

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
        """Give the blocks back."""
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
    """The coalitions of a step that are run.

    Attributes:
        members: of each; the first is nobody, the last everybody.
        decodes_at: [measured], how many decodes there are, where these are pooled: `members` is
            then, for each set of chunks, one coalition for each of these numbers.
    """

    members: list[list[int]]
    decodes_at: Ints | None


def coalitions(shape: StepShape, most_gap: float) -> Coalitions:
    """Choose the coalitions of a step: all, or with pooled decodes, a ladder of their numbers.

    Args:
        shape: of the step.
        most_gap: between the ladder's rungs, as a factor.
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
    """Return numbers from 0 to `num`, each at most a factor beyond the one before it."""
    rungs = [0]
    while rungs[-1] < num:
        rungs.append(min(num, max(rungs[-1] + 1, int(rungs[-1] * most_gap))))
    return rungs


def _members(subset: int, num: int) -> list[int]:
    return [at for at in range(num) if subset >> at & 1]


@dataclass(frozen=True)
class Runs:
    """Every run of a step's coalitions, in the order in which they were made.

    Attributes:
        coalition: [runs], by number.
        round: [runs]; in each round every coalition but that of nobody is run once.
        took_ns: [runs].
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
    """Run every coalition many times, each round in an order of its own.

    Args:
        scene: of the step.
        members: of each coalition, nobody first, everybody last.
        repeats: rounds.
        draw: of the orders.
        until_s: on the monotonic clock; no round begins later, but for two, of which halves are.

    Raises:
        AssertionError: the last coalition does not always sample the same tokens, so running the
            others has changed what it reads.
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
"""Runs before and after one that tell how fast the machine was."""
_ROUNDS_OF_FITTING = 6


def costs_ns(runs: Runs) -> Floats:
    """Return what each coalition costs, nobody first: [coalitions].

    What else runs on a machine slows it down for seconds at a time, and so all coalitions alike. A
    run is therefore corrected by how slow its neighbours in time were, each by its own measure; the
    coalition's cost is the median of its corrected runs.
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
    """Return the median of each value's neighbours, itself left out."""
    padded = np.pad(values, _WINDOW, constant_values=np.nan)
    beside = [at for at in range(2 * _WINDOW + 1) if at != _WINDOW]
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * _WINDOW + 1)[:, beside]
    return np.asarray(np.nanmedian(around, axis=1))
