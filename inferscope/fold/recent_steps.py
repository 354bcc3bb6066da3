"""Recent steps of an engine with their slices, for a screen that draws them.

    begun step ─► RecentSteps ─► StepView, at the first snapshot that includes it

A reader without such a screen keeps none, see `Retention.steps`. A view is made once and shared by
all snapshots that hold the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.fold.snapshots import RankSplit, StepView
from inferscope.fold.steps import Execution, Joined
from inferscope.records import COLUMNS, DRAFT, PHASES, PREFILL, StepPlan

Ints = NDArray[np.int64]

MOST_ROWS = 131_072
"""Most slices of the kept steps together, about 15 MB with their views."""
_MOST_PLANS = 512
_NO_WORK = (0,) * 6


class _Kept(msgspec.Struct, gc=False):
    """Step, with what its view needs."""

    dp_rank: int
    run: Execution
    host_gap_ns: int
    ids: tuple[str, ...]
    phases: bytes
    tokens: bytes
    contexts: bytes
    shares_ns: tuple[Ints, ...]
    ranks: tuple[RankSplit, ...]
    work: Sequence[int] | None
    """FLOPs, bytes read and bytes written, prefill and decode of each; None if not counted."""
    residual: float | None
    binding: str
    plan: StepPlan | None
    blocks_added: int | None
    view: StepView | None = None


class RecentSteps:
    """Last steps of one engine, in the order of their starts."""

    def __init__(self, most: int) -> None:
        """Keep at most this number of steps."""
        self._most = most
        self._steps: deque[_Kept] = deque()
        self._num_rows = 0
        self._plans: dict[tuple[int, int], StepPlan] = {}
        """Plans of steps that have not begun, by data-parallel rank and step."""
        self._blocks_used: dict[int, int] = {}
        """Blocks in use at the last step, by data-parallel rank."""

    def plan(self, dp_rank: int, plan: StepPlan) -> None:
        """Keep a plan until its step begins."""
        self._plans[dp_rank, plan.step] = plan
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]

    def begin(self, step: Joined, *, host_gap_ns: int, num_ranks: int) -> None:
        """Add a split step; the oldest ones leave.

        Args:
            step: step that begins after all others.
            host_gap_ns: host gap before it.
            num_ranks: number of ranks that compute it, each an equal part.
        """
        split, run, dp_rank = step.split, step.run, step.dp_rank
        assert split is not None
        plan = self._plans.pop((dp_rank, run.span.step), None)
        added = None
        if plan is not None:
            before = self._blocks_used.get(dp_rank)
            added = None if before is None else plan.blocks_used - before
            self._blocks_used[dp_rank] = plan.blocks_used
        ranks = []
        for at, rank in enumerate(run.ranks):
            padding_ns, unattributed_ns = split.padding_ns[at], split.unattributed_ns[at]
            prefill_ns = step.prefill_ns[at]
            ranks.append(
                RankSplit(
                    rank.rank,
                    rank.start_ns,
                    rank.end_ns,
                    rank.measured_ns,
                    prefill_ns,
                    rank.measured_ns - prefill_ns - padding_ns - unattributed_ns,
                    padding_ns,
                    unattributed_ns,
                )
            )
        work = step.work
        if work is not None and len(run.ranks) < num_ranks:
            work = [amount * len(run.ranks) // num_ranks for amount in work]
        has_rows = len(step.slots) > 0
        slices = step.slices
        self._steps.append(
            _Kept(
                dp_rank,
                run,
                host_gap_ns,
                step.ids,
                slices.phases,
                slices.tokens,
                slices.contexts,
                tuple(shares_ns.copy() for shares_ns in split.shares_ns) if has_rows else (),
                tuple(ranks),
                work,
                split.residual if has_rows else None,
                step.binding,
                plan,
                added,
            )
        )
        self._num_rows += len(step.ids)
        while len(self._steps) > self._most or self._num_rows > MOST_ROWS:
            if len(self._steps) == 1:
                break
            self._num_rows -= len(self._steps.popleft().ids)

    def views(self) -> tuple[StepView, ...]:
        """Return the kept steps, oldest first."""
        found = []
        for kept in self._steps:
            if kept.view is None:
                kept.view = _view(kept)
            found.append(kept.view)
        return tuple(found)


def _view(kept: _Kept) -> StepView:
    run, plan = kept.run, kept.plan
    num = len(kept.ids)
    phases, tokens, contexts = (
        np.frombuffer(raw or bytes(num * np.dtype(COLUMNS[name]).itemsize), dtype=COLUMNS[name])
        for name, raw in (
            ("phases", kept.phases), ("tokens", kept.tokens), ("contexts", kept.contexts),
        )
    )  # fmt: skip
    is_prefill = phases == PREFILL
    prefill_tokens = int(tokens[is_prefill].sum())
    work = kept.work
    return StepView(
        dp_rank=kept.dp_rank,
        step=run.span.step,
        kind=_kind(kept, int(is_prefill.sum()), num),
        start_ns=run.start_ns,
        end_ns=run.end_ns,
        host_gap_ns=kept.host_gap_ns,
        clock=run.ranks[0].clock,
        mode=run.span.mode,
        is_cold=run.is_cold,
        num_requests=len(set(kept.ids)),
        prefill_tokens=prefill_tokens if num else None,
        decode_tokens=int(tokens[~is_prefill & (phases != DRAFT)].sum()) if num else None,
        ranks=kept.ranks,
        flops=None if work is None else work[4] + work[5],
        read_bytes=None if work is None else work[0] + work[1],
        write_bytes=None if work is None else work[2] + work[3],
        residual=kept.residual,
        binding=kept.binding,
        plan_start_ns=None if plan is None else plan.start_ns,
        plan_end_ns=None if plan is None else min(plan.end_ns, plan.t_ns),
        num_waiting=None if plan is None else plan.waiting,
        num_running=None if plan is None else plan.running,
        num_preempted=0 if plan is None else len(plan.preempted) // 4,
        blocks_used=None if plan is None else plan.blocks_used,
        blocks_total=None if plan is None else plan.blocks_total,
        blocks_added=kept.blocks_added,
        request_ids=kept.ids,
        phases=tuple(_PHASE_NAMES[phase] for phase in phases.tolist()),
        tokens=tuple(tokens.tolist()),
        contexts=tuple(contexts.tolist()),
        shares_ns=tuple(tuple(shares_ns.tolist()) for shares_ns in kept.shares_ns),
    )


def _kind(kept: _Kept, num_prefills: int, num: int) -> str:
    """Return a step's kind; without known requests, by the times of its phases."""
    if kept.run.is_dummy:
        return "dummy"
    if num:
        return ("mixed", "prefill")[num_prefills == num] if num_prefills else "decode"
    first = kept.ranks[0]
    if first.prefill_ns:
        return "mixed" if first.decode_ns else "prefill"
    return "decode" if first.decode_ns else "unknown"


_PHASE_NAMES = (*PHASES, *(str(code) for code in range(len(PHASES), 256)))
