"""One engine's fold: its rings' records in, final steps and requests out.

Steps are joined and split as soon as all their records are in. Everything that touches a request's
ledger waits on the timeline until no step that began before it is still open to change; then the
sweep runs over it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.ledger import ARRIVING, HELD, RUNNING, WAITING
from inferscope.collector.clocks import DeviceClock
from inferscope.collector.finals import DeviceTime, FinalStep, Sink
from inferscope.collector.lives import Lives
from inferscope.collector.requests import Request, SlotMap
from inferscope.collector.steps import (
    PendingStep,
    RankSpan,
    Rows,
    SplitStep,
    rank_span,
    split_step,
)
from inferscope.collector.timeline import Timeline
from inferscope.cost.book import CostBook
from inferscope.cost.shape import slice_flops
from inferscope.records import (
    ADMITTED,
    CLOSED,
    COLUMNS,
    FINISHED,
    LAST_BYTE,
    OFF,
    PREEMPTED,
    QUEUED,
    RESUMED,
    Clock,
    Emitted,
    EngineInfo,
    Keyframe,
    Live,
    ProbeHealth,
    Record,
    RequestEvent,
    RingOpened,
    StepPlan,
    StepSlices,
    StepSpan,
)

Ints = NDArray[np.int64]

SILENT_NS = 5_000_000_000
"""A ring with requests in flight and no record for this long has lost its process."""
GONE_NS = 15_000_000_000
"""A ring restates itself every 10 s, idle or not."""
MAX_PENDING_STEPS = 256


class RingState:
    """What the fold knows of one ring."""

    def __init__(self, opened: RingOpened) -> None:
        self.opened = opened
        self.slots = SlotMap()
        self.clock = DeviceClock()
        self.last_ns = opened.t_ns
        self.health: ProbeHealth | None = None
        self.cost_ns = 0
        self.has_spans = False
        self.has_lost_frames = False
        self.is_lost = False
        self.rows: tuple[int, Rows] | None = None
        """Of its last step; valid while `slots.num_dropped` is the number."""

    @property
    def is_front_end(self) -> bool:
        """Tell whether it is a front end's, whose times are those the client sees."""
        return self.opened.role == "frontend"

    @property
    def is_closed(self) -> bool:
        """Tell whether its process has said goodbye."""
        return self.health is not None and self.health.state == CLOSED

    def is_gone(self, now_ns: int) -> bool:
        """Tell whether its process has said goodbye, or nothing for too long."""
        return self.is_closed or now_ns - self.last_ns > GONE_NS


class EngineFold:
    """The state of one engine.

    Attributes:
        lives: its requests, and the metrics over them.
        rings: by number.
        info: what the engine says of itself, None before it has.
        book: the cost models in force.
        device_ns: time of final steps by where it went.
    """

    def __init__(self, engine_id: str, sinks: list[Sink], mix: Callable[[bytes], None]) -> None:
        """Start empty.

        Args:
            engine_id: whose rings come here.
            sinks: receive final steps and requests.
            mix: takes bytes into the fold's digest.
        """
        self.engine_id = engine_id
        self._sinks = sinks
        self._mix = mix
        self.lives = Lives(engine_id, sinks, mix)
        self.rings: dict[int, RingState] = {}
        self.info: EngineInfo | None = None
        self.book = CostBook()
        self.last_plan: StepPlan | None = None
        self.device_ns = dict.fromkeys(("prefill", "decode", "padding", "unattributed"), 0)
        self.first_ns: int | None = None
        self.now_ns = 0
        self.num_unjoined = 0
        self.num_dropped_requests = 0
        self._pending: dict[int, PendingStep] = {}
        self._timeline = Timeline()

    # --- the fold -----------------------------------------------------------------------------

    def open_ring(self, opened: RingOpened) -> None:
        """Add a ring of this engine."""
        ring = self.rings[opened.ring] = RingState(opened)
        self.lives.num_front_ends += ring.is_front_end

    def fold(self, number: int, record: Record) -> None:
        """Take one record of one of this engine's rings."""
        ring = self.rings[number]
        ring.last_ns = self.now_ns = max(self.now_ns, record.t_ns)
        ring.is_lost = False
        if self.first_ns is None:
            self.first_ns = record.t_ns
            self.lives.table.ledger.pass_idle(record.t_ns)
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, ring, record)
            if isinstance(record, _SWEEPING):
                self._sweep()

    def tick(self, now_ns: int) -> None:
        """Move the fold's clock: decide on processes that went silent."""
        self.now_ns = max(self.now_ns, now_ns)
        for ring in self.rings.values():
            is_silent = ring.is_closed or now_ns - ring.last_ns > SILENT_NS
            if is_silent and not ring.is_lost and ring.slots.known():
                self._lose(ring)
        self._sweep()
        through_ns = min(now_ns, self._through())
        self.lives.table.ledger.close_steps(through_ns)
        self.lives.count_idle(through_ns)
        self.lives.windows.advance(now_ns)

    def missed(self, number: int) -> None:
        """Note that frames of a ring were lost: its requests' ledgers have holes."""
        ring = self.rings[number]
        ring.has_lost_frames = True
        for request in self._requests_of(ring):
            request.joined_late = True
        self._pending.clear()

    @property
    def has_steps(self) -> bool:
        """Tell whether a device was seen working."""
        return any(ring.has_spans for ring in self.rings.values())

    def device_time(self) -> DeviceTime:
        """Return where the device's wall time went since the fold began."""
        ledger = self.lives.table.ledger
        spent = dict(self.device_ns)
        spent["idle_no_work"] = ledger.idle_no_work_ns
        spent["idle_host_gap"] = ledger.idle_host_gap_ns
        until_ns = ledger.explained_ns
        wall_ns = 0 if self.first_ns is None or until_ns is None else until_ns - self.first_ns
        name = self.info.device_uuid or self.info.device if self.info else ""
        return DeviceTime(self.engine_id, name or "unknown", wall_ns, spent)

    def _through(self) -> int:
        """Return up to when nothing can change any more: the start of the oldest open step."""
        if not self._pending:
            return self.now_ns + 1
        return min([step.start_ns for step in self._pending.values()])

    def _sweep(self) -> None:
        through_ns = self._through()
        if self._timeline.is_due(through_ns):
            self._timeline.sweep(through_ns, arrive=self.lives.table.ledger.close_steps)

    # --- rings --------------------------------------------------------------------------------

    def _on_info(self, ring: RingState, info: EngineInfo) -> None:
        if ring.is_front_end and self.info is not None:
            return
        if self.info is None or info.shape != self.info.shape:
            self.book.describe(info)
            self.lives.has_shape = info.shape is not None
        self.info = info

    def _on_keyframe(self, ring: RingState, keyframe: Keyframe) -> None:
        if keyframe.state == OFF:
            self._pending.clear()

    def _on_clock(self, ring: RingState, clock: Clock) -> None:
        if clock.device_ns is not None:
            host_ns = clock.t_ns if clock.host_ns is None else clock.host_ns
            ring.clock.anchor(clock.device_ns, host_ns, clock.error_ns or 0)

    def _on_health(self, ring: RingState, health: ProbeHealth) -> None:
        spent_ns = health.cost_ns - ring.cost_ns
        ring.cost_ns = health.cost_ns
        ring.health = health
        if spent_ns > 0:
            self.lives.windows.add(health.t_ns, "probe_ns", spent_ns)

    def _on_live(self, ring: RingState, live: Live) -> None:
        """Take in requests that were under way before the records that we have."""
        indices = np.frombuffer(live.requests, dtype=COLUMNS["requests"]).tolist()
        arrived = np.frombuffer(live.arrived_ns, dtype=COLUMNS["arrived_ns"]).tolist()
        prompts = np.frombuffer(live.prompt_tokens, dtype=COLUMNS["prompt_tokens"]).tolist()
        table = self.lives.table
        for at, index in enumerate(indices):
            if ring.slots.get(index):
                continue
            request = table.by_id.get(live.request_ids[at])
            if request is None:
                state = ARRIVING if ring.is_front_end else _LIVE_STATES[min(live.states[at], 2)]
                request = table.add(
                    live.request_ids[at], arrived[at], is_front_end=ring.is_front_end, state=state
                )
                table.ledger.mark_ns[request.slot] = live.t_ns
                request.joined_late = True
                request.prompt_tokens = prompts[at]
            request.bind(ring.slots, index)
        if ring.has_lost_frames:
            # What ended in the gap will not be told again.
            ring.has_lost_frames = False
            still_there = set(indices)
            for index in ring.slots.known():
                gone = table.by_slot[ring.slots.get(index)]
                if index not in still_there and gone is not None and gone.finished_ns is None:
                    self.num_dropped_requests += 1
                    table.remove(gone)

    def _requests_of(self, ring: RingState) -> list[Request]:
        by_slot = self.lives.table.by_slot
        found = (by_slot[ring.slots.get(index)] for index in ring.slots.known())
        return [request for request in found if request is not None]

    def _lose(self, ring: RingState) -> None:
        """End what was in flight in a process that is gone."""
        ring.is_lost = True
        for request in self._requests_of(ring):
            self._timeline.push(ring.last_ns, self.lives.lost, request, ring.last_ns)
        if not ring.is_front_end:
            self._pending.clear()

    # --- requests -----------------------------------------------------------------------------

    def _on_event(self, ring: RingState, event: RequestEvent) -> None:
        if event.request_id:
            request: Request | None = self._enter(ring, event)
        else:
            request = self.lives.table.by_slot[ring.slots.get(event.index)]
        if request is None:
            return
        if event.external_id is not None:
            request.external_id = event.external_id
        if event.prompt_tokens is not None:
            request.prompt_tokens = event.prompt_tokens
        if event.attributes:
            request.attributes |= event.attributes
        request.trace = event.trace or request.trace
        action = _TRANSITIONS.get(event.kind)
        if action is not None:
            self._timeline.push(event.at_ns, action, self.lives, request, event, ring.is_front_end)

    def _enter(self, ring: RingState, event: RequestEvent) -> Request:
        """Find the request an event names, by the engine's own id, or add it."""
        table = self.lives.table
        request = table.by_id.get(event.request_id)
        if request is None:
            request = table.add(
                event.request_id, event.at_ns, is_front_end=ring.is_front_end, state=ARRIVING
            )
        elif ring.is_front_end and request.arrived_at == "engine":
            # The front end's word comes late: its time is the true one.
            slot = request.slot
            request.arrived_ns = min(event.at_ns, request.arrived_ns)
            request.arrived_at = "http"
            table.has_front_end[slot] = True
            if table.ledger.state[slot] == ARRIVING:
                table.ledger.mark_ns[slot] = request.arrived_ns
            else:
                request.joined_late = True
        request.bind(ring.slots, event.index)
        return request

    def _on_emitted(self, ring: RingState, emitted: Emitted) -> None:
        num = len(emitted.requests) // 4
        counts: NDArray[np.uint32] | None = None
        if emitted.tokens != _ONE * num:
            counts = np.frombuffer(emitted.tokens, dtype=COLUMNS["tokens"])
            if len(counts) != num:
                self.num_unjoined += 1
                return
        slots = self._team_of(ring, emitted.requests)
        if slots is None:
            slots = ring.slots.slots(np.frombuffer(emitted.requests, dtype=COLUMNS["requests"]))
            known = slots > 0
            slots = slots[known]
            counts = None if counts is None else counts[known]
        lives = self.lives
        action = lives.edge_emitted if ring.is_front_end else lives.core_emitted
        self._timeline.push(emitted.t_ns, action, slots, counts, emitted.t_ns)

    def _team_of(self, ring: RingState, requests: bytes) -> Ints | None:
        """Return the slots of the ring's last step, if it was made up of just these requests."""
        if ring.rows is not None and ring.rows[0] == ring.slots.num_dropped:
            rows = ring.rows[1]
            if rows.requests == requests and rows.member_of_row is None:
                return rows.slots
        return None

    # --- steps --------------------------------------------------------------------------------

    def _on_plan(self, ring: RingState, plan: StepPlan) -> None:
        pending = self._pending_step(plan.step, plan.start_ns)
        pending.start_ns = min(pending.start_ns, plan.start_ns)
        self.last_plan = plan
        gauges = self.lives.windows.at(plan.t_ns).gauges
        gauges["running"] = plan.running
        gauges["waiting"] = plan.waiting
        gauges["blocks_used"] = plan.blocks_used
        gauges["blocks_total"] = plan.blocks_total

    def _on_slices(self, ring: RingState, slices: StepSlices) -> None:
        pending = self._pending_step(slices.step, slices.t_ns)
        pending.slices = slices
        pending.ring = ring.opened.ring
        self._join(pending)

    def _on_span(self, ring: RingState, span: StepSpan) -> None:
        ring.has_spans = True
        pending = self._pending_step(span.step, span.launch_start_ns)
        pending.spans[ring.opened.ring] = span
        pending.start_ns = min(pending.start_ns, span.launch_start_ns)
        self._join(pending)

    def _pending_step(self, step: int, start_ns: int) -> PendingStep:
        pending = self._pending.get(step)
        if pending is None:
            pending = self._pending[step] = PendingStep(step, start_ns)
            if len(self._pending) > MAX_PENDING_STEPS:
                del self._pending[next(iter(self._pending))]
                self.num_unjoined += 1
        return pending

    def _join(self, pending: PendingStep) -> None:
        """Split the step if all its records are in."""
        spans, slices = pending.spans, pending.slices
        if not spans or any(
            ring.has_spans and number not in spans for number, ring in self.rings.items()
        ):
            return
        span = next(iter(spans.values()))
        if slices is None and not span.dummy:
            return
        del self._pending[pending.step]
        executed = [
            rank_span(one, self.rings[number].opened.rank, self.rings[number].clock)
            for number, one in spans.items()
        ]
        self.lives.clock = executed[0].clock
        if slices is None:
            self._count_dummy(executed)
            return
        if any(one.digest not in (0, slices.digest) for one in spans.values()):
            self.num_unjoined += 1
            return
        ring = self.rings[pending.ring]
        try:
            rows = self._rows_of(ring, slices)
            contexts = rows.contexts(slices)
        except ValueError:
            self.num_unjoined += 1
            return
        if not len(rows.slots):
            self._count_dummy(executed)
            return
        split = split_step(self.book, rows, contexts, executed, span)
        self._book(rows, contexts, split, executed)
        start_ns = min(run.start_ns for run in executed)
        end_ns = max(run.end_ns for run in executed)
        self._timeline.push(start_ns, self.lives.open_step, start_ns, end_ns, split, span.cold)
        if self._sinks:
            self._hand_on(rows, contexts, split, executed, span)

    def _rows_of(self, ring: RingState, slices: StepSlices) -> Rows:
        """Read a step's rows, or take the last step's, where only contexts have changed."""
        valid = ring.slots.num_dropped
        if ring.rows is not None and ring.rows[0] == valid and ring.rows[1].fits(slices):
            return ring.rows[1]
        rows = Rows(slices, lambda indices: self._slots_of(ring, indices, slices.t_ns))
        ring.rows = (valid, rows)
        return rows

    def _slots_of(self, ring: RingState, indices: NDArray[np.uint32], t_ns: int) -> Ints:
        """Return the slots of a step's rows, adding requests that were never introduced."""
        slots = ring.slots.slots(indices)
        for at in np.flatnonzero(slots == 0).tolist():
            index = int(indices[at])
            slot = ring.slots.get(index)
            if not slot:
                name = f"{ring.opened.role}-{ring.opened.rank}#{index}"
                request = self.lives.table.add(name, t_ns, is_front_end=False, state=RUNNING)
                request.joined_late = True
                request.bind(ring.slots, index)
                slot = request.slot
            slots[at] = slot
        return slots

    def _book(self, rows: Rows, contexts: Ints, split: SplitStep, executed: list[RankSpan]) -> None:
        """Add a split step to its requests, the windows and the digest."""
        table, slots, prefills = self.lives.table, rows.slots, rows.prefill_rows
        is_once = rows.member_of_row is None
        cells = 2 * slots + 1
        if prefills is not None:
            cells -= prefills
        for shares_ns in split.shares_ns:
            _add(table.compute_ns, cells, shares_ns, is_once=is_once)
            self._mix(slots.tobytes() + shares_ns.tobytes())
        if self.info is not None and self.info.shape is not None:
            flops = slice_flops(self.info.shape, rows.tokens, contexts, rows.sampled)
            _add(table.flops, cells, flops, is_once=is_once)
        table.in_prefill[split.slots] = False if split.is_prefill is None else split.is_prefill
        if len(split.slots) > 1:
            table.is_shared[split.slots] = True
        self.lives.fit_id = split.fit_id

        num_prefill = prefill_ns = prefill_tokens = 0
        if prefills is not None:
            num_prefill = int(prefills.sum())
            prefill_ns = sum(int(shares[prefills].sum()) for shares in split.shares_ns)
            prefill_tokens = int(rows.tokens[prefills].sum())
        padding_ns, unattributed_ns = sum(split.padding_ns), sum(split.unattributed_ns)
        measured_ns = sum(run.measured_ns for run in executed)
        decode_ns = measured_ns - prefill_ns - padding_ns - unattributed_ns
        bucket = self.lives.windows.at(max(run.end_ns for run in executed))
        amounts, device_ns = bucket.amounts, self.device_ns
        amounts["prefill_tokens"] += prefill_tokens
        amounts["decode_tokens"] += rows.team.num_tokens - prefill_tokens
        amounts["prefill_ns"] += prefill_ns
        amounts["decode_ns"] += decode_ns
        amounts["padding_ns"] += padding_ns
        amounts["unattributed_ns"] += unattributed_ns
        amounts["steps"] += 1
        amounts["mixed_steps"] += 0 < num_prefill < len(slots)
        device_ns["prefill"] += prefill_ns
        device_ns["decode"] += decode_ns
        device_ns["padding"] += padding_ns
        device_ns["unattributed"] += unattributed_ns
        bucket.durations["step"].add(executed[0].measured_ns, 1)

    def _hand_on(
        self, rows: Rows, contexts: Ints, split: SplitStep, executed: list[RankSpan], span: StepSpan
    ) -> None:
        """Give the sinks a step, once for each rank."""
        by_slot = self.lives.table.by_slot
        requests = (by_slot[slot] for slot in rows.slots.tolist())
        ids = tuple("?" if request is None else request.request_id for request in requests)
        for at, run in enumerate(executed):
            final = FinalStep(
                engine_id=self.engine_id,
                dp_rank=self.info.ranks[2] if self.info else 0,
                rank=run.rank,
                step=span.step,
                start_ns=run.start_ns,
                end_ns=run.end_ns,
                measured_ns=run.measured_ns,
                clock=run.clock,
                mode=span.mode,
                is_cold=span.cold,
                fit_id=split.fit_id,
                request_ids=ids,
                phases=rows.phases,
                tokens=rows.tokens,
                contexts=contexts,
                flags=rows.flags,
                shares_ns=split.shares_ns[at],
                padding_ns=split.padding_ns[at],
                unattributed_ns=split.unattributed_ns[at],
                model_residual=split.residual,
            )
            for sink in self._sinks:
                sink.step(final)

    def _count_dummy(self, executed: list[RankSpan]) -> None:
        """Count a step that worked for no request."""
        for run in executed:
            self.device_ns["unattributed"] += run.measured_ns
            amounts = self.lives.windows.at(run.end_ns).amounts
            amounts["unattributed_ns"] += run.measured_ns
            amounts["steps"] += 1


def _add(table: Ints, cells: Ints, amounts: Ints, *, is_once: bool) -> None:
    """Add amounts to cells of a [slots, phases] table; a cell may be named more than once."""
    flat = table.reshape(-1)
    if is_once:
        flat[cells] += amounts
    else:
        np.add.at(flat, cells, amounts)


_ONE = b"\1\0\0\0"
"""One token, as a column has it."""
_SWEEPING = (Emitted, ProbeHealth)
"""Records after which the timeline is swept; with the Ticks, often enough and once a step."""
_LIVE_STATES = (WAITING, RUNNING, HELD)
_HANDLERS: dict[type[Record], Callable[[EngineFold, RingState, Any], None]] = {
    EngineInfo: EngineFold._on_info,
    Keyframe: EngineFold._on_keyframe,
    Clock: EngineFold._on_clock,
    ProbeHealth: EngineFold._on_health,
    Live: EngineFold._on_live,
    StepPlan: EngineFold._on_plan,
    StepSlices: EngineFold._on_slices,
    StepSpan: EngineFold._on_span,
    Emitted: EngineFold._on_emitted,
    RequestEvent: EngineFold._on_event,
}
_TRANSITIONS: dict[int, Callable[[Lives, Request, RequestEvent, bool], None]] = {
    QUEUED: Lives.queued,
    ADMITTED: Lives.admitted,
    PREEMPTED: Lives.preempted,
    RESUMED: Lives.resumed,
    LAST_BYTE: Lives.last_byte,
    FINISHED: Lives.finished_in_engine,
}
