"""One engine's fold: its rings' records in, final steps and requests out.

Steps are joined and split as soon as all their records are in. Everything that touches a request's
ledger waits on the timeline until no step that began before it is still open to change; then the
sweep runs over it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.ledger import ARRIVING, HELD, RUNNING, WAITING
from inferscope.collector.bookings import Bookings
from inferscope.collector.devices import RankTime
from inferscope.collector.finals import DeviceTime, Sink
from inferscope.collector.lives import Lives, Transition
from inferscope.collector.requests import Request
from inferscope.collector.rings import RingState
from inferscope.collector.rows import Rows
from inferscope.collector.steps import (
    PendingStep,
    RankSpan,
    SplitStep,
    rank_span,
    rank_wait_ns,
    split_step,
)
from inferscope.collector.timeline import Timeline
from inferscope.cost.batch import Singles
from inferscope.cost.book import CostBook
from inferscope.cost.shape import flop_rates
from inferscope.records import (
    ADMITTED,
    COLUMNS,
    FAILED,
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

MAX_PENDING_STEPS = 256
_KEPT_JOINED = 512
_MOST_INDEX = 0xFFFFFFFE


class EngineFold:
    """The state of one engine.

    Attributes:
        lives: its requests, and the metrics over them.
        rings: by number.
        info: what the engine says of itself, None before it has.
        book: the cost models in force.
        num_partial: steps that were split without some rank's span.
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
        self.first_ns: int | None = None
        self.now_ns = 0
        self.num_unjoined = 0
        self.num_partial = 0
        self._pending: dict[tuple[int, int], PendingStep] = {}
        """By data-parallel rank and step."""
        self._joined: dict[tuple[int, int], int] = {}
        """When the last ones that were split had ended."""
        self._timeline = Timeline()
        self._bookings = Bookings(engine_id, self.lives, sinks, mix)

    # --- the fold -----------------------------------------------------------------------------

    def open_ring(self, opened: RingOpened) -> None:
        """Add a ring of this engine."""
        ring = self.rings[opened.ring] = RingState(opened)
        self.lives.emissions.num_front_ends += ring.is_front_end

    def fold(self, number: int, record: Record) -> None:
        """Take one record of one of this engine's rings."""
        ring, t_ns = self.rings[number], record.t_ns
        if t_ns > self.now_ns:
            self.now_ns = t_ns
        ring.last_ns = self.now_ns
        ring.is_lost = False
        if self.first_ns is None:
            self.first_ns = self._bookings.first_ns = t_ns
            self.lives.table.ledger.pass_idle(t_ns)
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, ring, record)

    def tick(self, now_ns: int) -> None:
        """Move the fold's clock: decide on processes that went silent."""
        self.now_ns = max(self.now_ns, now_ns)
        newest = {
            ring.slots.teller: ring
            for ring in sorted(self.rings.values(), key=lambda ring: ring.opened.start_ns)
        }
        for ring in self.rings.values():
            heir = newest[ring.slots.teller]
            is_silent = ring.is_silent(now_ns) or heir.opened.start_ns > ring.last_ns
            ring.is_out = is_silent or ring.state in (OFF, FAILED)
            if is_silent and not ring.is_lost and ring.slots.known():
                self._lose(ring)
        for step in list(self._pending.values()):
            self._give_up(step)
        self._sweep()
        through_ns = min(now_ns, self._through())
        self.lives.table.ledger.close_steps(through_ns)
        self.lives.count_idle(through_ns)
        self.lives.windows.advance(now_ns)

    def missed(self, number: int) -> None:
        """Note that frames of a ring were lost: its requests' ledgers have holes."""
        ring = self.rings[number]
        ring.has_lost_frames = True
        self._tell_holes(ring)

    @property
    def has_steps(self) -> bool:
        """Tell whether a device was seen working."""
        return any(ring.has_spans for ring in self.rings.values())

    def device_times(self) -> list[DeviceTime]:
        """Return where each rank's device's wall time went since the fold began."""
        device, first_ns = self.lives.table.ledger.device, self.first_ns or 0
        ranks = self._bookings.ranks or {-1: RankTime(first_ns)}
        until_ns = max(rank.until_ns for rank in ranks.values())
        wall_ns = max(until_ns, device.mark_ns or 0) - first_ns
        times = []
        for number, rank in sorted(ranks.items()):
            info = self.rings[number].info if number in self.rings else self.info
            name = (info.device_uuid or info.device if info else "") or "unknown"
            if len(ranks) > 1:
                name += f"#{self.rings[number].opened.rank}"
            spent = rank.seconds_by_ns(wall_ns, no_work_ns=device.idle_no_work_ns)
            times.append(DeviceTime(self.engine_id, name, wall_ns, spent))
        return times

    def ranks(self) -> tuple[int, int]:
        """Return how many ranks tell of their steps, and how many the engine says there are."""
        sizes = self.info.sizes if self.info is not None else (1, 1, 1, 1)
        seen = sum(ring.has_spans and not ring.is_out for ring in self.rings.values())
        return seen, max(seen, sizes[0] * sizes[1] * sizes[2])

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
        ring.info, ring.dp_rank = info, info.ranks[2]
        if ring.is_front_end and self.info is not None:
            return
        if self.info is None or info.shape != self.info.shape:
            self.book.describe(info)
            self.lives.has_shape = info.shape is not None
            self._bookings.rates = None if info.shape is None else flop_rates(info.shape)
        self.info = info

    def _on_keyframe(self, ring: RingState, keyframe: Keyframe) -> None:
        ring.state = keyframe.state
        ring.listed = set()
        ring.has_lost_frames |= keyframe.state == OFF

    def _on_clock(self, ring: RingState, clock: Clock) -> None:
        if ring.listed is not None:
            self._reconcile(ring, ring.listed, clock.t_ns)
            ring.listed = None
        if clock.device_ns is not None:
            host_ns = clock.t_ns if clock.host_ns is None else clock.host_ns
            if host_ns <= clock.t_ns:
                ring.clock.anchor(clock.device_ns, host_ns, clock.error_ns or 0)

    def _on_health(self, ring: RingState, health: ProbeHealth) -> None:
        spent_ns = health.cost_ns - ring.cost_ns
        ring.cost_ns = health.cost_ns
        ring.health = health
        ring.state = health.state
        if spent_ns > 0:
            self.lives.windows.add(health.t_ns, "probe_ns", spent_ns)
        self._sweep()

    def _on_live(self, ring: RingState, live: Live) -> None:
        """Take in requests that were under way before the records that we have."""
        try:
            indices = np.frombuffer(live.requests, dtype=COLUMNS["requests"]).tolist()
            arrived = np.frombuffer(live.arrived_ns, dtype=COLUMNS["arrived_ns"]).tolist()
            prompts = np.frombuffer(live.prompt_tokens, dtype=COLUMNS["prompt_tokens"]).tolist()
            rows = list(zip(indices, arrived, prompts, live.states, live.request_ids, strict=True))
        except ValueError:
            self.num_unjoined += 1
            return
        table = self.lives.table
        for index, arrived_ns, prompt_tokens, live_state, request_id in rows:
            if ring.listed is not None:
                ring.listed.add(index)
            if ring.slots.get(index) or index > _MOST_INDEX:
                continue
            arrived_ns = min(max(arrived_ns, 0), live.t_ns)
            request = table.by_id.get(request_id)
            if request is None or request.is_told_by(ring.slots.teller):
                state = ARRIVING if ring.is_front_end else _LIVE_STATES[min(live_state, 2)]
                request = table.add(
                    request_id, arrived_ns, is_front_end=ring.is_front_end, state=state
                )
                table.ledger.mark_ns[request.slot] = live.t_ns
                request.joined_late = True
                request.is_first_unknown = state != WAITING
                request.prompt_tokens = prompt_tokens or None
            elif ring.is_front_end and request.arrived_at == "engine":
                self.lives.met_front_end(request, arrived_ns)
            request.bind(ring.slots, index)

    def _reconcile(self, ring: RingState, listed: set[int], at_ns: int) -> None:
        """Let go of requests that a ring knows no more: their end was lost, or never told.

        One keyframe is not enough, for a request leaves the probe's table just before its last
        event is written; it is where frames were lost.
        """
        missing = set(ring.slots.known()) - listed
        gone = missing if ring.has_lost_frames else missing & ring.unlisted
        ring.unlisted = missing
        by_slot = self.lives.table.by_slot
        for index in sorted(gone):
            request = by_slot[ring.slots.get(index)]
            if request is not None:
                self._timeline.push(at_ns, self.lives.out_of_sight, request, ring.slots)
        if ring.state == OFF:
            self._tell_holes(ring)  # what comes from here on is lost as well
        else:
            ring.has_lost_frames = False

    def _tell_holes(self, ring: RingState) -> None:
        """Mark the requests of a ring whose records have a gap."""
        for request in self._requests_of(ring):
            request.joined_late = True
            request.is_first_unknown |= request.first_edge_ns is None

    def _requests_of(self, ring: RingState) -> list[Request]:
        by_slot = self.lives.table.by_slot
        found = (by_slot[ring.slots.get(index)] for index in ring.slots.known())
        return [request for request in found if request is not None]

    def _lose(self, ring: RingState) -> None:
        """End what was in flight in a process that is gone."""
        ring.is_lost = True
        for request in self._requests_of(ring):
            self._timeline.push(self.now_ns, self.lives.lost, request, ring.slots, self.now_ns)

    # --- requests -----------------------------------------------------------------------------

    def _on_event(self, ring: RingState, event: RequestEvent) -> None:
        if not 0 <= event.index <= _MOST_INDEX:
            return
        if not 0 <= event.at_ns <= event.t_ns:
            event = replace(event, at_ns=event.t_ns)
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
            self._timeline.push(event.at_ns, self.lives.change, action, request, event, ring.slots)

    def _enter(self, ring: RingState, event: RequestEvent) -> Request | None:
        """Find the request an event names, by the engine's own id, or add it."""
        table = self.lives.table
        known = ring.slots.get(event.index)
        if known:
            return table.by_slot[known]
        request = table.by_id.get(event.request_id)
        if request is not None and request.is_told_by(ring.slots.teller):
            request = None  # the id is used again while its last owner is not final yet
        elif request is None and self.lives.has_ended(event.request_id, event.at_ns):
            ring.slots.highest = max(ring.slots.highest, event.index)
            return None
        if request is None:
            request = table.add(
                event.request_id, event.at_ns, is_front_end=ring.is_front_end, state=ARRIVING
            )
        elif ring.is_front_end and request.arrived_at == "engine":
            self.lives.met_front_end(request, event.at_ns)
        request.bind(ring.slots, event.index)
        return request

    def _on_emitted(self, ring: RingState, emitted: Emitted) -> None:
        num = len(emitted.requests) // 4
        counts: NDArray[np.uint32] | None = None
        if emitted.tokens != _ONE * num or len(emitted.requests) % 4:
            if len(emitted.tokens) != len(emitted.requests) or len(emitted.requests) % 4:
                self.num_unjoined += 1
                return
            counts = np.frombuffer(emitted.tokens, dtype=COLUMNS["tokens"])
        slots = self._team_of(ring, emitted.requests) if counts is None else None
        if slots is None:
            slots = ring.slots.slots(np.frombuffer(emitted.requests, dtype=COLUMNS["requests"]))
            known = slots > 0
            if counts is not None:
                known &= counts > 0
            slots = slots[known]
            counts = None if counts is None else counts[known]
        emissions = self.lives.emissions
        action = emissions.at_front_end if ring.is_front_end else emissions.in_core
        self._timeline.push(emitted.t_ns, action, slots, counts, emitted.t_ns)
        self._sweep()  # once a step; with the Ticks and the probes' reports, often enough

    def _team_of(self, ring: RingState, requests: bytes) -> Ints | None:
        """Return the slots of the ring's last step, if it was made up of just these requests."""
        if ring.kept_rows.num_dropped == ring.slots.num_dropped:
            return ring.kept_rows.slots_of(requests, is_each_once=True)
        return None

    # --- steps --------------------------------------------------------------------------------

    def _on_plan(self, ring: RingState, plan: StepPlan) -> None:
        self._pending_step(ring, plan.step, plan.start_ns, plan.t_ns)
        self.last_plan = plan
        gauges = self.lives.windows.at(plan.t_ns).gauges
        gauges["running"] = plan.running
        gauges["waiting"] = plan.waiting
        gauges["blocks_used"] = plan.blocks_used
        gauges["blocks_total"] = plan.blocks_total

    def _on_slices(self, ring: RingState, slices: StepSlices) -> None:
        pending = self._pending_step(ring, slices.step, slices.t_ns, slices.t_ns)
        pending.slices = slices
        pending.ring = ring.opened.ring
        if len(self._pending) > 1:
            # A ring tells of steps in their order.
            for other in list(self._pending.values()):
                if other.step < slices.step and other.dp_rank == pending.dp_rank:
                    other.is_unsliced = other.slices is None
                    self._join(other)
        if pending.spans or pending.past:
            self._join(pending)

    def _on_span(self, ring: RingState, span: StepSpan) -> None:
        ring.has_spans, ring.is_out = True, False
        number = ring.opened.ring
        if span.launch_start_ns <= self._joined.get((ring.dp_rank, span.step), -1):
            self.num_unjoined += 1  # the step was split without it
            return
        pending = self._pending_step(ring, span.step, span.launch_start_ns, span.t_ns)
        pending.spans[number] = span
        if len(self._pending) > 1:
            for other in list(self._pending.values()):
                if other.step < span.step and other.dp_rank == pending.dp_rank:
                    other.past.add(number)
                    self._join(other)
        self._join(pending)

    def _pending_step(self, ring: RingState, step: int, start_ns: int, t_ns: int) -> PendingStep:
        key = (ring.dp_rank, step)
        if not 0 <= start_ns <= t_ns:
            start_ns = min(max(start_ns, 0), t_ns)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PendingStep(*key, start_ns)
            if len(self._pending) > MAX_PENDING_STEPS:
                oldest = self._pending.pop(next(iter(self._pending)))
                self.num_unjoined += bool(oldest.spans or oldest.slices)
        elif start_ns < pending.start_ns:
            pending.start_ns = start_ns
        pending.seen_ns = t_ns
        return pending

    def _give_up(self, pending: PendingStep) -> None:
        """Do without the records of a step that will not come any more."""
        rings = [ring for ring in self.rings.values() if ring.dp_rank == pending.dp_rank]
        speakers = [ring for ring in rings if not ring.is_front_end]
        pending.past.update(ring.opened.ring for ring in speakers if ring.is_past(pending.seen_ns))
        cores = [ring for ring in speakers if not ring.is_worker] or speakers
        pending.is_unsliced = all(ring.is_past(pending.seen_ns) for ring in cores)
        self._join(pending)

    def _is_awaited(self, pending: PendingStep) -> bool:
        """Tell whether records of a step are still to come."""
        told, past = pending.spans, pending.past
        if pending.slices is None and not pending.is_unsliced:
            # A dummy step has none. Nobody knows which step is one before its first span.
            return not (told and all(span.dummy for span in told.values()))
        if not told and not past:
            return True
        for number, ring in self.rings.items():
            if (
                number not in told
                and number not in past
                and (ring.has_spans or ring.is_worker)
                and not ring.is_out
                and ring.dp_rank == pending.dp_rank
            ):
                return True
        return False

    def _join(self, pending: PendingStep) -> None:
        """Split the step if all its records are in, or the rest will not come."""
        if self._is_awaited(pending):
            return
        spans, slices = pending.spans, pending.slices
        key = (pending.dp_rank, pending.step)
        del self._pending[key]
        if not spans:
            self.num_unjoined += slices is not None
            return
        executed = [self._executed(number, span) for number, span in spans.items()]
        first = executed[0]
        start_ns, end_ns, wait_ns = first.start_ns, first.end_ns, 0
        if len(executed) > 1:
            executed.sort(key=lambda run: (run.rank, run.ring))
            first = executed[0]
            start_ns = min(run.start_ns for run in executed)
            end_ns = max(run.end_ns for run in executed)
            wait_ns = rank_wait_ns(executed)
        span = spans[first.ring]
        self._joined[key] = end_ns
        if len(self._joined) > _KEPT_JOINED:
            del self._joined[next(iter(self._joined))]
        if pending.past:
            self.num_partial += any(
                self.rings[number].has_spans and number not in spans for number in pending.past
            )
        self.lives.clock = first.clock
        read = None
        if slices is not None and all(s.digest in (0, slices.digest) for s in spans.values()):
            read = self._read(self.rings[pending.ring], slices)
        if read is None or not len(read[0].slots):
            is_empty = read is not None or all(s.dummy for s in spans.values())
            self._book_for_nobody(executed, start_ns, end_ns)
            self.num_unjoined += not is_empty
            if not self._sinks or not is_empty:
                return
            split, (rows, contexts) = _split_among_none(executed), _NOTHING
        else:
            rows, contexts = read
            split = split_step(self.book, rows, contexts, executed, span, wait_ns=wait_ns)
            prefill_ns = self._bookings.book(rows, contexts, split, executed)
            is_cold = any(s.cold for s in spans.values())
            self._timeline.push(
                start_ns,
                self._bookings.begin,
                start_ns,
                end_ns,
                split,
                executed,
                is_cold,
                prefill_ns,
            )
            if wait_ns:
                self._timeline.push(end_ns, self.lives.waited_for_rank, split.slots, wait_ns)
        if self._sinks:
            self._bookings.hand_on(
                rows, contexts, split, executed, span=span, dp_rank=pending.dp_rank
            )

    def _book_for_nobody(self, executed: list[RankSpan], start_ns: int, end_ns: int) -> None:
        """Book a step of no request, or of nobody knows whom."""
        split, nothing = _split_among_none(executed), [0] * len(executed)
        self._timeline.push(
            start_ns, self._bookings.begin, start_ns, end_ns, split, executed, False, nothing
        )
        amounts = self.lives.windows.at(end_ns).amounts
        amounts["unattributed_ns"] += sum(split.unattributed_ns)
        amounts["steps"] += 1

    def _executed(self, number: int, span: StepSpan) -> RankSpan:
        ring = self.rings[number]
        stage = ring.info.ranks[1] if ring.info is not None else 0
        return rank_span(span, ring.clock, ring=number, rank=ring.opened.rank, stage=stage)

    def _read(self, ring: RingState, slices: StepSlices) -> tuple[Rows, Ints] | None:
        """Return a step's rows and their contexts, None if its columns do not fit together."""
        try:
            rows = self._rows_of(ring, slices)
            return rows, rows.contexts(slices)
        except ValueError:
            return None

    def _rows_of(self, ring: RingState, slices: StepSlices) -> Rows:
        """Read a step's rows, or take the last step's, where only contexts have changed."""
        kept = ring.kept_rows
        rows = kept.rows_of(slices, ring.slots.num_dropped)
        if rows is None:
            slots = kept.slots_of(slices.requests)
            if slots is None:
                indices = np.frombuffer(slices.requests, dtype=COLUMNS["requests"])
                slots = self._slots_of(ring, indices, slices.t_ns)
            rows = Rows(slices, slots, kept.singles)
            kept.keep(rows, ring.slots.num_dropped)
        return rows

    def _slots_of(self, ring: RingState, indices: NDArray[np.uint32], t_ns: int) -> Ints:
        """Return the slots of a step's rows, adding requests that were never introduced.

        A request that is final already has none.
        """
        slots = ring.slots.slots(indices)
        if len(slots) and np.minimum.reduce(slots):
            return slots
        for at in np.flatnonzero(slots == 0).tolist():
            index = int(indices[at])
            slot = ring.slots.get(index)
            if not slot and ring.slots.highest < index <= _MOST_INDEX:
                name = f"{ring.opened.role}-{ring.opened.rank}#{index}"
                request = self.lives.table.add(name, t_ns, is_front_end=False, state=RUNNING)
                request.joined_late = request.is_first_unknown = True
                request.bind(ring.slots, index)
                slot = request.slot
            slots[at] = slot
        return slots


def _split_among_none(executed: list[RankSpan]) -> SplitStep:
    """Return the split of a step that worked for no request, or for nobody knows whom."""
    none = _NO_ROWS.tokens
    return SplitStep(
        shares_ns=[none for _ in executed],
        padding_ns=[0 for _ in executed],
        unattributed_ns=[run.measured_ns for run in executed],
        residual=0.0,
        fit_id="",
        slots=none,
        delay=Delay(none, None, [], 0, 0, 0, 0),
    )


_NO_SLICES = StepSlices(0, 0, 0, b"", b"", b"", b"")
_NO_ROWS = Rows(_NO_SLICES, np.zeros(0, dtype=np.int64), Singles())
_NOTHING = (_NO_ROWS, _NO_ROWS.contexts(_NO_SLICES))
_ONE = b"\1\0\0\0"
"""One token, as a column has it."""
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
_TRANSITIONS: dict[int, Transition] = {
    QUEUED: Lives.queued,
    ADMITTED: Lives.admitted,
    PREEMPTED: Lives.preempted,
    RESUMED: Lives.resumed,
    LAST_BYTE: Lives.last_byte,
    FINISHED: Lives.finished_in_engine,
}
