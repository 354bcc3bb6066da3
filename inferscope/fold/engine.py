"""Fold of one engine: its rings' records in, final steps and requests out.

A step is joined and split once all its records are in. Every change to a request's ledger waits on
the timeline until no step that began before it can change. Then changes are applied in the order of
their times, and booked window by window.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.attribution import ARRIVING, HELD, LEAVING, RUNNING, WAITING
from inferscope.clock_skew import SkewedClock
from inferscope.cost import CostBook, rates_of
from inferscope.fold.cache_accounts import CacheFacts
from inferscope.fold.cache_use import RequestName
from inferscope.fold.devices import RankTime, by_name, successions
from inferscope.fold.dropped_rings import DroppedRings
from inferscope.fold.expert_load import ExpertLoads
from inferscope.fold.final_records import DeviceTime, KvTransfer, Sink
from inferscope.fold.joins import Joins
from inferscope.fold.reading import MOST_INDEX
from inferscope.fold.recent_steps import RecentSteps
from inferscope.fold.request_lifecycle import RequestLifecycle, Transition
from inferscope.fold.requests import Request
from inferscope.fold.retention import Retention
from inferscope.fold.rings import (
    RingState,
    has_several_cores,
    is_compute_observed,
    newest_rings,
    paused_since,
    replaced,
    skewed_clocks,
)
from inferscope.fold.samplers import SamplerFold
from inferscope.fold.step_booking import StepBooker
from inferscope.fold.timeline import Timeline
from inferscope.fold.windows import WAITING_BY
from inferscope.records import (
    ADMITTED,
    CALIBRATION,
    CLOSED,
    COLUMNS,
    FINISHED,
    LAST_BYTE,
    OFF,
    ON,
    PREEMPTED,
    QUEUED,
    RESUMED,
    TICK_NS,
    TOKENISED,
    CacheLookup,
    CacheSample,
    Clock,
    CostTable,
    Emitted,
    EngineInfo,
    ExpertLoad,
    Keyframe,
    Live,
    ProbeHealth,
    PromptLikeness,
    Record,
    RequestEvent,
    RingOpened,
    StepPlan,
    StepSlices,
    StepSpan,
    Transfer,
    driver_uuid,
    plain_uuid,
)
from inferscope.slo import InFlight

Ints = NDArray[np.int64]


class EngineFold:
    """State of one engine.

    Attributes:
        lives: its requests, and the metrics over them.
        rings: rings by number.
        dropped: totals over the rings of replaced processes.
        info: newest EngineInfo of the highest authority, None before the first.
        book: current cost models.
        joins: steps that are not split yet.
        experts: load of the experts of a mixture.
        paused_ns: start of the current pause, None if it is not paused.
    """

    def __init__(
        self,
        engine_id: str,
        sinks: list[Sink],
        mix: Callable[[bytes | Ints], None] | None,
        samplers: SamplerFold,
        *,
        keep: Retention,
        book: CostBook | None = None,
    ) -> None:
        """Start empty.

        Args:
            engine_id: ID of the engine.
            sinks: receivers of final steps and requests.
            mix: function that adds bytes to the fold's digest; None without a digest.
            samplers: state of the samplers, which includes device health.
            keep: what to retain for views.
            book: cost models of an earlier pass; None to learn them.
        """
        self.engine_id = engine_id
        self._samplers = samplers
        self._sinks = sinks
        self.book = book or CostBook()
        self.rings: dict[int, RingState] = {}
        self.dropped = DroppedRings()
        self.lives = RequestLifecycle(engine_id, sinks, mix, self.book, self.rings, keep)
        self.info: EngineInfo | None = None
        self._info_authority = 0
        """Authority of the ring that `info` comes from."""
        self.last_plan: StepPlan | None = None
        self.first_ns: int | None = None
        self.now_ns = 0
        self.experts = ExpertLoads()
        self.paused_ns: int | None = None
        self._last_pause = (0, 0)
        self._num_unread = 0
        self._timeline = Timeline()
        self._through_ns = 0
        """Time through which changes are applied."""
        self._num_booked = self._num_seen = 0
        """Steps joined at the last booked window, and at the last check for one."""
        self._booker = StepBooker(engine_id, self.lives, sinks, mix, num_recent=keep.steps)
        self.joins = Joins(
            self.rings,
            self.lives,
            book=self.book,
            timeline=self._timeline,
            bookings=self._booker,
            sinks=sinks,
        )
        self.lives.counters.book_steps = self.joins.settle
        self._handlers: dict[type[Record], Callable[[RingState, Any], None]] = {
            EngineInfo: self._on_info,
            Keyframe: self._on_keyframe,
            Clock: self._on_clock,
            ProbeHealth: self._on_health,
            CostTable: self._on_table,
            Live: self._on_live,
            StepPlan: self._on_plan,
            StepSlices: self.joins.slices,
            StepSpan: self.joins.span,
            Emitted: self._on_emitted,
            RequestEvent: self._on_event,
            Transfer: self._on_transfer,
            ExpertLoad: self._on_expert_load,
            CacheLookup: self._on_cache,
            PromptLikeness: self._on_cache,
            CacheSample: self._on_cache_sample,
        }

    # --- the fold -----------------------------------------------------------------------------

    def open_ring(self, opened: RingOpened) -> RingState:
        """Add a ring of this engine."""
        ring = self.rings[opened.ring] = RingState(opened)
        self.lives.emissions.num_front_ends += ring.is_front_end
        return ring

    def fold(self, ring: RingState, record: Record) -> None:
        """Fold one record of one of this engine's rings."""
        t_ns = record.t_ns
        if t_ns > self.now_ns:
            self.now_ns = t_ns
        ring.last_ns = self.now_ns
        ring.is_lost = False
        if self.first_ns is None:
            self.first_ns = self._booker.first_ns = t_ns
            self.lives.table.ledger.pass_idle(t_ns)
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(ring, record)

    def tick(self, now_ns: int) -> list[RingOpened]:
        """Advance the fold's clock, and detect processes that are silent or lost.

        Returns:
            the dropped rings: their processes were replaced long ago.
        """
        self.now_ns = max(self.now_ns, now_ns)
        newest = newest_rings(self.rings.values(), self.now_ns)
        for ring in self.rings.values():
            successor = newest.get(ring.slots.origin, ring)
            is_succeeded = successor.opened.start_ns > ring.last_ns
            is_silent = ring.is_silent(now_ns) or is_succeeded
            is_to_come = ring.opened.start_ns > now_ns  # a history reader opens all rings at once
            has_time = is_silent and not is_succeeded and self.joins.has_just_begun(ring, now_ns)
            ring.is_out = (is_silent and not has_time) or is_to_come or not ring.is_observing
            if is_silent and not ring.is_lost and ring.slots.known():
                self._lose(ring)
        self.joins.give_up(self.now_ns)
        self.lives.is_compute_observed = is_compute_observed(newest.values())
        if len(self.rings) > len(newest) and has_several_cores(self.rings.values(), newest):
            self.lives.several_cores_until_ns = self.now_ns
        is_booked = self._fold_window()
        through_ns = min(now_ns, self._through())
        hung_ns = self.joins.hung_since_ns()
        known_ns = min(through_ns, now_ns - _SETTLE_NS)
        if hung_ns is not None:
            known_ns = min(known_ns, max(hung_ns, now_ns - _LONGEST_STEP_NS))
        self.lives.emit_finalized(known_ns, now_ns)
        if is_booked:
            self.lives.count_idle(through_ns)
        self.lives.windows.advance(now_ns)
        return self._drop_replaced(newest) if len(self.rings) > len(newest) else []

    def end(self) -> None:
        """Finalize all steps and requests: no more records come."""
        self.joins.complete()
        self._fold_window(is_last=True)
        self.lives.end()

    def note_lost_frames(self, ring: RingState) -> None:
        """Note that frames of a ring were lost: its requests' ledgers have gaps."""
        ring.has_lost_frames = True
        self._mark_gaps(ring)

    @property
    def recent(self) -> RecentSteps | None:
        """Return the recent steps; None if none are kept."""
        return self._booker.recent

    @property
    def num_unjoined(self) -> int:
        """Return the number of records or steps that are inconsistent or incomplete."""
        return self._num_unread + self.joins.num_unjoined

    @property
    def num_partial(self) -> int:
        """Return the number of steps split without some rank's span."""
        return self.joins.num_partial

    @property
    def has_steps(self) -> bool:
        """Return whether a ring reported executed steps."""
        return self.dropped.has_spans or any(ring.has_spans for ring in self.rings.values())

    @property
    def is_synthetic(self) -> bool:
        """Return whether its records, or those of one of its devices, are synthetic."""
        return self.dropped.is_synthetic or any(map(self._is_synthetic, self.rings.values()))

    def _is_synthetic(self, ring: RingState) -> bool:
        made_up = self._samplers.made_up
        return ring.opened.synthetic or bool(made_up and _uuid_of(ring.info) in made_up)

    @property
    def probe_cost_ns(self) -> int:
        """Return the cost of its probes since the fold began, in nanoseconds."""
        reports = (ring.health for ring in self.rings.values())
        return self.dropped.cost_ns + sum(each.cost_ns for each in reports if each is not None)

    @property
    def skewed_clocks(self) -> tuple[SkewedClock, ...]:
        """Return the clocks of its processes that were corrected or differ from the core's."""
        return (*self.dropped.skewed_clocks, *skewed_clocks(self.rings.values()))

    @property
    def has_unfolded(self) -> bool:
        """Return whether changes wait for a step to end, or for requests that arrived in it."""
        return bool(self._timeline.waiting())

    @property
    def unfolded(self) -> tuple[int, int] | None:
        """Return start and end of the steps that are not folded; None if there are none."""
        since_ns = self.joins.oldest_ns(self.now_ns)
        return None if since_ns is None else (since_ns, self.joins.busy_until_ns(self.now_ns))

    def states(self) -> dict[int, int]:
        """Return the states of requests, by slot, that are not in the ledger yet.

        Changes reported during a step wait for its end; a request admitted to it is running by now.
        """
        states = {}
        for _, action, arguments in sorted(self._timeline.waiting(), key=itemgetter(0)):
            if action == self.lives.change:
                transition, request = arguments[:2]
                if transition in _BECOMES and self.lives.table.holds(request):
                    states[request.slot] = _BECOMES[transition]
        return states

    def has_pending_outcome(self, request: InFlight, until_ns: int) -> bool:
        """Return whether a token or the end of a request, up to a time, waits for an open step."""
        lives = self.lives
        known = lives.table.by_id.get(request.request_id)
        for at_ns, action, arguments in self._timeline.waiting():
            if at_ns > until_ns:
                continue
            if action == lives.change:
                transition, of_request = arguments[:2]
                if of_request is known and transition in (
                    RequestLifecycle.finished_in_engine,
                    RequestLifecycle.last_byte,
                ):
                    return True
            elif (
                known is not None
                and action in (lives.emissions.in_core, lives.emissions.at_front_end)
                and known.slot in arguments[0]
            ):
                return True
        return False

    def device_times(self) -> list[DeviceTime]:
        """Return the wall time of each rank's device by use, since the fold began."""
        device, first_ns = self.lives.table.ledger.device, self.first_ns or 0
        by_rank = [(self.rings[ring], time) for ring, time in sorted(self._booker.ranks.items())]
        known = successions(by_rank, before=self.dropped.lines)
        lines: list[tuple[RingState | None, RankTime]] = [(line.ring, line.time) for line in known]
        lines = lines or [(None, RankTime(first_ns))]
        until_ns = max(rank.until_ns for _, rank in lines)
        through_ns, hung_ns = device.mark_ns or 0, self.joins.hung_since_ns()
        if hung_ns is not None:
            through_ns = min(through_ns, hung_ns)
        wall_ns = max(until_ns, through_ns) - first_ns
        infos = [self.info if ring is None else ring.info for ring, _ in lines]
        names = [
            (driver_uuid(info.device_uuid) or info.device if info else "") or "unknown"
            for info in infos
        ]
        times = []
        for (ring, rank), info, name in zip(lines, infos, names, strict=True):
            if ring is not None and names.count(name) > 1:
                name += f"#{ring.opened.rank}"  # a unique device keeps its driver's name
            uuid = _uuid_of(info)
            foreign_ns = self.lives.counters.foreign_ns.get(uuid)
            spent = rank.seconds_by_ns(
                wall_ns, no_work_ns=device.idle_no_work_ns, foreign_ns=foreign_ns
            )
            health = self._samplers.health_of(uuid, self.now_ns) if uuid else None
            times.append(DeviceTime(self.engine_id, name, wall_ns, spent, health))
        return by_name(times)

    def ranks(self) -> tuple[int, int]:
        """Return the number of ranks that report steps, and the number that the engine states."""
        sizes = self.info.sizes if self.info is not None else (1, 1, 1, 1)
        seen = sum(ring.has_spans and not ring.is_out for ring in self.rings.values())
        return seen, max(seen, sizes[0] * sizes[1] * sizes[2])

    def _through(self) -> int:
        """Return the time through which nothing can change: the start of the oldest open step."""
        oldest_ns = self.joins.oldest_ns(self.now_ns)
        return self.now_ns + 1 if oldest_ns is None else oldest_ns

    def _fold_window(self, *, is_last: bool = False) -> bool:
        """Apply and book the changes before the watermark, if a window is due.

        A window has a fixed cost: while there are many steps it waits for several, but not long.

        Returns:
            whether a window was due.
        """
        if self.first_ns is None:  # a recording names the rings that begin later in it
            return False
        num_joined = self.joins.num_joined
        are_few = num_joined - self._num_seen < _FEW_STEPS
        is_full = num_joined - self._num_booked >= _MOST_STEPS
        self._num_seen = num_joined
        # Due times depend on Ticks alone, so readers with another start cut the same windows.
        is_due = self.now_ns % _WINDOW_NS < TICK_NS
        if not (are_few or is_full or is_due or is_last):
            return False
        self._num_booked = num_joined
        self.joins.settle()
        through_ns = self._through()
        if through_ns > self._through_ns or is_last:
            self._through_ns = through_ns
            self.lives.take(self._timeline.take(through_ns), through_ns)
        self.lives.book()
        return True

    # --- rings --------------------------------------------------------------------------------

    def _drop_replaced(self, newest: dict[tuple[str, int], RingState]) -> list[RingOpened]:
        """Drop the rings of replaced processes; return them."""
        dropped: list[RingOpened] = []
        ranks = self._booker.ranks
        for ring in sorted(replaced(self.rings.values(), newest, self.now_ns), key=_number):
            number = _number(ring)
            if (
                ring.last_ns >= self._through_ns
                or self.joins.needs(number)
                or (number in ranks and self._has_older(ring))
            ):
                continue
            self.dropped.add(
                ring,
                ranks.pop(number, None),
                rings=self.rings.values(),
                is_synthetic=self._is_synthetic(ring),
            )
            self.lives.table.cache.forget(number)
            del self.rings[number]
            dropped.append(ring.opened)
        if dropped:
            self.joins.settle()
            self.lives.counters.describe()
        return dropped

    def _has_older(self, ring: RingState) -> bool:
        """Return whether an older process of its role and rank still has device time."""
        number, origin = _number(ring), ring.slots.origin
        ranks = self._booker.ranks
        return any(each < number and self.rings[each].slots.origin == origin for each in ranks)

    def _on_info(self, ring: RingState, info: EngineInfo) -> None:
        ring.info, ring.dp_rank = info, info.ranks[2]
        self.lives.counters.describe()
        self.joins.block_tokens = info.block_tokens or self.joins.block_tokens
        self.lives.table.cache.block_tokens = self.joins.block_tokens
        before = self.info
        if ring.authority < self._info_authority:
            assert before is not None
            info = before  # this ring may now report the device that it lacks
        else:
            self._info_authority = ring.authority
        info = self._on_device(info)
        if before is None or _calculable(info) != _calculable(before):
            self.joins.settle()
            self.book.describe(info)
            self.lives.rates = rates_of(info.shape, info.sizes[0])
            self.lives.num_ranks = info.sizes[0] * info.sizes[1]
        self.info = info

    def _on_device(self, info: EngineInfo) -> EngineInfo:
        """Return an info with the device of the first rank that has one: a core may have none."""
        if info.device:
            return info
        workers = [
            (ring.opened.rank, -number)
            for number, ring in self.rings.items()
            if ring.is_worker and ring.info is not None and ring.info.device
        ]
        if not workers:
            return info
        of = self.rings[-min(workers)[1]].info
        assert of is not None
        return replace(
            info,
            device=of.device,
            device_uuid=of.device_uuid,
            mig_uuid=of.mig_uuid,
            num_threads=of.num_threads,
        )

    def _on_keyframe(self, ring: RingState, keyframe: Keyframe) -> None:
        self._enter_state(ring, keyframe.state, keyframe.t_ns)
        ring.listed = set() if ring.is_keeping else None
        ring.has_lost_frames |= keyframe.state == OFF
        ring.paused_ns = keyframe.paused_ns
        paused_ns = paused_since(self.rings.values(), self.now_ns)
        if (paused_ns is None) is not (self.paused_ns is None):
            before_ns, self.paused_ns = self.paused_ns, paused_ns
            ledger = self.lives.table.ledger
            if paused_ns is None:
                self._last_pause = (before_ns or 0, keyframe.t_ns)
                self._timeline.push(keyframe.t_ns, ledger.unpause, keyframe.t_ns)
            else:
                at_ns = min(max(paused_ns, 0), keyframe.t_ns)
                self._timeline.push(at_ns, ledger.pause, at_ns)

    def _on_clock(self, ring: RingState, clock: Clock) -> None:
        if clock.device_ns is None:
            ring.take_clock(clock)
        # A device anchor may lie within a keyframe that lists many requests.
        if ring.listed is not None and clock.device_ns is None:
            self._reconcile(ring, ring.listed, clock.t_ns)
            ring.listed = None
        if clock.device_ns is not None and clock.at_ns <= clock.t_ns:
            ring.clock.anchor(clock.device_ns, clock.at_ns, clock.error_ns or 0)

    def _on_health(self, ring: RingState, health: ProbeHealth) -> None:
        spent_ns = health.cost_ns - ring.cost_ns
        hidden_ns = health.hidden_ns - ring.hidden_ns
        ring.cost_ns, ring.hidden_ns = health.cost_ns, health.hidden_ns
        ring.health = health
        self._enter_state(ring, health.state, health.t_ns)
        if spent_ns > 0:
            self.lives.windows.add(health.t_ns, "probe_ns", spent_ns)
            self.lives.windows.add(health.t_ns, "probe_hidden_ns", min(max(hidden_ns, 0), spent_ns))

    def _enter_state(self, ring: RingState, state: int, at_ns: int) -> None:
        """Set a probe's state; end the requests of a core that is no longer observed.

        Its process continues and ends them without a record. When the probe is switched on again,
        it lists the remaining ones.
        """
        was_keeping = ring.is_keeping
        ring.enter(state)
        if ring.is_front_end and ring.is_closed:
            self._note_stop()
        if was_keeping and not ring.is_keeping:
            for request in self._requests_of(ring):
                self._timeline.push(at_ns, self.lives.end_unobserved, request, ring.slots)

    def _note_stop(self) -> None:
        """Note on a core and its workers that a front end has shut down, if it was the only one.

        One of several does not stop their cores: a supervisor does, for whatever reason.
        """
        newest = newest_rings(self.rings.values(), self.now_ns).values()
        has_core = any(ring.opened.role == "core" for ring in newest)
        if has_core and sum(ring.is_front_end for ring in newest) == 1:
            for ring in newest:
                ring.front_end_closed_ns = self.now_ns

    def _on_table(self, ring: RingState, table: CostTable) -> None:
        self.joins.settle()
        if table.source != CALIBRATION or not self.book.calibrate(table):
            self._num_unread += 1

    def _on_live(self, ring: RingState, live: Live) -> None:
        """Add requests that were in flight before the first record."""
        if not ring.is_keeping:
            return
        try:
            indices = np.frombuffer(live.requests, dtype=COLUMNS["requests"]).tolist()
            arrived = np.frombuffer(live.arrived_ns, dtype=COLUMNS["arrived_ns"]).tolist()
            prompts = np.frombuffer(live.prompt_tokens, dtype=COLUMNS["prompt_tokens"]).tolist()
            rows = list(zip(indices, arrived, prompts, live.states, live.request_ids, strict=True))
        except ValueError:
            self._num_unread += 1
            return
        table = self.lives.table
        for index, arrived_ns, prompt_tokens, live_state, request_id in rows:
            if ring.listed is not None:
                ring.listed.add(index)
            if ring.slots.get(index) or index > MOST_INDEX:
                continue
            arrived_ns = min(max(arrived_ns, 0), live.t_ns)
            request = table.by_id.get(request_id)
            if self.lives.has_ended(request_id, arrived_ns):
                # It was lost with its core, but a surviving front end still lists it.
                ring.slots.highest = max(ring.slots.highest, index)
                continue
            is_over = request is not None and request.over_ns is not None
            if request is None or is_over or request.is_known_to(ring.slots.origin):
                if table.refuses(ring.slots, index):
                    continue
                state = ARRIVING if ring.is_front_end else _LIVE_STATES[min(live_state, 2)]
                request = table.add(
                    request_id, arrived_ns, is_front_end=ring.is_front_end, state=state
                )
                table.ledger.mark_ns[request.slot] = live.t_ns
                request.joined_late = True
                request.is_first_unknown = state != WAITING
                request.prompt_tokens = prompt_tokens or None
            elif ring.is_front_end and request.arrived_at == "engine":
                self.lives.apply_front_end_times(request, arrived_ns, self._last_pause)
            request.bind(ring.slots, index)
            if not ring.is_front_end:
                table.ledger.place(request.slot, ring.dp_rank)

    def _reconcile(self, ring: RingState, listed: set[int], at_ns: int) -> None:
        """End the requests that a ring no longer lists: the record of their end is missing.

        Without lost frames this takes two keyframes, because a request leaves the probe's table
        just before its last event is written.
        """
        missing = set(ring.slots.known()) - listed
        gone = missing if ring.has_lost_frames else missing & ring.unlisted
        ring.unlisted = missing
        by_slot = self.lives.table.by_slot
        for index in sorted(gone):
            request = by_slot[ring.slots.get(index)]
            if request is not None:
                self._timeline.push(at_ns, self.lives.end_unobserved, request, ring.slots)
        if ring.state == OFF:
            self._mark_gaps(ring)  # later records are missing as well
        else:
            ring.has_lost_frames = False

    def _mark_gaps(self, ring: RingState) -> None:
        """Mark the requests of a ring whose records have a gap."""
        for request in self._requests_of(ring):
            request.joined_late = True
            request.is_first_unknown |= request.first_edge_ns is None

    def _requests_of(self, ring: RingState) -> list[Request]:
        by_slot = self.lives.table.by_slot
        found = (by_slot[ring.slots.get(index)] for index in ring.slots.known())
        return [request for request in found if request is not None]

    def _lose(self, ring: RingState) -> None:
        """End the requests in flight in a lost process."""
        ring.is_lost = True
        # After a probe failure the process may still run.
        was_killed, has_ended = ring.state == ON, ring.state in (ON, CLOSED)
        gone = ring.slots, self.joins.worked_until_ns(ring), self.now_ns, was_killed
        for request in self._requests_of(ring):
            if has_ended or request.is_in_engine:
                self._timeline.push(self.now_ns, self.lives.lost, request, *gone)
            else:
                self._timeline.push(self.now_ns, self.lives.end_unobserved, request, ring.slots)

    # --- requests -----------------------------------------------------------------------------

    def _on_event(self, ring: RingState, event: RequestEvent) -> None:
        if not 0 <= event.index <= MOST_INDEX:
            return
        if not 0 <= event.at_ns <= event.t_ns:
            event = replace(event, at_ns=event.t_ns)
        if event.request_id:
            request: Request | None = self._enter(ring, event)
        else:
            request = self.lives.table.by_slot[ring.slots.get(event.index)]
        if request is None:
            return
        if event.prompt_parts or request.declared_parts:
            self.joins.settle()  # its first chunk may be among them
        if event.external_id is not None:
            request.external_id = event.external_id
        if event.prompt_tokens is not None:
            request.prompt_tokens = event.prompt_tokens
        if event.attributes:
            request.attributes |= event.attributes
        if self.lives.table.cache.is_on:
            if event.request_id:
                self._name(ring, event.index, request)
            if request.cache is not None:
                request.cache.name.external_id = request.external_id
                request.cache.name.tenant = request.attributes.get("tenant", "")
        if event.reasoning_tokens is not None:
            request.reasoning_tokens = event.reasoning_tokens
        if event.trace:
            request.trace = event.trace
        if event.adapter:
            request.adapter = event.adapter
        if event.prompt_parts:
            self.lives.table.label(request, event.prompt_parts)
        action = _TRANSITIONS.get(event.kind)
        if action is not None:
            self._timeline.push(event.at_ns, self.lives.change, action, request, event, ring.slots)

    def _on_transfer(self, ring: RingState, transfer: Transfer) -> None:
        request = self.lives.table.by_slot[ring.slots.get(transfer.index)]
        if request is None or not 0 <= transfer.start_ns <= transfer.end_ns <= transfer.t_ns:
            return
        moved = KvTransfer(
            transfer.start_ns,
            transfer.end_ns,
            transfer.num_bytes,
            transfer.peer,
            transfer.peer_request_id,
        )
        self._timeline.push(transfer.end_ns, self.lives.transferred, request, moved)

    def _on_cache(self, ring: RingState, record: CacheLookup | PromptLikeness) -> None:
        request = self._with_cache(ring, record.index)
        if request is not None and request.cache is not None:
            self.lives.table.cache.note(_number(ring), request.cache, record)

    def _on_cache_sample(self, ring: RingState, sample: CacheSample) -> None:
        request = self._with_cache(ring, sample.index)
        if request is not None and request.cache is not None:
            request.cache.block_tokens = sample.block_tokens
            self._timeline.push(sample.t_ns, self.lives.sampled, request, ring.dp_rank, sample)

    def _with_cache(self, ring: RingState, index: int) -> Request | None:
        """Return the request of a record of the prefix cache, which may be the first."""
        table = self.lives.table
        if not table.cache.is_on:
            self.joins.settle()  # chunks before this record are not booked, wherever windows end
            table.cache.is_on = True
        request = table.by_slot[ring.slots.get(index)]
        if request is not None and request.cache is None:
            self._name(ring, index, request)
        return request

    def _name(self, ring: RingState, index: int, request: Request) -> None:
        """Keep the name of a request for the prefix cache's records."""
        if request.cache is None:
            tenant = request.attributes.get("tenant", "")
            name = RequestName(request.request_id, request.external_id, tenant)
            request.cache = CacheFacts(name)
        self.lives.table.cache.remember(_number(ring), index, request.cache.name)

    def _enter(self, ring: RingState, event: RequestEvent) -> Request | None:
        """Return the request of an event, by the engine's ID; add it if it is new."""
        table = self.lives.table
        known = ring.slots.get(event.index)
        if known:
            return table.by_slot[known]
        request = table.by_id.get(event.request_id)
        if request is not None and request.is_known_to(ring.slots.origin):
            request = None  # the ID is reused before its last request is final
        elif self.lives.has_ended(event.request_id, event.at_ns):
            ring.slots.highest = max(ring.slots.highest, event.index)
            return None
        elif request is not None and request.over_ns is not None:
            request = None
        if request is None:
            if table.refuses(ring.slots, event.index):
                return None
            request = table.add(
                event.request_id, event.at_ns, is_front_end=ring.is_front_end, state=ARRIVING
            )
        elif ring.is_front_end and request.arrived_at == "engine":
            self.lives.apply_front_end_times(request, event.at_ns, self._last_pause)
        request.bind(ring.slots, event.index)
        if not ring.is_front_end:
            table.ledger.place(request.slot, ring.dp_rank)
        return request

    def _on_emitted(self, ring: RingState, emitted: Emitted) -> None:
        size = len(emitted.requests)
        num = size // 4
        counts: NDArray[np.uint32] | None = None
        if emitted.tokens != _ONE * num or size % 4:
            if len(emitted.tokens) != size or size % 4:
                self._num_unread += 1
                return
            counts = np.frombuffer(emitted.tokens, dtype=COLUMNS["tokens"])
        slots = ring.slots.team(emitted.requests) if counts is None else None
        if slots is None:
            slots = ring.slots.slots(np.frombuffer(emitted.requests, dtype=COLUMNS["requests"]))
            known = slots > 0
            if counts is None and len(set(slots.tolist())) < num:
                counts = np.ones(num, dtype=np.uint32)  # a slot occurs twice
            if counts is not None:
                known &= counts > 0
            slots = slots[known]
            counts = None if counts is None else counts[known]
        emissions = self.lives.emissions
        if emitted.blocked_ns and ring.is_front_end:
            self._on_blocked(ring, emitted)
        left_ns = emitted.left_ns
        if ring.is_front_end:
            self._timeline.push(left_ns, emissions.at_front_end, slots, counts, left_ns)
        else:
            given = slots, counts, left_ns, emitted.step, ring.dp_rank
            self._timeline.push(left_ns, emissions.in_core, *given)
        if self.joins.num_joined - self._num_booked >= _MOST_STEPS:
            self._fold_window()

    def _on_blocked(self, ring: RingState, emitted: Emitted) -> None:
        """Record the time for which each client had not read earlier output."""
        left_ns, num = emitted.left_ns, len(emitted.requests) // 4
        if len(emitted.blocked_ns) != 8 * num:
            self._num_unread += 1
            return
        slots = ring.slots.slots(np.frombuffer(emitted.requests, dtype=COLUMNS["requests"]))
        blocked_ns = np.frombuffer(emitted.blocked_ns, dtype=COLUMNS["blocked_ns"])
        blocked_ns = np.where(slots > 0, np.clip(blocked_ns, 0, left_ns), 0)
        self._timeline.push(left_ns, self.lives.emissions.blocked, slots, blocked_ns, left_ns)

    # --- steps --------------------------------------------------------------------------------

    def _on_plan(self, ring: RingState, plan: StepPlan) -> None:
        self.joins.plan(ring, plan)
        if self.recent is not None:
            self.recent.plan(ring.dp_rank, plan)
        self.last_plan = ring.plan = plan
        bucket = self.lives.windows.at(plan.t_ns)
        gauges, amounts = bucket.gauges, bucket.amounts
        self.lives.table.cache.plan(plan.blocks_used, plan.blocks_total)
        gauges["running"] = plan.running
        gauges["waiting"] = plan.waiting
        gauges["blocks_used"] = plan.blocks_used
        gauges["blocks_cached"] = plan.blocks_cached
        gauges["blocks_total"] = plan.blocks_total
        amounts["plans"] += 1
        if plan.waiting and plan.binding in WAITING_BY:
            amounts[WAITING_BY[plan.binding]] += plan.waiting

    def _on_expert_load(self, ring: RingState, load: ExpertLoad) -> None:
        self._num_unread += self.experts.add(load) is None


def _number(ring: RingState) -> int:
    return ring.opened.ring


def _uuid_of(info: EngineInfo | None) -> str:
    """Return the device's UUID in the form of samples, empty if it is unknown."""
    return "" if info is None else plain_uuid(info.mig_uuid or info.device_uuid)


def _calculable(info: EngineInfo) -> tuple[object, ...]:
    """Return the fields that determine costs."""
    return info.shape, info.sizes, info.device, info.num_threads


_SETTLE_NS = 100_000_000
"""Delay after which no unplanned step can appear: an idle engine reports one in half of it."""
_LONGEST_STEP_NS = 60_000_000_000
"""Longest time that device samples wait for the end of a step."""
_MOST_STEPS = 256
"""Most steps in a window."""
_FEW_STEPS = 3
"""Number of steps between two Ticks below which they are booked at once."""
_WINDOW_NS = 500_000_000
"""Interval of windows with more steps, rounded to Ticks."""
_ONE = b"\1\0\0\0"
"""Count of one token in the encoding of a column."""
_LIVE_STATES = (WAITING, RUNNING, HELD)
_TRANSITIONS: dict[int, Transition] = {
    TOKENISED: RequestLifecycle.tokenised,
    QUEUED: RequestLifecycle.queued,
    ADMITTED: RequestLifecycle.admitted,
    PREEMPTED: RequestLifecycle.preempted,
    RESUMED: RequestLifecycle.resumed,
    LAST_BYTE: RequestLifecycle.last_byte,
    FINISHED: RequestLifecycle.finished_in_engine,
}
_BECOMES: dict[Transition, int] = {
    RequestLifecycle.tokenised: WAITING,
    RequestLifecycle.queued: WAITING,
    RequestLifecycle.admitted: RUNNING,
    RequestLifecycle.preempted: HELD,
    RequestLifecycle.resumed: RUNNING,
    RequestLifecycle.finished_in_engine: LEAVING,
}
"""State of a request after a transition, where the transition determines it."""
