"""Lifecycle of one engine's requests: effects of each event on ledger, metrics and finality.

These are the actions of the timeline: they run in the order of event time, once nothing earlier can
change any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.attribution import (
    ABORTED,
    ADMITTED,
    ANSWERED,
    DELIVERED,
    END,
    LOST,
    PREEMPTED,
    QUEUED,
    TRANSFERRED,
    BlameShare,
    PromptPart,
    Step,
    scaled,
)
from inferscope.cost import RESIDUAL_STEPS, CostBook, Rates
from inferscope.fold.costs import cache_use, phase_work, prompt_parts, saved_by_cache
from inferscope.fold.emissions import Emissions
from inferscope.fold.final_records import (
    CORE_NOT_OBSERVED,
    MOST_TRANSFERS,
    NOT_SEEN_BY_CORE,
    SEVERAL_CORES,
    WORKER_NOT_OBSERVED,
    FinalRequest,
    KvTransfer,
    Sink,
    TokenTime,
)
from inferscope.fold.join.counter_shares import EndedRequest
from inferscope.fold.join.counters import LONGEST_WAIT_NS, Counters
from inferscope.fold.recent import Recent
from inferscope.fold.requests import Request, RequestTable
from inferscope.fold.retention import Retention
from inferscope.fold.rings import RingState, is_core_observed
from inferscope.fold.slots import SlotMap
from inferscope.fold.steps import Execution, SplitStep
from inferscope.fold.timeline import Fact
from inferscope.fold.windows import Bucket, Windows
from inferscope.fold.work_totals import (
    COMPUTE_NS,
    DRAFT_NS,
    DRAFT_TOKENS,
    FLOPS,
    PROPOSED_TOKENS,
    WASTED_NS,
    WASTED_TOKENS,
)
from inferscope.records import CAUSES, FINISHES, CacheSample, RequestEvent, encode

Ints = NDArray[np.int64]

_NOT_TAKEN = ("timeout", "client_cancel", "server_abort")
"""Front-end reasons for a request that the engine finished and the client did not receive."""
_ANSWERS = ("stop", "length")
_REMEMBERED_ENDS, _REMEMBERED_NS = 4096, 60_000_000_000
"""Number and age limits of finished requests that another ring may still report."""
_FRONTEND, _PAUSED = CAUSES.index("frontend"), CAUSES.index("paused")
_NO_ROW: Ints = np.zeros(len(CAUSES), dtype=np.int64)


class _Ending(NamedTuple):
    """State of an ended request at its end; its ledger may be booked later."""

    request: Request
    is_final: bool
    """Whether the request ended; False if it is only no longer observed."""
    has_front_end: bool
    last_ns: int


class RequestLifecycle:
    """State machine of requests from arrival to finality.

    Attributes:
        table: requests that are not final.
        finished: recently finished requests, newest last.
        windows: buckets of the last minutes, by second.
        emissions: handler of token emissions.
        rates: FLOPs and bytes per token; None if the model's shape does not determine them.
        prefill_mode: execution mode of the last prefill.
        fit_id: ID of the cost model in force.
        clock: clock that timed the last step, device or host.
        num_dropped: number of requests that became unobserved with their last ring.
        counters: join of device samples to the steps.
        is_compute_observed: whether its processes report step executions.
        residuals: residuals of the last steps that were not cold, see `cost.verdict`.
        several_cores_until_ns: last time at which two processes reported as the same core.
    """

    def __init__(
        self,
        engine_id: str,
        sinks: list[Sink],
        mix: Callable[[bytes], None] | None,
        book: CostBook,
        rings: dict[int, RingState],
        keep: Retention,
    ) -> None:
        self._engine_id = engine_id
        self._sinks = sinks
        self._mix = mix
        self._book = book
        self._rings = rings
        self.table = RequestTable(most=keep.in_flight)
        self.windows = Windows(keep)
        self.emissions = Emissions(self.table, self.windows)
        self.finished: deque[FinalRequest] = deque(maxlen=keep.finished)
        self.residuals: deque[float] = deque(maxlen=RESIDUAL_STEPS)
        self.num_finished = 0
        self.num_preemptions = 0
        self.num_admissions = 0
        """Number of admissions, including those after preemptions."""
        self.rates: Rates | None = None
        self.num_ranks = 1
        """Number of ranks that compute a step on all hosts, each an equal part of its FLOPs."""
        self.prefill_mode = ""
        self.fit_id = ""
        self.clock = "host"
        self.num_dropped = 0
        self.is_compute_observed = True
        self.several_cores_until_ns = -1
        self._ends: Recent[str] = Recent(_REMEMBERED_ENDS, for_ns=_REMEMBERED_NS)
        """End times of finished requests by ID."""
        self.counters = Counters(self.table.accounts, rings)
        self._held: deque[tuple[int, FinalRequest, EndedRequest]] = deque()
        """Finished requests that wait for their counter values."""
        self._at_ns = 0
        """Time of the fact that is being processed."""
        self._taken_ns = 0
        """Time up to which facts are processed."""
        self._is_behind = False
        """Whether some of these facts are not booked yet."""
        self._endings: deque[_Ending] = deque()
        """Ended requests in the order of finality."""
        self._host_gap_before_ns = 0
        self._idle_before = (0, 0)

    # --- windows ------------------------------------------------------------------------------

    def take(self, facts: Sequence[Fact], until_ns: int) -> None:
        """Process the facts before a time, in the order in which they happened."""
        for at_ns, action, arguments in facts:
            self._at_ns = at_ns
            action(*arguments)
        self.emissions.flush()
        self._taken_ns, self._is_behind = until_ns, True

    def book(self) -> None:
        """Book the processed facts as one window, and finalize ended requests."""
        self.book_rows()
        ledger = self.table.ledger
        while self._endings and not ledger.is_held(self._endings[0].request.slot):
            self._complete(self._endings.popleft())

    def book_rows(self) -> None:
        """Book the processed facts; a reader may do so too, since window bounds do not matter."""
        if self._is_behind:
            self._is_behind = False
            self.table.ledger.fold(self._taken_ns)

    # --- steps --------------------------------------------------------------------------------

    def open_step(
        self, run: Execution, split: SplitStep, planned_ns: int, *, is_draft: bool
    ) -> int:
        """Begin a step; the time before it is a host gap or idle time.

        Args:
            run: execution of the step.
            split: division of its time.
            planned_ns: time at which its members were chosen.
            is_draft: whether a draft model computed it.

        Returns:
            the host gap before it, in nanoseconds.
        """
        ledger = self.table.ledger
        start_ns = run.start_ns
        ledger.step(
            Step(
                split.slots,
                split.delay,
                start_ns,
                run.end_ns,
                run.is_cold,
                run.wait_ns,
                split.grip,
                split.weights,
                is_draft=is_draft,
                dp_rank=self._rings[run.ranks[0].ring].dp_rank,
                planned_ns=planned_ns,
                number=run.span.step,
            )
        )
        bucket = self._count_idle(start_ns)
        gap_ns = ledger.device.idle_host_gap_ns - self._host_gap_before_ns
        self._host_gap_before_ns += gap_ns
        if gap_ns > 0:
            bucket = bucket or self.windows.at(start_ns)
            bucket.durations["host_gap"].add(gap_ns)
        return max(gap_ns, 0)

    def count_idle(self, at_ns: int) -> None:
        """Add the idle time that the ledger has explained so far to the windows."""
        self.table.ledger.pass_idle(at_ns)
        self._count_idle(at_ns)

    def _count_idle(self, at_ns: int) -> Bucket | None:
        """Add new idle time to a bucket; return the bucket, or None without idle time."""
        device = self.table.ledger.device
        host_gap_ns, no_work_ns = self._idle_before
        gap_ns, rest_ns = device.idle_host_gap_ns, device.idle_no_work_ns
        if gap_ns == host_gap_ns and rest_ns == no_work_ns:
            return None
        self._idle_before = (gap_ns, rest_ns)
        bucket = self.windows.at(at_ns)
        bucket.amounts["idle_host_gap_ns"] += gap_ns - host_gap_ns
        bucket.amounts["idle_no_work_ns"] += rest_ns - no_work_ns
        return bucket

    # --- transitions --------------------------------------------------------------------------

    def change(
        self, action: Transition, request: Request, event: RequestEvent, by: SlotMap
    ) -> None:
        """Apply an event to a request, unless the request has ended.

        Args:
            action: transition to apply, one of those below.
            request: request of the event.
            event: recorded event.
            by: slot map of the ring that reported it.
        """
        if self.table.holds(request):
            action(self, request, event, by)

    def apply_front_end_times(
        self, request: Request, received_ns: int, pause: tuple[int, int]
    ) -> None:
        """Apply a front end's times that are reported after the core's: they take precedence.

        If the core's facts are not processed yet, they are processed in the order of time with the
        front end's. Otherwise the time before them is booked as `frontend`.

        Args:
            request: request that the front end reports.
            received_ns: time at which the front end received it.
            pause: start and end of the last pause that is over.
        """
        table, slot = self.table, request.slot
        request.arrived_at = "http"
        earlier_ns = request.arrived_ns - received_ns
        if earlier_ns > 0 and table.ledger.is_unbooked(slot, request.arrived_ns):
            request.arrived_ns = table.ledger.mark_ns[slot] = received_ns
        elif earlier_ns > 0:
            began_ns, ended_ns = pause
            paused_ns = 0
            if request.arrived_ns >= ended_ns:  # else the pause did not delay its enqueueing
                paused_ns = max(0, ended_ns - max(began_ns, received_ns))
            request.arrived_ns = received_ns
            row = _NO_ROW.copy()
            row[_FRONTEND], row[_PAUSED] = earlier_ns - paused_ns, paused_ns
            table.ledger.add_before(slot, row)
        if not table.tokens.edge_ns.item(slot):
            table.has_front_end[slot] = True

    def has_ended(self, request_id: str, at_ns: int) -> bool:
        """Return whether a request that began at a time has ended: a report of it is late."""
        request = self.table.by_id.get(request_id)
        if request is not None:
            return request.over_ns is not None and at_ns <= request.over_ns
        return at_ns <= self._ends.at_ns(request_id)

    def tokenised(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Start the wait in the queue: the front end has nothing more to do before admission.

        The core writes `queued` when its loop reads its inbox, which is after the step that runs.
        """
        if request.queued_ns is None:
            request.queued_ns = event.at_ns
            self.table.ledger.note(request.slot, QUEUED, event.at_ns)

    def queued(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note that a core accepts a request; its wait started when the prompt was tokenised."""
        request.accepted_ns = event.at_ns
        self.tokenised(request, event, by)

    def admitted(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note the first admission of a request from the queue."""
        self.num_admissions += 1
        request.admitted_ns = event.at_ns
        request.cached_tokens = event.cached_tokens or 0
        self.table.ledger.note(request.slot, ADMITTED, event.at_ns)
        if request.queued_ns is not None:
            self.windows.observe_one("queue", event.at_ns - request.queued_ns, event.at_ns)
        amounts = self.windows.at(event.at_ns).amounts
        amounts["prompt_tokens"] += request.prompt_tokens or 0
        amounts["cached_tokens"] += request.cached_tokens

    def preempted(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note a preemption: the request loses its blocks."""
        request.num_preemptions += 1
        request.preempted_ns.append((event.at_ns, None))
        self.num_preemptions += 1
        self.windows.add(event.at_ns, "preempted", 1)
        self.table.ledger.note(request.slot, PREEMPTED, event.at_ns)

    def resumed(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note that a preempted request is scheduled again."""
        self.num_admissions += 1
        if request.preempted_ns and request.preempted_ns[-1][1] is None:
            request.preempted_ns[-1] = (request.preempted_ns[-1][0], event.at_ns)
        self.table.ledger.note(request.slot, ADMITTED, event.at_ns)

    def sampled(self, request: Request, dp_rank: int, sample: CacheSample) -> None:
        """Add the sampled blocks of an admitted prompt to the miss-ratio curve."""
        lookup = None if request.cache is None else request.cache.lookup
        if lookup is not None:
            tenant = request.attributes.get("tenant", "")
            self.table.cache.sampled(dp_rank, sample, lookup, tenant=tenant)

    def transferred(self, request: Request, transfer: KvTransfer) -> None:
        """Book the transfer of a request's KV blocks from another worker."""
        if not self.table.holds(request):
            return
        if len(request.transfers) < MOST_TRANSFERS:
            request.transfers.append(transfer)
        self.table.ledger.note(
            request.slot, TRANSFERRED, transfer.end_ns, since_ns=transfer.start_ns
        )

    def finished_in_engine(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note a request's end in the engine; an observed front end reports the final end."""
        if request.finished_ns is not None:
            if by.is_front_end and event.reason in _NOT_TAKEN:
                request.finish = event.reason
            return
        at_ns, has_front_end = event.at_ns, bool(self.table.has_front_end[request.slot])
        if not has_front_end:  # it may have had one: an end never precedes the last token
            at_ns = max(at_ns, self.table.tokens.edge_ns.item(request.slot))
        self._end(request, at_ns, event.reason if event.reason in FINISHES else "error")
        if not has_front_end:
            self._finalise(request)

    def last_byte(self, request: Request, event: RequestEvent, by: SlotMap) -> None:
        """Note the delivery of a request's last byte to the client."""
        slot = request.slot
        if request.finished_ns is None:
            request.unbind(by)
            if request.is_in_engine:
                # The client disconnected first; the request ends when the engine reports it.
                self.table.has_front_end[slot] = False
                return
            # No core has reported it, or its report was lost.
            request.joined_late |= not self.ledger_missing(request, event.at_ns)
            has_tokens = self.table.tokens.edge_ns.item(slot) > 0
            self._end(request, event.at_ns, "stop" if has_tokens else "client_cancel")
        last_token_ns = self.table.tokens.edge_ns.item(slot)
        self.table.ledger.note(slot, DELIVERED, event.at_ns, since_ns=last_token_ns or 1)
        self._finalise(request)

    def lost(
        self, request: Request, by: SlotMap, since_ns: int, at_ns: int, was_killed: bool
    ) -> None:
        """Note that a process which held a request has exited; with a core the request is lost.

        A core continues a request whose front end has exited; its output is not delivered.

        Args:
            request: request in flight in that process.
            by: slot map of the process's ring.
            since_ns: last time at which the process is known to have worked.
            at_ns: time at which the loss was decided.
            was_killed: whether its probe was still observing at the end.
        """
        if not self.table.holds(request):
            return
        request.unbind(by)
        if by.is_front_end:
            self.table.has_front_end[request.slot] = False
            request.is_undeliverable = was_killed
            request.finish = request.finish and _finish_of(request, request.finish)
        if request.finished_ns is None:
            if by.is_front_end and request.is_in_engine:
                return
            request.finish = "engine_lost"
            self.table.ledger.note(request.slot, LOST, at_ns, since_ns=since_ns)
        elif not by.is_front_end:
            return
        self._finalise(request)

    def end_unobserved(self, request: Request, by: SlotMap) -> None:
        """Note that a ring stopped reporting a request while its process runs.

        The end there was not observed. A front end that holds the request still reports its end;
        the request has a ledger only if a core is observed then.
        """
        if not self.table.holds(request):
            return
        if request.finished_ns is not None and not by.is_front_end:
            return
        request.unbind(by)
        request.joined_late = True
        request.is_known_to_core = request.is_in_engine
        if by.is_front_end:
            self.table.has_front_end[request.slot] = False
        if request.finished_ns is not None:
            self._finalise(request)
        elif not request.bindings:
            self.num_dropped += 1
            self._end_with(request, is_final=False)

    def ledger_missing(self, request: Request, at_ns: int) -> str:
        """Return why a request has no ledger at a time; empty if it has one.

        A request observed only at a front end would be booked as `frontend` entirely; without step
        times, everything that a core reports would be `output`.
        """
        if not (request.is_known_to_core or is_core_observed(self._rings.values(), at_ns)):
            return CORE_NOT_OBSERVED
        if request.arrived_ns <= self.several_cores_until_ns:
            return SEVERAL_CORES
        if request.finished_ns is not None and not request.is_known_to_core:
            has_tokens = self.table.tokens.edge_ns.item(request.slot) > 0
            if request.queued_ns is not None or has_tokens:
                return NOT_SEEN_BY_CORE
        return "" if self.is_compute_observed else WORKER_NOT_OBSERVED

    def blame_of(
        self, request: Request, now_ns: int, *, unfolded: tuple[int, int] | None = None
    ) -> tuple[BlameShare, ...]:
        """Return the requests that a request has waited for so far; see `ledger_of`."""
        ledger_ns = self.ledger_of(request, now_ns, unfolded=unfolded)
        return self.table.ledger.replicas.blame_of(request.slot, ledger_ns, at_ns=now_ns)

    def ledger_of(
        self, request: Request, now_ns: int, *, unfolded: tuple[int, int] | None = None
    ) -> dict[str, int]:
        """Return a request's time by cause up to now, in nanoseconds, by the rules of a final one.

        The result is empty for a request whose ledger is missing.

        Args:
            request: request that is not final.
            now_ns: time of the fold.
            unfolded: start and end of the device's busy time in steps that are not folded; None
                if there are none.
        """
        if self.ledger_missing(request, now_ns):
            return {}
        self.book_rows()
        ledger, slot = self.table.ledger, request.slot
        up_to_first, after = self._rows(request)
        return by_cause(up_to_first + after + ledger.until(slot, now_ns, unfolded=unfolded))

    def ttft_row(self, request: Request) -> Ints | None:
        """Return a request's ledger up to its first token; None before the first token."""
        if request.first_edge_ns is None:
            return None
        self.book_rows()
        return self._rows(request)[0]

    def _rows(self, request: Request) -> tuple[Ints, Ints]:
        """Return a request's ledger up to its first token, and the one after it."""
        row, after = self.table.ledger.rows_of(
            request.slot, is_streamed=request.is_streamed, edge_ns=request.first_edge_ns
        )
        if request.first_edge_ns is not None:
            ttft_ns = request.first_edge_ns - request.arrived_ns
            if sum(row.tolist()) > ttft_ns:  # its first token was reported after the watermark
                kept = scaled(row[None, :], np.array([ttft_ns]))
                after += row - kept[0]
                row = kept[0]
        return row, after

    def _end(self, request: Request, at_ns: int, finish: str) -> None:
        request.finished_ns = at_ns
        request.finish = _finish_of(request, finish)
        kind = ANSWERED if finish in _ANSWERS else ABORTED
        self.table.ledger.note(request.slot, kind, at_ns)

    def _finalise(self, request: Request) -> None:
        self._end_with(request, is_final=True)

    def _end_with(self, request: Request, *, is_final: bool) -> None:
        """Stop processing a request; it is completed when its ledger is booked."""
        table, slot = self.table, request.slot
        last_ns = table.tokens.edge_ns.item(slot)
        ending = _Ending(request, is_final, bool(table.has_front_end[slot]), last_ns)
        self._endings.append(ending)
        table.tokens.end(slot)
        at_ns = max(self._at_ns, request.finished_ns or 0)
        table.ledger.note(slot, END, at_ns)
        request.over_ns = at_ns

    def _complete(self, ending: _Ending) -> None:
        """Finalize an ended request, and free its slot."""
        request, table = ending.request, self.table
        slot = request.slot
        if not ending.is_final:
            table.remove(request)
            return
        up_to_first, after = self._rows(request)
        row = up_to_first + after
        delivered_ns = table.ledger.mark_ns.item(slot)
        ledger_missing = self.ledger_missing(request, delivered_ns)
        ledger_ns = {} if ledger_missing else by_cause(row)
        has_ttft = request.first_edge_ns is not None and not ledger_missing
        ttft_row = up_to_first if has_ttft else None
        prefill, decode = table.work.of(slot)
        prefill_ns, decode_ns = prefill[COMPUTE_NS], decode[COMPUTE_NS]
        times_ns, tokens_per_event = table.tokens.events_of(slot)
        model = self._book.mode(self.prefill_mode).model if self.prefill_mode else None
        final = FinalRequest(
            engine_id=self._engine_id,
            request_id=request.request_id,
            external_id=request.external_id,
            trace=request.trace,
            attributes=request.attributes,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            output_tokens=table.tokens.num.item(slot),
            arrived_ns=request.arrived_ns,
            queued_ns=request.queued_ns,
            admitted_ns=request.admitted_ns,
            first_token_ns=request.first_edge_ns,
            last_token_ns=ending.last_ns or None,
            delivered_ns=delivered_ns,
            arrived_at=request.arrived_at,
            delivered_at="http" if ending.has_front_end else "engine",
            finish=request.finish or "error",
            joined_late=request.joined_late,
            num_preemptions=request.num_preemptions,
            ledger_ns=ledger_ns,
            ttft_ledger_ns=by_cause(ttft_row),
            token_times_ns=times_ns,
            tokens_per_event=tokens_per_event,
            prefill_ns=prefill_ns,
            decode_ns=decode_ns,
            prefill_flops=None if self.rates is None else prefill[FLOPS],
            decode_flops=None if self.rates is None else decode[FLOPS],
            is_alone=not table.is_shared[slot],
            fit_id=self.fit_id,
            clock=self.clock,
            preempted_ns=tuple(
                [
                    (since_ns, delivered_ns if until_ns is None else until_ns)
                    for since_ns, until_ns in request.preempted_ns
                ]
            ),
            parts=prompt_parts(request, table.work, ttft_row, has_flops=self.rates is not None),
            reasoning_tokens=request.reasoning_tokens,
            blame=(
                table.ledger.replicas.blame_of(slot, ledger_ns, at_ns=delivered_ns)
                if self._sinks
                else ()
            ),
            prefill_work=phase_work(prefill, self.rates),
            decode_work=phase_work(decode, self.rates),
            recomputed=TokenTime(prefill[WASTED_TOKENS], prefill[WASTED_NS]),
            rejected=TokenTime(decode[WASTED_TOKENS], decode[WASTED_NS]),
            drafted=TokenTime(decode[DRAFT_TOKENS], decode[DRAFT_NS]),
            saved=saved_by_cache(request, self.rates, model),
            transfers=tuple(request.transfers),
            adapter=request.adapter or request.attributes.get("adapter", ""),
            ledger_missing=ledger_missing,
            is_partial=request.is_partial,
            proposed_tokens=decode[PROPOSED_TOKENS],
            cache=cache_use(request, table, prefill, ttft_row),
        )
        self.num_finished += 1
        self.finished.append(final)
        bucket = self.windows.at(delivered_ns)
        bucket.amounts["finished"] += 1
        if not ledger_missing:
            bucket.add_causes(row)
        if ending.last_ns and final.finish in _ANSWERS:
            bucket.durations["e2e"].add(ending.last_ns - request.arrived_ns)
        if self._mix is not None:
            self._mix(
                f"{final.request_id} {final.arrived_ns} {delivered_ns} {final.finish} "
                f"{prefill_ns} {decode_ns}".encode()
                + row.tobytes()
                + times_ns.tobytes()
                + (encode(final.parts) if final.parts else b"")
                + (encode(final.cache) if final.cache is not None else b"")
            )
        self._ends.note(request.request_id, delivered_ns)
        left = None
        if self.counters.is_on:
            left = table.accounts.leave(slot, delivered_ns, prefill, decode)
        table.remove(request)
        if left is not None:
            self._held.append((self.num_finished, final, left))
            return
        for sink in self._sinks:
            sink.on_request(final)

    def emit_finalized(self, through_ns: int, now_ns: int) -> None:
        """Emit finished requests whose counter values are settled, in the order of finality.

        Args:
            through_ns: time up to which all steps are known.
            now_ns: time of the fold.
        """
        held, is_settled = self._held, self.table.accounts.is_settled
        since_ns, num = now_ns - LONGEST_WAIT_NS, 0
        is_awaited = bool(held) and held[0][1].delivered_ns <= since_ns
        self.counters.tick(through_ns, now_ns, is_awaited=is_awaited)
        for _, final, left in held:
            if not is_settled(left) and final.delivered_ns > since_ns:
                break
            num += 1
        for final in self._counted(num):
            if self._mix is not None:
                self._mix(encode(final.counters))
            for sink in self._sinks:
                sink.on_request(final)

    def end(self) -> None:
        """Emit all waiting requests at the end of the input."""
        if self.counters.is_on:
            self.counters.settle()
        for final in self._counted(len(self._held)):
            for sink in self._sinks:
                sink.on_request(final)

    def _counted(self, num: int) -> list[FinalRequest]:
        """Return the first held requests with their counter values.

        They also replace their earlier versions in `finished`.
        """
        if not num:
            return []
        held = [self._held.popleft() for _ in range(num)]
        counted = []
        for (number, final, _), counters in zip(
            held, self.counters.request_counters([left for _, _, left in held]), strict=True
        ):
            counted.append(replace(final, counters=counters))
            back = self.num_finished - number + 1
            if back <= len(self.finished):
                self.finished[-back] = counted[-1]
        return counted

    def parts_of(self, request: Request) -> tuple[PromptPart, ...]:
        """Return the cost of each part of a prompt so far; empty if its parts have no labels."""
        row = self.ttft_row(request)
        return prompt_parts(request, self.table.work, row, has_flops=self.rates is not None)


Transition = Callable[[RequestLifecycle, Request, RequestEvent, SlotMap], None]


def _finish_of(request: Request, finish: str) -> str:
    """Return the final reason of a request that ended in the engine."""
    return "engine_lost" if request.is_undeliverable and finish in _ANSWERS else finish


def by_cause(row: Ints | None) -> dict[str, int]:
    """Return a ledger row by cause, without the causes that took no time."""
    if row is None:
        return {}
    return {cause: ns for cause, ns in zip(CAUSES, row.tolist(), strict=True) if ns}
