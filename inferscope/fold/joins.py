"""Join of an engine's steps: from the first record of each until all of its records are in.

Slices come from one ring, spans from one ring per rank. They are joined by the step's number and
verified by the digest. A step that is complete, or cannot become complete, is split, booked and
forgotten. Its effects on the requests' ledgers wait on the timeline until no step that began before
it can still change.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inferscope.attribution import RUNNING
from inferscope.cost import CostBook
from inferscope.fold.final_records import Sink
from inferscope.fold.reading import read
from inferscope.fold.recent import Recent
from inferscope.fold.remote_requests import among_none, divide
from inferscope.fold.request_lifecycle import RequestLifecycle
from inferscope.fold.rings import SILENT_NS, RingState, newest_rings
from inferscope.fold.rows import NO_ROWS, Columns
from inferscope.fold.splitting import split_steps
from inferscope.fold.step_booking import StepBooker
from inferscope.fold.steps import Execution, Joined, PendingStep, SplitStep, execution
from inferscope.fold.timeline import Timeline
from inferscope.records import StepPlan, StepSlices, StepSpan

MAX_PENDING_STEPS = 256
_KEPT_JOINED = 512
ARRIVALS_NS = 100_000_000
"""Time without a further plan after which all arrivals during the last step are recorded."""
OVERDUE_NS = 10_000_000_000
"""Longest part of a step that may delay the ledgers of requests that are not in it."""
_STILL_TO_COME_NS = 1_000_000_000
"""Time after its end by which all records of a step are in: the follower waits half of it."""


class Joins:
    """Steps of one engine that are not split yet.

    Attributes:
        num_unjoined: number of steps whose records are inconsistent or incomplete.
        num_partial: number of steps that were split without some rank's span.
        num_joined: number of executed steps.
        block_tokens: tokens in a KV block; 0 if the engine does not report it.
    """

    def __init__(
        self,
        rings: dict[int, RingState],
        lives: RequestLifecycle,
        *,
        book: CostBook,
        timeline: Timeline,
        bookings: StepBooker,
        sinks: list[Sink],
    ) -> None:
        """Start without steps.

        Args:
            rings: the engine's rings by number.
            lives: lifecycles of its requests.
            book: cost models in force.
            timeline: receives the effects of steps on ledgers.
            bookings: receives the steps.
            sinks: receivers of final steps.
        """
        self._rings = rings
        self._lives = lives
        self._book = book
        self._timeline = timeline
        self._bookings = bookings
        self._sinks = sinks
        self.num_unjoined = 0
        self.num_partial = 0
        self.num_joined = 0
        self.block_tokens = 0
        self._pending: dict[tuple[int, int], PendingStep] = {}
        """Pending steps by data-parallel rank and step number."""
        self._joined: Recent[tuple[int, int]] = Recent(_KEPT_JOINED)
        """Ends of the steps that were split."""
        self._joined_steps: list[Joined] = []
        """Joined steps that are not split yet."""
        self._newest: dict[int, tuple[int, int, int]] = {}
        """Number, start and end of the newest split step, by data-parallel rank."""

    # --- records ------------------------------------------------------------------------------

    def plan(self, ring: RingState, plan: StepPlan) -> None:
        """Take a scheduler's plan of a step."""
        pending = self._pending_step(ring, plan.step, plan.start_ns, plan.t_ns)
        pending.binding = plan.binding
        pending.planned_ns = max(plan.start_ns, min(plan.end_ns, plan.t_ns))

    def slices(self, ring: RingState, slices: StepSlices) -> None:
        """Take the slices of a step."""
        pending = self._pending_step(ring, slices.step, slices.t_ns, slices.t_ns)
        pending.slices = slices
        pending.ring = ring.opened.ring
        if len(self._pending) > 1:
            for other in list(self._pending.values()):
                if other.step < slices.step and other.dp_rank == pending.dp_rank:
                    other.is_unsliced = other.slices is None and other.ready_ns <= pending.start_ns
                    self._join(other)
        if pending.spans or pending.past:
            self._join(pending)

    def span(self, ring: RingState, span: StepSpan) -> None:
        """Take one rank's execution of a step."""
        ring.has_spans, ring.is_out, ring.spanned_ns = True, False, span.t_ns
        number = ring.opened.ring
        if span.launch_start_ns <= self._joined.at_ns((ring.dp_rank, span.step)):
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

    def give_up(self, now_ns: int) -> None:
        """Stop waiting for missing records, and for steps that hang."""
        for pending in list(self._pending.values()):
            at_ns = pending.seen_ns
            rings = [ring for ring in self._rings.values() if ring.dp_rank == pending.dp_rank]
            speakers = [ring for ring in rings if not ring.is_front_end]
            pending.past.update(
                ring.opened.ring for ring in speakers if ring.is_past(max(at_ns, ring.spanned_ns))
            )
            cores = [ring for ring in speakers if not ring.is_worker] or speakers
            # Slices may be recorded as late as the step's execution. Until then a core that plans
            # for other processes, and has no spans of its own, has not missed any of them.
            pending.is_unsliced = not self._awaits_span(pending) and all(
                ring.is_past(at_ns) for ring in cores
            )
            self._join(pending)
        self._pass_overdue(now_ns)

    def _pass_overdue(self, now_ns: int) -> None:
        """Stop delaying other requests for overdue steps.

        An engine may hang while its probe continues to report. The ledgers of the requests that run
        on that replica wait until the step or the request ends.
        """
        oldest: dict[int, PendingStep] = {}
        for pending in self._pending.values():
            first = oldest.setdefault(pending.dp_rank, pending)
            if pending.step < first.step:
                oldest[pending.dp_rank] = pending
        until_ns = now_ns - _STILL_TO_COME_NS
        for pending in self._pending.values():
            start_ns = pending.open_ns
            if now_ns - start_ns > OVERDUE_NS:
                pending.booked_ns = until_ns
                if pending is oldest[pending.dp_rank]:
                    # Requests that run at its start, and requests admitted to it later.
                    for at_ns in (start_ns, until_ns - 1):
                        self._timeline.push(at_ns, self._hold, pending, start_ns, until_ns)

    def _hold(self, pending: PendingStep, start_ns: int, until_ns: int) -> None:
        """Suspend the ledgers of all requests that run on the replica of an unfinished step."""
        table, ledger = self._lives.table, self._lives.table.ledger
        slots = {
            ring.slots.get(index)
            for ring in self._rings.values()
            if ring.is_core and ring.dp_rank == pending.dp_rank
            for index in ring.slots.known()
        }
        running = [slot for slot in sorted(slots) if ledger.state.item(slot) == RUNNING]
        held = {slot for step in pending.held for slot in step.slots.tolist()}
        since: dict[int, list[int]] = {}
        for slot in running:
            request = table.by_slot[slot]
            if request is not None and slot not in held:
                at_ns = max(pending.start_ns, request.runs_since_ns or 0)
                since.setdefault(at_ns, []).append(slot)
        pending.hung_ns = pending.hung_ns or (start_ns if since else 0)
        for at_ns, members in sorted(since.items()):
            pending.held.append(ledger.hold(np.array(members, dtype=np.int64), at_ns))
        if running and ledger.device.ended_ns < until_ns:
            on_it = np.array(running, dtype=np.int64)
            ledger.hang(on_it, start_ns, until_ns, dp_rank=pending.dp_rank)

    def _release(self, pending: PendingStep) -> None:
        ledger = self._lives.table.ledger
        self._timeline.push(pending.start_ns, ledger.release, pending.held)

    def pending(self) -> Iterable[PendingStep]:
        """Return the steps that are still incomplete."""
        return self._pending.values()

    def has_just_begun(self, ring: RingState, now_ns: int) -> bool:
        """Return whether a ring is silent because its replica was idle until a moment ago.

        An idle process reports every 10 s. Once a step has begun it has the usual time to report,
        unless its process has exited.
        """
        return not ring.is_gone(now_ns) and any(
            step.dp_rank == ring.dp_rank
            and ring.last_ns < step.start_ns
            and now_ns - step.start_ns <= SILENT_NS
            for step in self._pending.values()
        )

    def needs(self, ring: int) -> bool:
        """Return whether a step that is not booked yet has records from a ring."""
        if any(step.ring == ring or ring in step.spans for step in self._pending.values()):
            return True
        runs = [step.run for step in self._joined_steps]
        for _, action, arguments in self._timeline.waiting():
            if action == self._bookings.begin:
                runs.append(arguments[0].run)
        return any(span.ring == ring for run in runs for span in run.ranks)

    def oldest_ns(self, now_ns: int) -> int | None:
        """Return the start of the oldest incomplete step; None if there is none.

        A step remains incomplete after it is split: an engine reads its inbox between two steps, so
        a request that arrived during a step is recorded after it. The next plan, or `ARRIVALS_NS`
        without one, shows that all of these records have been read.
        """
        starts_ns = [step.open_ns for step in self._pending.values()]
        newest = {step.dp_rank: step.step for step in self._pending.values()}
        for dp_rank, (step, start_ns, end_ns) in self._newest.items():
            if newest.get(dp_rank, step) <= step and now_ns < end_ns + ARRIVALS_NS:
                starts_ns.append(start_ns)
        return min(starts_ns, default=None)

    def hung_since_ns(self) -> int | None:
        """Return the start of the oldest hung step that blocks all; device use since is unknown.

        None if there is none, or if no request waits for it: the engine may have abandoned it.
        """
        is_hung = self._lives.table.ledger.is_hung
        return min(
            (
                pending.hung_ns
                for pending in self._pending.values()
                if any(is_hung(slot) for step in pending.held for slot in step.slots.tolist())
                and not self._is_alone(pending)
            ),
            default=None,
        )

    def _is_alone(self, pending: PendingStep) -> bool:
        """Return whether another replica has ended a step since this one began."""
        return any(
            end_ns > pending.start_ns
            for dp_rank, (_, _, end_ns) in self._newest.items()
            if dp_rank != pending.dp_rank
        )

    def busy_until_ns(self, now_ns: int) -> int:
        """Return when the newest step ended; now if a step is still running."""
        if self._pending:
            return now_ns
        return max((end_ns for _, _, end_ns in self._newest.values()), default=now_ns)

    def worked_until_ns(self, ring: RingState) -> int:
        """Return the last time at which an exited process is known to have worked.

        That is the time of its last record, or the start of its replica's running step.
        """
        dp_rank = ring.dp_rank
        starts_ns = [step.start_ns for step in self._pending.values() if step.dp_rank == dp_rank]
        if ring.is_front_end or not starts_ns:
            return ring.last_ns
        _, _, ended_ns = self._newest.get(dp_rank, (0, 0, 0))
        return min(ring.last_ns, max(min(starts_ns), ended_ns))

    def complete(self) -> None:
        """Mark the newest steps as complete: no more records follow."""
        self._newest.clear()

    def _pending_step(self, ring: RingState, step: int, start_ns: int, t_ns: int) -> PendingStep:
        key = (ring.dp_rank, step)
        if not 0 <= start_ns <= t_ns:
            start_ns = min(max(start_ns, 0), t_ns)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PendingStep(ring.dp_rank, step, start_ns, t_ns)
            if len(self._pending) > MAX_PENDING_STEPS:
                self._do_without(next(iter(self._pending.values())))
            return pending
        if start_ns < pending.start_ns:
            pending.start_ns = start_ns
        pending.seen_ns = t_ns
        return pending

    # --- joining ------------------------------------------------------------------------------

    def _is_awaited(self, pending: PendingStep) -> bool:
        """Return whether records of a step are still expected."""
        spans, past = pending.spans, pending.past
        if pending.slices is None and not pending.is_unsliced:
            # A dummy step has no slices; only its first span identifies it as a dummy.
            if not spans or not all(span.dummy for span in spans.values()):
                return True
        elif not spans and not past:
            return True
        return len(spans) < len(self._rings) and self._awaits_span(pending)

    def _awaits_span(self, pending: PendingStep) -> bool:
        """Return whether some rank's span of a step is still expected."""
        spans, past = pending.spans, pending.past
        for number, ring in self._rings.items():
            if (
                number not in spans
                and number not in past
                and (ring.has_spans or ring.is_worker)
                and not ring.is_out
                and ring.dp_rank == pending.dp_rank
            ):
                return True
        return False

    def _join(self, pending: PendingStep) -> None:
        """Join a step if all its records are in, or the rest are not expected any more."""
        if self._is_awaited(pending):
            return
        spans, slices, rings = pending.spans, pending.slices, self._rings
        key = (pending.dp_rank, pending.step)
        del self._pending[key]
        if pending.held:
            self._release(pending)
        if not spans:
            self._note_bare(pending)
            return
        run = execution([(rings[number].placed(span), span) for number, span in spans.items()])
        self.num_joined += 1
        self._joined.note(key, run.end_ns)
        self._newest[pending.dp_rank] = (pending.step, run.start_ns, run.end_ns)
        if pending.past:
            self.num_partial += self._lacks_span(pending)
        self._lives.clock = run.ranks[0].clock
        if slices is None and not run.is_dummy and self._has_no_core(pending.dp_rank):
            self._book_unnamed(pending, run)
            return
        if slices is None or not run.is_of(slices.digest):
            self._book_without_requests(pending, run, is_unjoined=not run.is_dummy)
            self._note_untimed(pending)
            return
        found = read(rings[pending.ring], slices, self._lives.table)
        if found is None or not len(found[0]):
            self._book_without_requests(
                pending, run, is_unjoined=found is None and not run.is_dummy
            )
            return
        held = pending.binding, self.block_tokens
        joined = Joined(run, *found, slices, *held, pending.dp_rank, pending.planned_ns)
        self._joined_steps.append(joined)
        self._timeline.push(run.start_ns, self._bookings.begin, joined)

    def settle(self) -> None:
        """Split and book the steps that were joined since the last time.

        Results do not depend on when this is called. It must be called before any of their inputs
        changes: the engine's description, request names, samples of its devices.
        """
        if not self._joined_steps:
            return
        steps, self._joined_steps = self._joined_steps, []
        columns = Columns(steps)
        split_steps(self._book, steps, columns)
        self._bookings.book(steps, columns)
        if self._sinks:
            for at, step in enumerate(steps):
                self._bookings.emit_steps(step, columns, at)

    def _lacks_span(self, pending: PendingStep) -> bool:
        """Return whether a rank that existed when a step began did not report its execution."""
        rings = self._rings
        missing = [
            rings[number]
            for number in pending.past
            if number not in pending.spans and number in rings and rings[number].has_spans
        ]
        newest = newest_rings(rings.values(), pending.start_ns) if missing else {}
        return any(newest.get(ring.slots.origin) is ring for ring in missing)

    def _do_without(self, pending: PendingStep) -> None:
        """Close an incomplete step because too many are pending."""
        if pending.spans and pending.slices is None and self._has_no_core(pending.dp_rank):
            pending.is_unsliced = True
            pending.past.update(self._rings)
            self._join(pending)
            return
        del self._pending[pending.dp_rank, pending.step]
        if pending.held:
            self._release(pending)
        if pending.spans:
            self.num_unjoined += 1
        else:
            self._note_bare(pending)

    def _note_bare(self, pending: PendingStep) -> None:
        """Count a step of known requests whose execution no rank reported."""
        if pending.slices is not None and not self._is_cut_short(pending):
            self.num_unjoined += 1
            self._rings[pending.ring].has_bare_steps = True
            self._note_untimed(pending)

    def _is_cut_short(self, pending: PendingStep) -> bool:
        """Return whether all processes that execute a replica's steps exited within this one."""
        newest = self._newest.get(pending.dp_rank)
        if newest is not None and newest[0] > pending.step:
            return False
        rings = self._rings.values()
        ranks = [ring for ring in rings if ring.has_spans and ring.dp_rank == pending.dp_rank]
        return bool(ranks) and all(ring.is_out for ring in ranks)

    def _note_untimed(self, pending: PendingStep) -> None:
        """Mark the requests of a step without an execution: their ledgers have a gap."""
        found = pending.slices and read(
            self._rings[pending.ring], pending.slices, self._lives.table
        )
        if not found:
            return
        members = np.unique(found[0])
        for slot in members.tolist():
            request = self._lives.table.by_slot[slot]
            if request is not None:
                request.is_partial = True
        self._timeline.push(
            pending.start_ns, self._lives.table.ledger.untimed, members, pending.start_ns
        )

    def _has_no_core(self, dp_rank: int) -> bool:
        """Return whether no ring on this host reports slices of a replica's steps.

        Its core runs on another host, or cannot be observed.
        """
        return not any(
            ring.opened.role == "core"
            and not ring.is_unsupported
            and (ring.info is None or ring.dp_rank == dp_rank)
            for ring in self._rings.values()
        )

    def _book_unnamed(self, pending: PendingStep, run: Execution) -> None:
        """Book a step whose requests are known only on another host."""
        self.settle()
        split, unnamed = divide(self._book, run)
        prefill_ns = self._bookings.book_unnamed(split, unnamed, run)
        step = _without_requests(pending, run, split, prefill_ns)
        self._timeline.push(run.start_ns, self._bookings.begin, step)
        if self._sinks:
            self._bookings.emit_unnamed_steps(step, unnamed)

    def _book_without_requests(
        self, pending: PendingStep, run: Execution, *, is_unjoined: bool
    ) -> None:
        """Book a step without requests, or one whose requests are unknown."""
        self.settle()
        split = among_none(run)
        step = _without_requests(pending, run, split, [0] * len(run.ranks))
        self._timeline.push(run.start_ns, self._bookings.begin, step)
        amounts = self._lives.windows.at(run.end_ns).amounts
        amounts["unattributed_ns"] += sum(split.unattributed_ns)
        amounts["steps"] += 1
        self.num_unjoined += is_unjoined
        if self._sinks and not is_unjoined:
            self._bookings.emit_unnamed_steps(step)


def _without_requests(
    pending: PendingStep, run: Execution, split: SplitStep, prefill_ns: list[int]
) -> Joined:
    """Return a joined step without known requests."""
    of_step = pending.binding, 0, pending.dp_rank, pending.planned_ns
    return Joined(run, NO_ROWS, True, _NO_SLICES, *of_step, split, prefill_ns)


_NO_SLICES = StepSlices(0, 0, 0, b"", b"", b"", b"")
