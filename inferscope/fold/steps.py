"""Types of a step, from its records to its division over requests.

A step's slices come from one ring, its spans from one ring per rank. They are joined by the step's
number and verified by the digest. A step is final when its slices and all ranks' spans are in: its
shares are computed once, with the fit then in force, and never revised.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import NEVER_NS, BlameWeights, Delay, HeldResources, Step
from inferscope.cost import StepModel, StepTable
from inferscope.fold.clocks import DeviceClock
from inferscope.records import StepSlices, StepSpan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_NEVER_NS = 1 << 63
_FASTEST_CLOCK = 1.01
_CLOCK_ERROR_NS = 1_000_000
"""Excess of a device's measured time over the host's from which it is rejected."""


class PendingStep(msgspec.Struct):
    """Step whose records are incomplete."""

    dp_rank: int
    step: int
    start_ns: int
    seen_ns: int
    """Time of its last record."""
    booked_ns: int = 0
    """Time up to which other requests no longer wait for it; 0 before it is overdue."""
    hung_ns: int = 0
    """Time from which the ledgers of requests wait for it; 0 if none does."""
    held: list[Step] = []
    """Ledger steps that stand for it while it is overdue."""
    slices: StepSlices | None = None
    ring: int = -1
    """Number of the ring that reported the slices."""
    spans: dict[int, StepSpan] = {}
    """Spans by ring number."""
    past: set[int] = set()
    """Numbers of rings that will not report a span of it."""
    is_unsliced: bool = False
    """Whether its slices are not expected any more."""
    binding: str = "none"
    """Scheduler constraint that limits the step."""
    planned_ns: int = NEVER_NS
    """Time at which its members were chosen; `NEVER_NS` without a plan."""

    @property
    def ready_ns(self) -> int:
        """Return when its outputs were known, by the latest of its spans; `_NEVER_NS` without one.

        Slices are recorded at the step's dispatch, or once its outputs are known. Slices of a later
        step that was planned after this time follow them; those of an earlier one may not.
        """
        return max((span.ready_ns for span in self.spans.values()), default=_NEVER_NS)

    @property
    def open_ns(self) -> int:
        """Return the time from which the ledgers of its requests may still change."""
        return max(self.start_ns, self.booked_ns)


class RankSpan(msgspec.Struct, frozen=True, gc=False):
    """Execution of a step on one rank, on the host's clock."""

    ring: int
    rank: int
    stage: int
    """Pipeline stage; ranks of one stage work at the same time."""
    start_ns: int
    end_ns: int
    measured_ns: int
    clock: str


class Execution(msgspec.Struct, frozen=True, gc=False):
    """Execution of a step on all ranks that reported it."""

    span: StepSpan
    """Record of the first rank, for mode and padding."""
    digest: int
    """Digest of the slices by the ranks; 0 if no rank reports it, negative if they differ."""
    ranks: list[RankSpan]
    start_ns: int
    """Start on the earliest rank."""
    end_ns: int
    """End on the latest rank."""
    longest_ns: int
    """Longest of the ranks' measured times."""
    sum_ns: int
    """Sum of the ranks' measured times."""
    wait_ns: int
    """Part of the duration spent waiting for the slowest rank."""
    stages_ns: list[int]
    """Time of the fastest rank of each pipeline stage, in order of stages."""
    is_cold: bool
    """Whether the step was cold on some rank."""
    is_dummy: bool
    """Whether the step was a dummy on all ranks."""

    @property
    def delay_ns(self) -> int:
        """Return the time for which its requests waited, without the wait for a slow rank.

        It spans all stages of a pipeline, so the cost model is fitted to it.
        """
        return self.end_ns - self.start_ns - self.wait_ns

    def is_of(self, digest: int) -> bool:
        """Return whether slices with this digest may be what the ranks executed."""
        return self.digest in (0, digest)


class SplitStep(msgspec.Struct, frozen=True, gc=False):
    """Split of a step's time: the shares on each rank, and the delays of its members."""

    shares_ns: Sequence[Ints]
    """Share of each row by rank, [rows]."""
    padding_ns: Sequence[int]
    unattributed_ns: Sequence[int]
    residual: float
    fit_id: str
    slots: Ints
    """Slots of its requests, [requests]."""
    delay: Delay
    model: StepModel | None = None
    """Cost model in force at the split; None for a step without requests."""
    chunk_ns: Sequence[float] = ()
    """Modelled time of each chunk before scaling to the measured time, [chunks]."""
    weights: BlameWeights | None = None
    """Blame weights of its requests; None for a step without requests."""
    grip: HeldResources | None = None
    """Resources that its requests hold and others wait for."""
    is_provisional: bool = False
    """Whether the model in force was corrected by few steps only."""


class Joined(msgspec.Struct, eq=False, gc=False):
    """Step of known requests whose records are all in."""

    run: Execution
    slots: Ints
    """Slots of the requests, [rows]."""
    is_single: bool
    """Whether each row has a request of its own."""
    slices: StepSlices
    binding: str
    """Scheduler constraint that limits the step."""
    block_tokens: int
    """Tokens in a KV block; 0 if the engine does not report it."""
    dp_rank: int
    planned_ns: int
    """Time at which its members were chosen."""
    split: SplitStep | None = None
    """Split of its time; None until the steps of its window are split."""
    prefill_ns: list[int] = []
    """Prefill time by rank; empty until the split."""
    ids: tuple[str, ...] = ()
    """Engine's ids of the rows' requests; empty unless recent steps are kept."""
    work: list[int] | None = None
    """Modelled work in the layout of `Moved`; None if it is not counted, or likewise."""


def rank_span(
    span: StepSpan, clock: DeviceClock, *, ring: int, rank: int, stage: int = 0
) -> RankSpan:
    """Return a span on the host's clock, by device time if the device timed the step.

    The device cannot have begun before the launch, nor ended after its outputs were ready: this
    bounds any error of the anchors. Host time excludes the wait for other ranks, wherever it lies
    in the span.
    """
    launched_ns, ready_ns = span.launch_start_ns, span.ready_ns
    if not 0 <= launched_ns < ready_ns <= span.t_ns:
        launched_ns = min(max(launched_ns, 0), span.t_ns)
        ready_ns = max(min(ready_ns, span.t_ns), launched_ns + 1)
    if span.device_start_ns is not None and span.device_end_ns is not None:
        measured_ns = max(1, span.device_end_ns - span.device_start_ns)
        if measured_ns <= (ready_ns - launched_ns) * _FASTEST_CLOCK + _CLOCK_ERROR_NS:
            start_ns = clock.host_ns(span.device_start_ns)
            if start_ns is None or start_ns + measured_ns > ready_ns:
                start_ns = ready_ns - measured_ns
            start_ns = max(start_ns, launched_ns)
            return RankSpan(
                ring, rank, stage, start_ns, start_ns + measured_ns, measured_ns, "device"
            )
    took_ns = max(1, ready_ns - launched_ns - max(0, sum(span.waits_ns)))
    return RankSpan(ring, rank, stage, launched_ns, ready_ns, took_ns, "host")


def execution(given: list[tuple[RankSpan, StepSpan]]) -> Execution:
    """Combine the spans of a step's ranks into one execution."""
    if len(given) == 1:
        rank, span = given[0]
        took_ns = rank.measured_ns
        return Execution(
            span,
            span.digest,
            [rank],
            rank.start_ns,
            rank.end_ns,
            took_ns,
            took_ns,
            rank.end_ns - rank.start_ns - took_ns,
            [took_ns],
            span.cold,
            span.dummy,
        )
    given.sort(key=lambda of_rank: (of_rank[0].rank, of_rank[0].ring))
    ranks, spans = [rank for rank, _ in given], [span for _, span in given]
    start_ns, end_ns = min(rank.start_ns for rank in ranks), max(rank.end_ns for rank in ranks)
    stages_ns = fastest_by_stage(ranks)
    known = {span.digest for span in spans} - {0}
    return Execution(
        span=spans[0],
        digest=known.pop() if len(known) == 1 else -len(known),
        ranks=ranks,
        start_ns=start_ns,
        end_ns=end_ns,
        longest_ns=max(rank.measured_ns for rank in ranks),
        sum_ns=sum(rank.measured_ns for rank in ranks),
        wait_ns=max(0, end_ns - start_ns - sum(stages_ns)),
        stages_ns=stages_ns,
        is_cold=any(span.cold for span in spans),
        is_dummy=all(span.dummy for span in spans),
    )


def fastest_by_stage(ranks: list[RankSpan]) -> list[int]:
    """Return the time of the fastest rank of each pipeline stage, in order of stages.

    The duration of a step beyond their sum is wait for a slower rank.
    """
    fastest: dict[int, int] = {}
    for rank in ranks:
        fastest[rank.stage] = min(rank.measured_ns, fastest.get(rank.stage, rank.measured_ns))
    return [fastest[stage] for stage in sorted(fastest)]


def pair_shares(split: SplitStep, table: StepTable, step: int) -> dict[int, float]:
    """Return the share of query-key pairs in each chunk's modelled cost, by member."""
    if split.model is None:
        return {}
    chunks = slice(*table.chunk_step.searchsorted((step, step + 1)).tolist())
    pair_ns = split.model.pair_ns
    return {
        member: min(1.0, pair_ns * pairs / part) if part > 0 else 0.0
        for member, pairs, part in zip(
            table.chunks[chunks].tolist(),
            table.chunk_pairs[chunks].tolist(),
            split.chunk_ns,
            strict=True,
        )
    }
