"""Observation of one request through the fold: its steps, their requests, the scheduler's plans.

This is the second of two passes. An observer is a sink of the fold and also takes its records. It
keeps a few numbers per step and never the step itself: a request may take 100,000 steps.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from inferscope.attribution import BlameShare, PromptPart
from inferscope.cost import residual_of
from inferscope.fold import (
    Collector,
    EngineFold,
    FinalRequest,
    FinalStep,
    RequestRow,
    alive_row,
    finished_row,
)
from inferscope.insight.facts import (
    Facts,
    LongestGap,
    OddStep,
    Preemption,
    RankSteps,
    Waiting,
)
from inferscope.insight.overlaps import RequestOverlaps, SharedSteps, StepsWhileQueued
from inferscope.readers import RequestRef, RingKey, key_of
from inferscope.records import (
    EngineInfo,
    Missed,
    Record,
    RequestEvent,
    RingOpened,
    StepPlan,
)

_HEALTHY = 0.2
"""Quantile of measured over modelled time that counts as healthy, as in the ledger."""


class RequestObserver:
    """Sink that collects one request's facts up to its end; later records do not change them."""

    def __init__(self, ref: RequestRef, names: Mapping[str, str]) -> None:
        """Start to observe a request.

        Args:
            ref: reference from the index.
            names: display names of the engine's requests by internal ID.
        """
        self._ref = ref
        self._names = names
        self._rings: dict[int, RingKey] = {}
        self._model = ""
        self._num_lost = 0
        self._offset_ns: int | None = None
        self._dp_rank = 0
        self._final: FinalRequest | None = None
        self._kv_shares: dict[int, float | None] = {}
        """KV usage at each preemption, by its time."""
        self._bindings = Counter[str]()
        self._plans = np.zeros(2)
        self._last_plan: StepPlan | None = None
        self._ahead = StepsWhileQueued()
        self._together = SharedSteps()
        self._mixed: list[tuple[int, int, tuple[tuple[str, int], ...]]] = []
        """Decode steps shared with prefills: start, end, and (request, tokens) of each prefill."""
        self._num_left_out = 0
        self._num_since = 0
        """Steps without the request since its last one; left out if it is in a later step."""
        self._by_fit: dict[str, list[OddStep]] = {}
        """Its own warm steps, by the cost model in force."""
        self._cold: list[OddStep] = []
        self._last_step: tuple[int, int] | None = None
        self._ranks: dict[int, RankSteps] = {}

    @property
    def is_complete(self) -> bool:
        """Return whether all facts are known."""
        return self._final is not None

    @property
    def final(self) -> FinalRequest | None:
        """Return the final request; None before it is final."""
        return self._final

    # --- records --------------------------------------------------------------------------------

    def on_record(self, ring: int, record: Record) -> None:
        """Take a record of the fold."""
        kind = type(record)
        if isinstance(record, RingOpened):
            if record.engine_id == self._ref.engine_id:
                self._rings[record.ring] = key_of(record)
                self._offset_ns = record.start_real_ns - record.start_ns
            return
        if isinstance(record, Missed):
            if record.ring in self._rings:
                self._num_lost += record.num_frames
            return
        if kind not in _HEARD or self.is_complete or ring not in self._rings:
            return
        index = self._ref.indices.get(self._rings[ring])
        if isinstance(record, EngineInfo):
            self._model = record.served_name or record.model or self._model
            if index is not None and self._rings[ring][0] != "frontend":
                self._dp_rank = record.ranks[2]
        elif index is None:
            return
        elif isinstance(record, StepPlan):
            self._plan(record)
        elif isinstance(record, RequestEvent) and record.index == index:
            self._ref.note(record)

    def _plan(self, plan: StepPlan) -> None:
        ref = self._ref
        until_ns = plan.end_ns if ref.admitted_ns is None else ref.admitted_ns
        if ref.queued_ns is not None and ref.queued_ns <= plan.start_ns <= plan.end_ns <= until_ns:
            self._bindings[plan.binding] += 1
            self._plans += (plan.running, plan.waiting)
        for held_ns, *_ in ref.held:
            if held_ns <= plan.start_ns:  # decided by the plan before: this one shows its effect
                self._kv_shares.setdefault(held_ns, _kv_share(self._last_plan))
        self._last_plan = plan

    # --- what is final --------------------------------------------------------------------------

    def on_request(self, request: FinalRequest) -> None:
        """Take a final request, if it is the observed one."""
        if (
            request.request_id == self._ref.request_id
            and request.engine_id == self._ref.engine_id
            and request.delivered_ns >= self._ref.first_ns
        ):
            self._final = self._final or request

    def on_step(self, step: FinalStep) -> None:
        """Take a final step; the first rank represents all."""
        ref, key = self._ref, (step.dp_rank, step.step)
        if step.engine_id != ref.engine_id or self.is_complete:
            return
        if step.dp_rank == self._dp_rank and ref.request_id in step.request_ids:
            known = self._ranks.get(step.rank, RankSteps(step.rank, 0, 0))
            self._ranks[step.rank] = RankSteps(
                step.rank, known.num_steps + 1, known.busy_ns + step.measured_ns
            )
        if key == self._last_step:
            return
        self._last_step = key
        if step.end_ns <= ref.first_ns or step.dp_rank != self._dp_rank:
            return
        if ref.request_id in step.request_ids:
            self._own_step(step)
            return
        waited_ns = _overlap(step, ref.queued_ns, ref.admitted_ns)
        if waited_ns > 0:
            self._ahead.add(step, waited_ns)
        # A step that was launched ahead may run before and after the admission.
        if ref.admitted_ns is not None and step.end_ns > ref.admitted_ns:
            self._num_since += not any(_overlap(step, *held[:2]) for held in ref.held)

    def _own_step(self, step: FinalStep) -> None:
        """Take a step that contained the request."""
        self._num_left_out += self._num_since
        self._num_since = 0
        duration_ns = step.end_ns - step.start_ns
        prompts = self._together.add(step, self._ref.request_id)
        if prompts:
            self._mixed.append((step.start_ns, step.end_ns, prompts))
        odd = OddStep(step.step, step.start_ns, duration_ns, 1 + step.model_residual, 0)
        kept = self._cold if step.is_cold else self._by_fit.setdefault(step.fit_id, [])
        kept.append(odd)

    # --- the facts ------------------------------------------------------------------------------

    def facts(self, collector: Collector) -> Facts | None:
        """Return the facts; None if the fold does not know the request.

        Args:
            collector: the fold, for a request that is not final yet.
        """
        final = self._final
        row = finished_row(final) if final is not None else self._alive(collector)
        if row is None:
            return None
        engine = collector.engines[self._ref.engine_id]
        arrived_at = delivered_at = "engine"
        if final is not None:
            arrived_at, delivered_at = final.arrived_at, final.delivered_at
        start_ns = row.arrived_ns

        slow, ratios = self._slow_steps()

        def into_life(step: OddStep) -> OddStep:
            return replace(step, into_life_ns=step.into_life_ns - start_ns)

        return Facts(
            row=row,
            engine_id=self._ref.engine_id,
            model=self._model,
            arrived_real_ns=start_ns + (self._offset_ns or 0),
            is_over=final is not None,
            arrived_at=arrived_at,
            delivered_at=delivered_at,
            clock=final.clock if final is not None else engine.lives.clock,
            fit_ids=tuple(self._by_fit),
            residual=residual_of(ratio - 1 for ratio in ratios),
            num_modelled=len(ratios),
            num_lost=self._num_lost,
            waiting=self._waiting(row),
            prefill=self._together.computing(self._names, is_prefill=True),
            decode=self._together.computing(self._names, is_prefill=False),
            preemptions=tuple(
                Preemption(
                    into_life_ns=since_ns - start_ns,
                    held_ns=None if until_ns is None else until_ns - since_ns,
                    reason=reason,
                    kv_share=self._kv_shares.get(since_ns),
                )
                for since_ns, until_ns, reason in self._ref.held
            ),
            num_left_out=self._num_left_out + (self._num_since if final is None else 0),
            cold=tuple(into_life(odd) for odd in self._cold),
            slowest=into_life(max(slow, key=_excess_ns)) if slow else None,
            num_slow=len(slow),
            longest_gap=self._longest_gap(*self._tokens(engine), start_ns),
            parts=self._parts(engine),
            blame=self._blame(engine),
            saved_ns=final.saved.ns if final is not None else None,
            cache=final.cache if final is not None else None,
            rejected_tokens=final.rejected.tokens if final is not None else 0,
            rejected_ns=final.rejected.ns if final is not None else 0,
            ranks=self._busiest_ranks(),
            is_synthetic=engine.is_synthetic,
            is_counted=engine.lives.rates is not None,
        )

    def _busiest_ranks(self) -> tuple[RankSteps, ...]:
        ranks = sorted(self._ranks.values(), key=lambda each: (-each.busy_ns, each.rank))
        return tuple(ranks) if len(ranks) > 1 else ()

    def _alive(self, collector: Collector) -> RequestRow | None:
        engine = collector.engines.get(self._ref.engine_id)
        if engine is None:
            return None
        request = engine.lives.table.by_id.get(self._ref.request_id)
        return None if request is None else alive_row(engine, request)

    def _blame(self, engine: EngineFold) -> tuple[BlameShare, ...]:
        lives = engine.lives
        if self._final is not None:
            culprits = self._final.blame
        else:
            request = lives.table.by_id[self._ref.request_id]
            unfolded = engine.unfolded
            culprits = lives.blame_of(request, engine.now_ns, unfolded=unfolded)
        return tuple(
            one._replace(request_id=self._names.get(one.request_id or "", one.request_id))
            for one in culprits
        )

    def _tokens(self, engine: EngineFold) -> tuple[array[int], tuple[int, ...]]:
        """Return the times of its tokens, and the number at each."""
        if self._final is not None:
            return self._final.token_times_ns, self._final.tokens_per_event
        table = engine.lives.table
        slot = table.by_id[self._ref.request_id].slot
        return table.tokens.events_of(slot)

    def _parts(self, engine: EngineFold) -> tuple[PromptPart, ...]:
        if self._final is not None:
            return self._final.parts
        return engine.lives.parts_of(engine.lives.table.by_id[self._ref.request_id])

    def _waiting(self, row: RequestRow) -> Waiting | None:
        ref = self._ref
        if ref.queued_ns is None:
            return None
        num_plans = self._bindings.total() if self._bindings else 0
        running, waiting = (self._plans / max(num_plans, 1)).tolist()
        until_ns = ref.admitted_ns
        return Waiting(
            since_ns=ref.queued_ns,
            until_ns=row.arrived_ns + row.age_ns if until_ns is None else until_ns,
            num_running=running,
            num_waiting=waiting,
            bindings={binding: num / num_plans for binding, num in self._bindings.most_common()},
            prefill_ns=self._ahead.prefill_ns,
            decode_ns=self._ahead.decode_ns,
            behind=self._ahead.ranked(self._names),
        )

    def _slow_steps(self) -> tuple[list[OddStep], list[float]]:
        """Return its steps slower than healthy ones, and all ratios to the model."""
        slow: list[OddStep] = []
        ratios: list[float] = []
        for steps in self._by_fit.values():
            of_fit = [step.ratio for step in steps]
            healthy = float(np.quantile(of_fit, _HEALTHY))
            slow += [
                replace(step, healthy_ns=round(step.duration_ns * healthy / step.ratio))
                for step in steps
                if step.ratio > healthy
            ]
            ratios += of_fit
        return slow, ratios

    def _longest_gap(
        self, times_ns: array[int], num_tokens: tuple[int, ...], start_ns: int
    ) -> LongestGap | None:
        if len(times_ns) < 2:
            return None
        gaps_ns = np.diff(np.frombuffer(times_ns, dtype=np.int64))
        at = int(np.argmax(gaps_ns))
        since_ns, until_ns = times_ns[at], times_ns[at + 1]
        prefills = RequestOverlaps()
        for step_start_ns, step_end_ns, prompts in self._mixed:
            overlap_ns = min(step_end_ns, until_ns) - max(step_start_ns, since_ns)
            if overlap_ns > 0:
                for name, num in prompts:
                    prefills.add(name, overlap_ns, num, 0)
        held = any(
            held_ns < until_ns and (resumed_ns is None or resumed_ns > since_ns)
            for held_ns, resumed_ns, _ in self._ref.held
        )
        return LongestGap(
            gap_ns=until_ns - since_ns,
            before_token=1 + sum(num_tokens[: at + 1]),
            into_life_ns=since_ns - start_ns,
            prefills=prefills.ranked(self._names),
            was_preempted=held,
        )


_HEARD = (EngineInfo, StepPlan, RequestEvent)


def _overlap(step: FinalStep, since_ns: int | None, until_ns: int | None) -> int:
    if since_ns is None:
        return 0
    end_ns = step.end_ns if until_ns is None else min(step.end_ns, until_ns)
    return max(0, end_ns - max(step.start_ns, since_ns))


def _excess_ns(step: OddStep) -> int:
    return step.duration_ns - step.healthy_ns


def _kv_share(plan: StepPlan | None) -> float | None:
    return plan.blocks_used / plan.blocks_total if plan and plan.blocks_total else None
