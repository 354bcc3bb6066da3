"""A step from its records to its division over requests.

A step's slices come from one ring, its spans from one ring per rank; they meet by the step's number
and prove it by the digest. A step is final when its slices and all ranks' spans are in: its shares
are computed once, with the fit then in force, and never revised.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.busy import NEVER_NS
from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.holds import HeldResources
from inferscope.attribution.ledger import Step
from inferscope.attribution.marginal import BlameWeights
from inferscope.collector.clocks import DeviceClock
from inferscope.cost.model import StepModel
from inferscope.cost.step_table import StepTable
from inferscope.records import StepSlices, StepSpan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_NEVER_NS = 1 << 63
_FASTEST_CLOCK = 1.01
_CLOCK_ERROR_NS = 1_000_000
"""A device's clock may run this much ahead of the host's before its word is not believed."""


class PendingStep(msgspec.Struct):
    """A step whose records are still coming in."""

    dp_rank: int
    step: int
    start_ns: int
    seen_ns: int
    """When it was last spoken of."""
    booked_ns: int = 0
    """Other requests wait for it no longer up to here; 0 before it is overdue."""
    hung_ns: int = 0
    """From when on requests are held back for it; 0 where none is."""
    held: list[Step] = []
    """What stands for it in the ledgers that wait for it since it is overdue."""
    slices: StepSlices | None = None
    ring: int = -1
    """The ring the slices came from."""
    spans: dict[int, StepSpan] = {}
    """By ring."""
    past: set[int] = set()
    """Rings that are through with it without having told a span."""
    is_unsliced: bool = False
    """Its slices will not come any more."""
    binding: str = "none"
    """What the scheduler says is scarce."""
    planned_ns: int = NEVER_NS
    """When its members were chosen; `NEVER_NS` where no plan said so."""

    @property
    def ready_ns(self) -> int:
        """Return when its outputs were known, by the latest of its spans; never without one.

        Slices are stated from the step's dispatch on, or once its outputs are known: those of a
        later step that was planned after this time follow them, of an earlier one they may not.
        """
        return max((span.ready_ns for span in self.spans.values()), default=_NEVER_NS)

    @property
    def open_ns(self) -> int:
        """Return the time from which on the ledgers of its requests may still change."""
        return max(self.start_ns, self.booked_ns)


class RankSpan(msgspec.Struct, frozen=True, gc=False):
    """One rank's execution of a step, on the host's clock."""

    ring: int
    rank: int
    stage: int
    """Of a pipeline; ranks of one stage work at the same time."""
    start_ns: int
    end_ns: int
    measured_ns: int
    clock: str


class Execution(msgspec.Struct, frozen=True, gc=False):
    """A step as all ranks that told of it executed it."""

    span: StepSpan
    """The first rank's record, for mode and padding."""
    digest: int
    """Of the slices, as the ranks know them; 0 if none does, negative if they differ."""
    ranks: list[RankSpan]
    start_ns: int
    """On the earliest rank."""
    end_ns: int
    """On the latest."""
    longest_ns: int
    """Of the ranks' measured times."""
    sum_ns: int
    """Of the same."""
    wait_ns: int
    """Of its delay, spent waiting for the slowest rank."""
    stages_ns: list[int]
    """Time of the fastest rank of each pipeline stage, in order of stages."""
    is_cold: bool
    """On some rank."""
    is_dummy: bool
    """On all of them."""

    @property
    def delay_ns(self) -> int:
        """Return the time that its requests waited for it, without the wait for a slow rank.

        It spans all stages of a pipeline, so it is what the cost model must learn.
        """
        return self.end_ns - self.start_ns - self.wait_ns

    def is_of(self, digest: int) -> bool:
        """Tell whether these slices may be what the ranks executed."""
        return self.digest in (0, digest)


class SplitStep(msgspec.Struct, frozen=True, gc=False):
    """A step with its time divided: what each rank took, and what its members waited for."""

    shares_ns: Sequence[Ints]
    """For each rank, [rows]."""
    padding_ns: Sequence[int]
    unattributed_ns: Sequence[int]
    residual: float
    fit_id: str
    slots: Ints
    """[requests]."""
    delay: Delay
    model: StepModel | None = None
    """In force when it was divided; None where it was of no request."""
    chunk_ns: Sequence[float] = ()
    """[chunks], their modelled parts, which were scaled to what was measured."""
    weights: BlameWeights | None = None
    """What each request is blamed with; None likewise."""
    grip: HeldResources | None = None
    """What the requests hold that keeps others out."""
    is_provisional: bool = False
    """The model in force was corrected by few steps only."""


class Joined(msgspec.Struct, eq=False, gc=False):
    """A step of known requests, all of whose records are in."""

    run: Execution
    slots: Ints
    """[rows]."""
    is_single: bool
    """Each row is of another request."""
    slices: StepSlices
    binding: str
    """What the scheduler says is scarce."""
    block_tokens: int
    """Tokens in a KV block, 0 where the engine does not say."""
    dp_rank: int
    planned_ns: int
    """When its members were chosen."""
    split: SplitStep | None = None
    """None until the steps of its window are split; likewise its prefill time, by rank."""
    prefill_ns: list[int] = []


def rank_span(
    span: StepSpan, clock: DeviceClock, *, ring: int, rank: int, stage: int = 0
) -> RankSpan:
    """Place a span on the host's clock: by the device's where it timed the step.

    The device cannot have begun before the launch, nor ended after its outputs were found ready:
    this bounds whatever error the anchors have.
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
    return RankSpan(ring, rank, stage, launched_ns, ready_ns, ready_ns - launched_ns, "host")


def execution(told: list[tuple[RankSpan, StepSpan]]) -> Execution:
    """Put together what each rank told of a step."""
    if len(told) == 1:
        rank, span = told[0]
        took_ns = rank.measured_ns
        return Execution(
            span,
            span.digest,
            [rank],
            rank.start_ns,
            rank.end_ns,
            took_ns,
            took_ns,
            0,
            [took_ns],
            span.cold,
            span.dummy,
        )
    told.sort(key=lambda of_rank: (of_rank[0].rank, of_rank[0].ring))
    ranks, spans = [rank for rank, _ in told], [span for _, span in told]
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

    What a step takes beyond their sum, it waits for a slower rank.
    """
    fastest: dict[int, int] = {}
    for rank in ranks:
        fastest[rank.stage] = min(rank.measured_ns, fastest.get(rank.stage, rank.measured_ns))
    return [fastest[stage] for stage in sorted(fastest)]


def pair_shares(split: SplitStep, table: StepTable, step: int) -> dict[int, float]:
    """Return how much of each chunk's modelled cost goes by pairs of query and key, by member."""
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
