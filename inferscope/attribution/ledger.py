"""The latency ledger, which assigns exactly one cause to every nanosecond of a request.

A request is a list of boundaries in the order of time: steps that it was in, tokens that left the
engine, events. What lies between one boundary and the next has a cause that follows from two things
alone: the state behind the first, and what the second is (`_GAP`). A step is explained by its own
delay parts (see `counterfactual`).

    │ frontend │ queue, queue_idle │ cpu_gap │ step │ output │ cpu_gap │ step … │ output, delivery
    received   queued              admitted  start  end      emitted            finished

Boundaries are kept until the watermark has passed them; then one window of them is booked by array
expressions (`fold`), sorted by the time at which they happened. A gap is booked when its later end
is known, so results do not depend on where windows are cut. A request in a step that the watermark
cuts has its later boundaries held back: one of them may end its part of that step. The next
emission after a gap may come in a later window and show that a token was on its way throughout the
gap; the gap is then moved to `output`.

A request has one partition in three parts, so that its TTFT ledger is the first part of its ledger:

    up to the end of the step that made the first token │ that token on its way │ after its edge

The second part is `output`, even where the request's next step runs meanwhile. Only an answer that
goes out in one piece has no token on its way: it waits for the others.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.attribution.blame import Taken
from inferscope.attribution.blocked import BlockedTime
from inferscope.attribution.busy import NEVER_NS, Busy
from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.holds import HeldResources
from inferscope.attribution.marginal import BlameWeights
from inferscope.attribution.replicas import Replica, Replicas
from inferscope.records import CAUSES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FREE, ARRIVING, WAITING, RUNNING, HELD, LEAVING = range(6)
"""States of a slot: before the queue, in it, admitted, preempted, done in the engine."""
_COMPUTED, _EMITTED, _UNKNOWN = 6, 7, 8
"""States of a running request: after a step, after an emission, and after the start of a step whose
execution no rank reported."""
UNKNOWN_SLOT = 0

(
    STEP,
    UNTIMED,
    EMIT,
    EDGE,
    QUEUED,
    ADMITTED,
    PREEMPTED,
    TRANSFERRED,
    ANSWERED,
    ABORTED,
    DELIVERED,
    LOST,
    END,
    _CARRIED,
) = range(14)
"""Kinds of boundaries. UNTIMED: a step whose execution no rank reported. EDGE: delivery of the
first token. END: no later boundary belongs to the request."""
_NUM_KINDS = _CARRIED + 1

_C = {cause: column for column, cause in enumerate(CAUSES)}
_NUM = len(CAUSES)
_OUTPUT, _PAUSED, _LOST = _C["output"], _C["paused"], _C["engine_lost"]
_SLOWDOWN, _COLD_START = _C["slowdown"], _C["cold_start"]
_RANK_WAIT, _RECOMPUTE, _DRAFT = _C["rank_wait"], _C["recompute"], _C["draft"]
_PREFILL_OWN, _DECODE_OWN = _C["prefill_own"], _C["decode_own"]
"""Columns of own work; the next two columns of each are co-batched and interference."""
_BY_QUEUE, _BY_GAP, _BY_ARRIVAL, _BY_HELD, _BY_STEP = range(_NUM, _NUM + 5)
"""Causes that depend on how long the device was busy, or the engine paused, within the gap."""
_BUSY = np.array(
    [_C[cause] for cause in ("queue", "not_scheduled", "frontend", "preempted", "cpu_gap")]
)
_REST = np.array(
    [_C[cause] for cause in ("queue_idle", "cpu_gap", "frontend", "preempted", "cpu_gap")]
)
"""Cause of the busy part of each, and of the rest; paused time is `paused`."""

_STATE = np.full(_NUM_KINDS, -1, dtype=np.int8)
"""State after a boundary, by kind; -1 keeps the state before it."""
_STATE[[STEP, UNTIMED, ADMITTED]] = RUNNING
_STATE[QUEUED], _STATE[PREEMPTED] = WAITING, HELD
_STATE[[ANSWERED, ABORTED, LOST, END]] = LEAVING
_SUBSTATE = np.full(_NUM_KINDS, -1, dtype=np.int8)
"""State within RUNNING after a boundary; EMIT is an emission while no step of the request runs."""
_SUBSTATE[STEP], _SUBSTATE[EMIT] = _COMPUTED, _EMITTED
_SUBSTATE[UNTIMED], _SUBSTATE[ADMITTED] = _UNKNOWN, RUNNING

_GAP = np.full((9, _NUM_KINDS), _OUTPUT, dtype=np.int64)
"""Cause of a gap, by the state after its first boundary and the kind of the second."""
_GAP[ARRIVING] = _BY_ARRIVAL
_GAP[WAITING] = _BY_QUEUE
_GAP[HELD] = _BY_HELD
_GAP[RUNNING] = _GAP[_COMPUTED] = _GAP[_EMITTED] = _BY_GAP
_GAP[_UNKNOWN] = _BY_STEP
_GAP[_COMPUTED, [EMIT, EDGE, ANSWERED]] = _OUTPUT
_GAP[_EMITTED, [EDGE, ANSWERED]] = _OUTPUT
_GAP[[FREE, LEAVING], LOST] = _LOST
_FROM = {
    QUEUED: (ARRIVING,),
    ADMITTED: (ARRIVING, WAITING, HELD),
    PREEMPTED: (RUNNING,),
    TRANSFERRED: (WAITING,),
}
"""States in which an event of a kind is valid, if not in all."""
_BEHIND = np.full(_NUM_KINDS, _OUTPUT, dtype=np.int64)
"""Cause of the time after the boundary's `since`, by kind."""
_BEHIND[TRANSFERRED], _BEHIND[DELIVERED] = _C["kv_transfer"], _C["delivery"]
_BEHIND[LOST] = _LOST
_ENDS_STEP = np.isin(np.arange(_NUM_KINDS), (EDGE, PREEMPTED, ANSWERED, ABORTED, LOST, END))
"""[kinds], whether the boundary ends a running step for the request."""
_IS_WRITTEN = np.isin(np.arange(_NUM_KINDS), (EDGE, DELIVERED))
"""[kinds], whether a front end has written everything up to the boundary."""

_IN_FLIGHT = (WAITING, RUNNING, HELD)
_UP_TO_FIRST, _ON_ITS_WAY, _AFTER = range(3)
"""Parts of a request's partition."""
_MOST_RECENT = 64
"""Largest number of overlapping steps of one engine."""
_AT_NS = attrgetter("at_ns")


class Step(msgspec.Struct, eq=False, gc=False):
    """Step as the requests in it wait for it."""

    slots: Ints
    """[members], slots, each request once."""
    delay: Delay
    start_ns: int
    """Start on the earliest rank."""
    end_ns: int
    """End on the latest rank."""
    is_cold: bool = False
    wait_ns: int = 0
    """Nanoseconds of the delay's excess spent waiting for the slowest rank."""
    grip: HeldResources | None = None
    """Resources that the members hold; None if unknown."""
    weights: BlameWeights | None = None
    """Weights by which each member is blamed; None if unknown."""
    taken: Taken | None = None
    """Blame among its members once recorded; None if there is none."""
    begins_ns: Ints | None = None
    """[members], start of each member's wait; None for the step's start."""
    is_open: bool = False
    """Whether it stands for a step whose end is unknown; see `hold`."""
    dp_rank: int = 0
    """Data-parallel rank of the replica that executed it."""
    planned_ns: int = NEVER_NS
    """Time when its members were chosen; its start if unknown."""
    is_draft: bool = False
    """Whether a draft model computed it: a member's own time is `draft`."""
    number: int = -1
    """Its number among the steps of its replica; -1 if unknown."""

    def __post_init__(self) -> None:
        """Limit the time of the plan to the step's start."""
        if self.planned_ns > self.start_ns:
            self.planned_ns = self.start_ns


class _Block(msgspec.Struct, eq=False, gc=False):
    """Boundaries of one kind at one time."""

    at_ns: int
    end_ns: int
    """End of a step; otherwise `at_ns`."""
    kind: int
    slots: Ints
    since_ns: int = 0
    """Start of the part of the gap before the boundary with its own cause, see `_BEHIND`; 0 for
    none."""
    step: Step | None = None
    members: Ints | None = None
    """Positions in the step; None for all."""
    made_ns: int = NEVER_NS
    """End of the step that computed the tokens of an emission; `NEVER_NS` if unknown."""


class _Gaps(NamedTuple):
    """Booked gaps that the next emission of their requests may move to `output`: [gaps] each."""

    slot: Ints
    since_ns: Ints
    until_ns: Ints
    part: Ints
    busy_ns: Ints
    """Nanoseconds of the gap that are booked as `not_scheduled`; the next likewise."""
    paused_ns: Ints

    def where(self, is_kept: Flags) -> _Gaps:
        """Return those with the flag."""
        return _Gaps(*(column[is_kept] for column in self))


_NO_GAPS = _Gaps(*[np.zeros(0, dtype=np.int64)] * 6)


class Ledger:
    """Time of one engine's requests by cause, in host nanoseconds.

    Methods that record events must be called in the order of time.

    Attributes:
        state: [slots], state after all recorded events.
        mark_ns: [slots], time through which each request is booked.
        device: time of the engine's devices; busy while any replica is.
        replicas: busy time of each replica, and blame among its requests.
    """

    def __init__(self, num_slots: int = 256, blocked: BlockedTime | None = None) -> None:
        """Allocate columns for some requests; `grow` adds more.

        Args:
            num_slots: initial number of slots.
            blocked: intervals in which clients did not read.
        """
        self._blocked = blocked or BlockedTime()
        self._rows = np.zeros((num_slots, 3, _NUM), dtype=np.int64)
        self.mark_ns = np.zeros(num_slots, dtype=np.int64)
        self.state = np.zeros(num_slots, dtype=np.int8)
        self._state = np.zeros(num_slots, dtype=np.int8)
        """[slots], state after the last booked boundary; the next three likewise."""
        self._substate = np.zeros(num_slots, dtype=np.int8)
        self._part = np.zeros(num_slots, dtype=np.int8)
        self._has_prefilled = np.zeros(num_slots, dtype=np.bool_)
        self._is_over = np.zeros(num_slots, dtype=np.bool_)
        """[slots], whether END is booked: later boundaries of the request are ignored."""
        self.device = Busy()
        self.replicas = Replicas(num_slots)
        self._blocks: list[_Block] = []
        self._recent: deque[Step] = deque(maxlen=_MOST_RECENT)
        """Steps that may still run."""
        self._recent_until_ns = 0
        """Latest end of a step so far."""
        self._each: Ints = np.arange(num_slots)
        self._num_changes = 0
        """Number of state changes so far."""
        self._admitted: tuple[Ints | None, int] = (None, 0)
        """Members of the last step, all of which ran, and the number of changes then."""
        self._held: set[int] = set()
        """Slots of requests with boundaries that are held back."""
        self._gaps = _NO_GAPS
        """Gaps that no emission of their requests has followed yet."""
        self._hung: set[int] = set()
        """Slots of held-back requests in a step whose end is unknown."""
        self._num_in_flight = 0
        self._cut_ns = np.zeros(num_slots, dtype=np.int64)
        """[slots], last time at which a request left the batch or ended."""
        self._made_ns = np.full(num_slots, -1)
        """[slots], start of the step that computed the first token: the last prefill before its
        emission, or without one, just before the emission; -1 before."""
        self._is_first_due = np.zeros(num_slots, dtype=np.bool_)
        """[slots], whether no token was emitted yet."""
        self._last_cut_ns = 0
        """Latest value of `_cut_ns`."""

    def grow(self, num_slots: int) -> None:
        """Extend the columns to `num_slots` requests."""
        per_slot = ("_rows", "mark_ns", "state", "_state", "_substate", "_part", "_has_prefilled")
        for name in (*per_slot, "_is_over", "_cut_ns", "_made_ns", "_is_first_due"):
            old = getattr(self, name)
            more = np.zeros((num_slots - len(old), *old.shape[1:]), dtype=old.dtype)
            setattr(self, name, np.concatenate([old, more]))
        self._each = np.arange(num_slots)
        self.replicas.grow(num_slots)

    # --- boundaries, in the order of time -----------------------------------------------------

    def begin(self, slot: int, at_ns: int, state: int) -> None:
        """Start the ledger of a request in a free slot."""
        self._rows[slot] = 0
        self.mark_ns[slot] = at_ns
        self.state[slot] = FREE
        self._state[slot], self._substate[slot] = state, RUNNING
        self._part[slot], self._has_prefilled[slot] = _UP_TO_FIRST, False
        self._is_over[slot] = False
        self._cut_ns[slot] = self._made_ns[slot] = -1
        self._is_first_due[slot] = True
        self._change(slot, at_ns, state)

    def free(self, slot: int) -> None:
        """Release a slot."""
        self._change(slot, 0, FREE)
        self._held.discard(slot)
        self._hung.discard(slot)
        self.replicas.end(slot)

    def place(self, slot: int, dp_rank: int) -> None:
        """Record the replica of a request."""
        is_running = self.state.item(slot) == RUNNING
        self.replicas.place(slot, dp_rank, self.device, is_running=is_running)

    def note(self, slot: int, kind: int, at_ns: int, *, since_ns: int = 0) -> None:
        """Record an event of a request; ignore one that is invalid in its state."""
        state = self.state.item(slot)
        if state not in _FROM.get(kind, (state,)):
            return
        if kind == ADMITTED and state == ARRIVING:
            self.note(slot, QUEUED, at_ns)
        self._blocks.append(_Block(at_ns, at_ns, kind, self._each[slot : slot + 1], since_ns))
        if kind == TRANSFERRED:
            self.replicas.left_out(slot, since_ns, at_ns)
        elif kind == EDGE:
            self._resume_steps(slot, at_ns)
        elif _ENDS_STEP[kind] and state != LEAVING:
            self._cut_blame(slot, at_ns)
            self._cut_ns[slot] = at_ns
            self._last_cut_ns = max(self._last_cut_ns, at_ns)
        if kind == LOST and since_ns and state == WAITING:
            self.replicas.left_out(slot, since_ns, at_ns)
        if (after := _STATE.item(kind)) >= 0:
            self._change(slot, at_ns, after, held_until_ns=since_ns if kind == LOST else 0)

    def emitted(self, slots: Ints, at_ns: int, *, step: int = -1, dp_rank: int = 0) -> None:
        """Record an emission of tokens by these requests.

        Args:
            slots: [requests].
            at_ns: time of the emission.
            step: number of the step that computed the tokens; -1 if unknown.
            dp_rank: data-parallel rank of its replica.
        """
        is_first = self._is_first_due[slots]
        if np.count_nonzero(is_first):  # `any` takes three times as long for one batch
            firsts = slots[is_first]
            self._is_first_due[firsts] = False
            self._made_ns[firsts[self._made_ns[firsts] < 0]] = at_ns - 1
        made_ns = self._end_of(step, dp_rank)
        self._blocks.append(_Block(at_ns, at_ns, EMIT, slots, made_ns=made_ns))

    def _end_of(self, number: int, dp_rank: int) -> int:
        """Return the end of a replica's step; `NEVER_NS` if it is unknown."""
        last = NEVER_NS
        if number >= 0:
            for step in reversed(self._recent):
                if step.dp_rank != dp_rank or step.number < 0:
                    continue
                if step.number == number:
                    return step.end_ns
                if not number < step.number < last:
                    break  # it was not timed, or an engine that restarted counts anew
                last = step.number
        return NEVER_NS

    def step(self, step: Step) -> None:
        """Record a step; it admits members that were not admitted."""
        slots, start_ns = step.slots, step.start_ns
        members: Ints | None = None
        if self._admitted[0] is not slots or self._admitted[1] != self._num_changes:
            for slot in self.replicas.strangers(slots, step.dp_rank):
                if slot != UNKNOWN_SLOT:
                    self.place(slot, step.dp_rank)
            members = self._admit(slots, start_ns, step.planned_ns)
            self._admitted = (slots if members is None else None), self._num_changes
        replica, span = self._run(step.dp_rank, start_ns, step.end_ns)
        if len(slots):
            is_late = bool(self._blocks) and self._blocks[-1].at_ns > start_ns
            waiting = slots if members is None else slots[members]
            self._blocks.append(_Block(start_ns, step.end_ns, STEP, waiting, 0, step, members))
            if span[0] > start_ns:
                step.begins_ns = self._begins_ns(step)
            self._recent.append(step)
            self._recent_until_ns = max(self._recent_until_ns, step.end_ns)
            if step.delay.prefills:
                prefilling = slots[step.delay.prefills]
                self._made_ns[prefilling[self._is_first_due[prefilling]]] = start_ns
            if is_late:
                for edge in [block for block in self._blocks if block.kind == EDGE]:
                    if start_ns <= edge.at_ns < step.end_ns:
                        self._resume_step(step, edge.slots.item(0), edge.at_ns)
        if members is not None:  # whether they are final by now depends on when windows are booked
            has_ended = np.isin(self.state[slots], (LEAVING, FREE))
            has_ended[members] = False
            slots = np.where(has_ended, UNKNOWN_SLOT, slots)
        given = slots, step.delay, step.grip, step.weights, start_ns
        part: Floats | None = None
        if step.begins_ns is not None:
            part = (step.end_ns - step.begins_ns) / max(1, step.end_ns - start_ns)
        if members is not None:
            of_members = np.zeros(len(slots))
            of_members[members] = 1.0 if part is None else part[members]
            part = of_members
        step.taken = replica.blame.step(*given, *span, part)

    def _begins_ns(self, step: Step) -> Ints:
        """Return the start of each member's wait for a step: the end of its earlier steps."""
        begins_ns = np.full(len(step.slots), step.start_ns)
        cut_ns = self._cut_ns[step.slots]
        for before in self._recent:
            if before.dp_rank == step.dp_rank and step.start_ns < before.end_ns < NEVER_NS:
                ends_ns = np.where(cut_ns >= before.planned_ns, cut_ns, before.end_ns)
                ends_ns[~np.isin(step.slots, before.slots)] = step.start_ns
                begins_ns = np.maximum(begins_ns, np.minimum(ends_ns, before.end_ns))
        np.minimum(begins_ns, step.end_ns, out=begins_ns)
        return begins_ns

    def hold(self, slots: Ints, since_ns: int) -> Step:
        """Hold back the boundaries of running requests in a step whose end is unknown.

        They are booked after `release`. A request that ends before that has a slowdown.

        Args:
            slots: slots of the requests.
            since_ns: start of the step, or of the requests' part of it.
        """
        none = np.zeros(len(slots), dtype=np.int64)
        delay = Delay(none, None, [], 0, 0, 0, excess_ns=NEVER_NS - since_ns)
        step = Step(slots, delay, since_ns, NEVER_NS, is_open=True)
        self._blocks.append(_Block(since_ns, NEVER_NS, STEP, slots, 0, step))
        self._recent.append(step)
        self._recent_until_ns = NEVER_NS
        return step

    def hang(self, slots: Ints, start_ns: int, end_ns: int, *, dp_rank: int) -> None:
        """Record that a replica was busy with running requests in part of such a step."""
        none = np.zeros(len(slots), dtype=np.int64)
        replica, span = self._run(dp_rank, start_ns, end_ns)
        delay = Delay(none, None, [], 0, 0, 0, 0)
        replica.blame.step(slots, delay, None, None, start_ns, *span)

    def _run(self, dp_rank: int, start_ns: int, end_ns: int) -> tuple[Replica, tuple[int, int]]:
        """Record busy time; return its replica and the interval spent on this step alone."""
        replica = self.replicas.on(dp_rank, self.device)
        span = self.device.step(start_ns, end_ns, is_work_there=self._num_in_flight > 0)
        if replica.device is not self.device:
            span = replica.device.step(start_ns, end_ns, is_work_there=False)
        return replica, span

    def release(self, held: list[Step]) -> None:
        """Release held-back requests: the step is about to be recorded, or did not exist."""
        steps = {id(step) for step in held}
        self._blocks = [block for block in self._blocks if id(block.step) not in steps]
        kept = [step for step in self._recent if id(step) not in steps]
        self._recent = deque(kept, maxlen=_MOST_RECENT)
        self._recent_until_ns = max((step.end_ns for step in kept), default=0)

    def untimed(self, slots: Ints, at_ns: int) -> None:
        """Record a step whose execution no rank reported."""
        members = self._admit(slots, at_ns, at_ns)
        waiting = slots if members is None else slots[members]
        self._blocks.append(_Block(at_ns, at_ns, UNTIMED, waiting))

    def pause(self, at_ns: int) -> None:
        """Record the start of a pause: waits from now on are `paused`."""
        self.pass_idle(at_ns)
        self.device.pause(at_ns)
        self.replicas.pause(at_ns)

    def unpause(self, at_ns: int) -> None:
        """Record the end of a pause."""
        self.pass_idle(at_ns)
        self.device.unpause(at_ns)
        self.replicas.unpause(at_ns)

    def pass_idle(self, until_ns: int) -> None:
        """Account for idle time of the device through `until_ns`, by whether it had requests."""
        self.device.idle(until_ns, is_work_there=self._num_in_flight > 0)

    def _admit(self, slots: Ints, at_ns: int, planned_ns: int) -> Ints | None:
        """Admit the members of a step; return those that wait for it, None for all.

        An engine that plans a step before it has read the tokens of the last one computes requests
        that have finished or were preempted since the plan. They do not wait for that step.

        slots: [members].
            at_ns: start of the step.
            planned_ns: time when its members were chosen.
        """
        is_running = self.state[slots] == RUNNING
        waits: Ints | None = None
        if self._last_cut_ns >= planned_ns or not is_running.all():
            cut_ns = self._cut_ns[slots]
            for slot, left_ns in zip(
                slots[~is_running].tolist(), cut_ns[~is_running].tolist(), strict=True
            ):
                if slot != UNKNOWN_SLOT and not (
                    self.state.item(slot) == HELD and left_ns >= planned_ns
                ):
                    self.note(slot, ADMITTED, at_ns)
            state = self.state[slots]
            is_over = (cut_ns <= at_ns) & ((state == LEAVING) | (cut_ns >= planned_ns))
            is_over |= (state == FREE) & (slots != UNKNOWN_SLOT)
            if is_over.any():
                waits = (~is_over).nonzero()[0]
        return waits

    def _resume_steps(self, slot: int, at_ns: int) -> None:
        """Continue the steps that the delivery of a request's first token interrupts."""
        if at_ns < self._recent_until_ns:
            for step in self._recent:
                if step.start_ns <= at_ns < step.end_ns:
                    self._resume_step(step, slot, at_ns)

    def _resume_step(self, step: Step, slot: int, at_ns: int) -> None:
        cut_ns = self._cut_ns.item(slot)
        if cut_ns <= at_ns and (cut_ns >= step.planned_ns or self.state.item(slot) == LEAVING):
            return  # it waits for the step no more
        members = (step.slots == slot).nonzero()[0]
        if len(members):
            rest = _Block(at_ns, step.end_ns, STEP, step.slots[members], 0, step, members)
            self._blocks.append(rest)

    def _cut_blame(self, slot: int, at_ns: int) -> None:
        """Exclude from the blame the part of a step that a request did not wait for."""
        if at_ns >= self._recent_until_ns:
            return
        cut_ns = self._cut_ns.item(slot)
        for step in self._recent:
            if cut_ns < step.planned_ns and step.start_ns <= at_ns < step.end_ns:
                for member in (step.slots == slot).nonzero()[0].tolist():
                    self._blame_less(step, member, at_ns, step.end_ns)

    def deliver_first(self, slot: int, at_ns: int) -> None:
        """Exclude from the blame the waits while the first token was being delivered.

        Args:
            slot: slot of the request, whose first token was delivered by itself.
            at_ns: time of that delivery.
        """
        made_ns = self._made_ns.item(slot)
        if made_ns < 0:
            return
        if (blame := self.replicas.blame(slot)) is not None:
            blame.delivered_first(slot, made_ns, at_ns)
        for step in reversed(self._recent):
            if step.start_ns <= made_ns:
                break
            if step.start_ns < at_ns:
                for member in (step.slots == slot).nonzero()[0].tolist():
                    self._blame_less(step, member, step.start_ns, at_ns)

    def _blame_less(self, step: Step, member: int, since_ns: int, until_ns: int) -> None:
        """Exclude from the blame an interval in which a member waited for a step."""
        if step.taken is None:
            return
        if step.begins_ns is not None:
            since_ns = max(since_ns, step.begins_ns.item(member))
        spent_ns = min(step.end_ns, until_ns) - since_ns
        if spent_ns > 0:
            blame = self.replicas.on(step.dp_rank, self.device).blame
            blame.cut(step.taken, member, spent_ns / (step.end_ns - step.start_ns))

    def _change(self, slot: int, at_ns: int, state: int, *, held_until_ns: int = 0) -> None:
        before = self.state.item(slot)
        if before == state:
            return
        self._num_changes += 1
        was, will = before in _IN_FLIGHT, state in _IN_FLIGHT
        if was is not will:
            self.pass_idle(at_ns)
            self._num_in_flight += will - was
        self.state[slot] = state
        if before == WAITING:
            self.replicas.admitted(slot, at_ns)
        if (blame := self.replicas.blame(slot)) is not None:
            if before == HELD:
                blame.resumed(slot, held_until_ns or at_ns)
            elif before == RUNNING:
                blame.leave_batch(slot)
            if state == RUNNING:
                blame.runs(slot)
            elif state == HELD:
                blame.preempted(slot, at_ns)
        if state == WAITING:
            self.replicas.queued(slot, at_ns)

    # --- one window ---------------------------------------------------------------------------

    def fold(self, until_ns: int | None) -> None:
        """Book all boundaries before a time, except held-back ones; None books all."""
        self.replicas.fold()
        blocks = sorted(self._blocks, key=_AT_NS)
        self._blocks = []
        self._held, self._hung = set(), set()
        if until_ns is not None:
            blocks = self._hold_back(blocks, until_ns)
        if blocks:
            self._book(blocks)

    def is_held(self, slot: int) -> bool:
        """Return whether boundaries of a request are held back."""
        return slot in self._held

    def is_hung(self, slot: int) -> bool:
        """Return whether a request is held back by a step whose end is unknown."""
        return slot in self._hung

    def _hold_back(self, blocks: list[_Block], until_ns: int) -> list[_Block]:
        """Keep the boundaries of the members of unfinished steps, from those steps on.

        A step is over for a request at a boundary that ends it (`_ENDS_STEP`); a step of unknown
        end is over when the request is.
        """
        if all(block.end_ns <= until_ns for block in blocks):
            return blocks
        since = np.full(len(self.state), len(blocks))
        """[slots], positions in the blocks."""
        is_open = np.zeros(len(self.state), dtype=np.bool_)
        for at, block in enumerate(blocks):
            if block.end_ns > until_ns:
                since[block.slots] = np.minimum(since[block.slots], at)
                if block.step is not None and block.step.is_open:
                    is_open[block.slots] = True
            elif block.kind == END:
                since[block.slots] = len(blocks)
            elif _ENDS_STEP[block.kind]:
                over = block.slots[~is_open[block.slots]]
                since[over] = len(blocks)
        since[UNKNOWN_SLOT] = len(blocks)
        is_held = since < len(blocks)
        self._held = set(is_held.nonzero()[0].tolist())
        self._hung = set((is_held & is_open).nonzero()[0].tolist())
        found: list[_Block] = []
        first = int(since.min())
        for at, block in enumerate(blocks[first:], first):
            is_kept = since[block.slots] <= at
            now, later = _divided(block, is_kept)
            if now is not None:
                found.append(now)
            if later is not None:
                self._blocks.append(later)
        return blocks[:first] + found

    def _book(self, blocks: list[_Block]) -> None:
        """Book a window: boundary rows, the gaps between them, and the steps among them."""
        blocks, emitted_ns = _with_emissions(blocks)
        sizes = np.array([len(block.slots) for block in blocks])
        slot = np.concatenate([block.slots for block in blocks])
        slot[self._is_over[slot]] = UNKNOWN_SLOT
        for block in blocks:
            if block.kind == END:
                self._is_over[block.slots] = True
        live = np.bincount(slot, minlength=len(self.state)).nonzero()[0]
        live = live[live != UNKNOWN_SLOT]
        if not len(live):
            return
        members = _Members(blocks, sizes)
        block_of = np.repeat(np.arange(len(blocks)), sizes)
        columns = np.array(
            [(b.at_ns, b.end_ns, b.kind, b.since_ns or b.at_ns, b.made_ns) for b in blocks]
            + [(0, 0, _CARRIED, 0, NEVER_NS)]
        ).T.copy()
        kept = (slot != UNKNOWN_SLOT).nonzero()[0]
        # The first row of each request is its state so far; its boundaries follow.
        slots = np.concatenate([live, slot[kept]])
        small = np.uint16 if len(self.state) <= 1 << 16 else np.int64
        order = slots.astype(small).argsort(kind="stable") - len(live)
        place = kept[np.maximum(order, 0)] if len(kept) else order
        place[order < 0] = -1
        of = np.append(block_of, 0)[place]
        of[place < 0] = -1
        is_first = of < 0
        if any(block.kind == END for block in blocks):
            keep = _up_to_end(columns[2, of] == END, is_first)
            place, of, is_first = place[keep], of[keep], is_first[keep]
        at_ns, end_ns, kind, since_ns, made_ns = (column.take(of) for column in columns)
        tail_ns = emitted_ns[of]
        has_tail = tail_ns >= 0
        tail_ns[~has_tail] = end_ns[~has_tail]
        for times_ns in (at_ns, end_ns, tail_ns):
            times_ns[is_first] = self.mark_ns[live]
        starts, group = is_first.nonzero()[0], is_first.cumsum() - 1
        before_ns, mark_ns = _marks(tail_ns, group, starts)
        ending = (_ENDS_STEP[kind] & (before_ns > at_ns)).nonzero()[0].tolist()
        uncut_ns = end_ns
        if ending:
            uncut_ns = end_ns.copy()
            for row in ending:
                _end_steps(at_ns, end_ns, tail_ns, kind, slice(starts[group[row]] + 1, row + 1))
            before_ns, mark_ns = _marks(tail_ns, group, starts)
        from_ns = np.maximum(at_ns, before_ns)
        is_step = kind == STEP
        rows = is_step.nonzero()[0]
        member = members.at[place[rows]]
        # States come from the boundary, or else from the row before it.
        is_inside = (kind == EMIT) & (at_ns < before_ns)
        state, substate = _STATE[kind], _SUBSTATE[kind]
        substate[is_inside] = -1
        substate[has_tail & (tail_ns >= before_ns)] = _EMITTED
        state[is_first], substate[is_first] = self._state[live], self._substate[live]
        state, substate = _filled_forward(state), _filled_forward(substate)
        behind = np.where(state == RUNNING, substate, state)
        cause = _GAP[np.concatenate([behind[:1], behind[:-1]]), kind]
        # A token of an unknown step, emitted inside the next step, was in output before it; its
        # delivery may end that step.
        is_late = is_step[1:-1] & (kind[2:] == EMIT) & (behind[:-2] == _COMPUTED)
        is_late &= (at_ns[2:] < uncut_ns[1:-1]) & (made_ns[2:] == NEVER_NS)
        cause[1:-1][is_late] = _OUTPUT
        # A token of a known step was in output from its end on, whatever came between.
        emission = _next((kind == EMIT) | has_tail, group)
        has_emission = emission >= 0
        is_gap = cause == _BY_GAP
        cause[is_gap & has_emission & (made_ns[emission] <= before_ns)] = _OUTPUT
        self._move_gaps(live, emission[starts], at_ns, made_ns)
        # Parts: a decode after a prefill shows that the first token was computed before it.
        is_prefill = np.zeros(len(kind), dtype=np.bool_)
        is_prefill[rows] = members.is_prefill[member]
        has_prefilled = _before(is_prefill, group, len(live)) | self._has_prefilled[live][group]
        part = np.zeros(len(kind), dtype=np.int64)
        part[is_first] = self._part[live]
        is_decode = np.zeros(len(kind), dtype=np.bool_)
        is_decode[rows] = members.is_decode[member]
        part[is_decode & has_prefilled] = _ON_ITS_WAY
        behind_part = np.zeros(len(kind), dtype=np.int64)
        behind_part[(kind == EMIT) | has_tail] = _ON_ITS_WAY
        behind_part[kind == EDGE] = _AFTER
        part[1:] = np.maximum(part[1:], behind_part[:-1] * ~is_first[1:])
        part = np.maximum.accumulate(part + 4 * group) - 4 * group
        cell = (group * 3 + part) * _NUM
        booked = np.zeros(len(live) * 3 * _NUM, dtype=np.int64)
        self._book_gaps(
            booked, cell, cause, kind, of, before_ns, from_ns, since_ns, state, live[group],
            is_gap & ~has_emission,
        )  # fmt: skip
        took_ns = np.maximum(end_ns - from_ns, 0)[rows]
        members.book(booked, cell[rows], member, took_ns)
        tail = has_tail.nonzero()[0]
        late_ns = np.maximum(tail_ns - np.maximum(end_ns, before_ns), 0)[tail]
        np.add.at(booked, cell[tail] + _OUTPUT, late_ns)
        self._rows[live] += booked.reshape(len(live), 3, _NUM)
        last = np.append(starts[1:], len(kind)) - 1
        self.mark_ns[live] = mark_ns[last]
        self._state[live], self._substate[live] = state[last], substate[last]
        self._part[live] = np.maximum(part[last], behind_part[last])
        self._has_prefilled[live] = (has_prefilled | is_prefill)[last]

    def _book_gaps(
        self,
        booked: Ints,
        cell: Ints,
        cause: Ints,
        kind: Ints,
        of: Ints,
        before_ns: Ints,
        at_ns: Ints,
        since_ns: Ints,
        state: NDArray[np.int8],
        slot: Ints,
        is_last: Flags,
    ) -> None:
        """Add the gaps between boundaries by cause; look up their busy and paused parts.

        `is_last` is whether a gap is kept for the next emission.
        """
        middle_ns = np.minimum(np.maximum(since_ns, before_ns), at_ns)
        rows = (at_ns > middle_ns).nonzero()[0]
        np.add.at(booked, cell[rows] + _BEHIND[kind[rows]], (at_ns - middle_ns)[rows])
        gap_ns = middle_ns - before_ns
        for row in (_IS_WRITTEN[kind] & (state == LEAVING)).nonzero()[0].tolist():
            # The engine had finished, and the connection accepted no more data.
            if gap_ns[row] > 0:
                since, until = before_ns.item(row), middle_ns.item(row)
                blocked_ns = self._blocked.within_ns(slot.item(row), since, until)
                cells = cell[row] + np.array([_BEHIND[DELIVERED], _OUTPUT])
                np.add.at(booked, cells, np.array([blocked_ns, -blocked_ns]))
        rows = ((gap_ns > 0) & (cause < _NUM)).nonzero()[0]
        np.add.at(booked, cell[rows] + cause[rows], gap_ns[rows])
        rows = ((gap_ns > 0) & (cause >= _NUM)).nonzero()[0]
        if not len(rows):
            return
        causes = cause[rows]
        # Rows of one step mostly share one interval, so each interval is looked up once.
        since_ns, until_ns = before_ns[rows], middle_ns[rows]
        at, lut = of[rows], np.empty(int(of[rows].max()) + 1, dtype=np.int64)
        lut[at] = np.arange(len(at))  # a row of each
        asks = np.bincount(at).nonzero()[0]
        chosen = lut[asks]
        lut[asks] = np.arange(len(asks))
        answer = lut[at]
        is_odd = (since_ns != since_ns[chosen][answer]) | (until_ns != until_ns[chosen][answer])
        odd = is_odd.nonzero()[0]
        answer[odd] = len(asks) + np.arange(len(odd))
        chosen = np.concatenate([chosen, odd])
        # A request that moves on during a pause was not held up by it.
        is_over = (causes[chosen] == _BY_ARRIVAL) | (kind[rows[chosen]] <= EMIT)
        busy_ns, paused_ns = self.replicas.within(
            slot[rows[chosen]], since_ns[chosen], until_ns[chosen], self.device, is_over=is_over
        )
        busy_ns, paused_ns = busy_ns[answer], paused_ns[answer]
        np.add.at(booked, cell[rows] + _BUSY[causes - _NUM], busy_ns)
        np.add.at(booked, cell[rows] + _REST[causes - _NUM], gap_ns[rows] - busy_ns - paused_ns)
        if paused_ns.any():
            np.add.at(booked, cell[rows] + _PAUSED, paused_ns)
        kept = is_last[rows] & ~self._is_over[slot[rows]]
        if kept.any():
            of_kept = slot[rows], since_ns, until_ns, cell[rows] // _NUM % 3, busy_ns, paused_ns
            added = _Gaps(*of_kept).where(kept)
            self._gaps = _Gaps(*map(np.concatenate, zip(self._gaps, added, strict=True)))

    def _move_gaps(self, live: Ints, emission: Ints, at_ns: Ints, made_ns: Ints) -> None:
        """Move the kept gaps to `output` in which a token emitted in this window was on its way.

        Args:
            live: slots with boundaries in the window.
            emission: row of the first emission of each of them in it; -1 for none.
            at_ns: [rows].
            made_ns: [rows].
        """
        gaps = self._gaps
        if not len(gaps.slot):
            return
        of_slot = np.full(len(self.state), -1)
        of_slot[live] = emission
        row = of_slot[gaps.slot]
        is_decided = (row >= 0) & (at_ns[row] >= gaps.until_ns)
        moved = gaps.where(is_decided & (made_ns[row] <= gaps.since_ns))
        took_ns = moved.until_ns - moved.since_ns
        rest_ns = took_ns - moved.busy_ns - moved.paused_ns
        of_gap = _OUTPUT, _BUSY[_BY_GAP - _NUM], _REST[_BY_GAP - _NUM], _PAUSED
        for cause, ns in zip(
            of_gap, (took_ns, -moved.busy_ns, -rest_ns, -moved.paused_ns), strict=True
        ):
            np.add.at(self._rows, (moved.slot, moved.part, cause), ns)
        # Emissions refer to recent steps only, so older gaps stay as they are.
        oldest_ns = min((step.end_ns for step in self._recent), default=NEVER_NS)
        is_kept = ~is_decided & ~self._is_over[gaps.slot] & (gaps.since_ns >= oldest_ns)
        self._gaps = gaps.where(is_kept)

    # --- reading ------------------------------------------------------------------------------

    def rows_of(
        self, slot: int, *, is_streamed: bool, edge_ns: int | None = None
    ) -> tuple[Ints, Ints]:
        """Return a request's booked time up to its first token, and after it: [causes] each.

        Args:
            slot: slot of the request.
            is_streamed: whether its first token was delivered by itself; until then it is in
                delivery, whatever else is computed for the request meanwhile.
            edge_ns: time when its first token was delivered; None if it was not.
        """
        up_to_first, on_its_way, after = self._rows[slot].copy()
        if is_streamed and self._part.item(slot) == _AFTER:
            spent_ns = sum(on_its_way.tolist())
            blocked_ns = 0
            if edge_ns is not None:
                since_ns = edge_ns - spent_ns
                blocked_ns = min(self._blocked.within_ns(slot, since_ns, edge_ns), spent_ns)
            up_to_first[_OUTPUT] += spent_ns - blocked_ns
            if blocked_ns:
                up_to_first[_BEHIND[DELIVERED]] += blocked_ns
        else:
            up_to_first += on_its_way
        return up_to_first, after

    def is_unbooked(self, slot: int, arrived_ns: int) -> bool:
        """Return whether only the arrival of a request is known."""
        return self.state.item(slot) == ARRIVING and self.mark_ns.item(slot) == arrived_ns

    def add_before(self, slot: int, row: Ints) -> None:
        """Add the time before a request's first boundary: [causes]."""
        self._rows[slot, _UP_TO_FIRST] += row

    def until(self, slot: int, until_ns: int, *, unfolded: tuple[int, int] | None) -> Ints:
        """Return a request's time since its mark by cause, by the same rules: [causes].

        A running request is covered only through the start of the oldest unfolded step.

        Args:
            slot: slot of the request.
            until_ns: current time.
            unfolded: interval in which the device was busy with steps that are not folded; None
                without such steps.
        """
        row = np.zeros(_NUM, dtype=np.int64)
        mark_ns, state = self.mark_ns.item(slot), self.state.item(slot)
        if state not in _IN_FLIGHT and state != ARRIVING:
            return row
        if state == RUNNING and unfolded is not None:
            until_ns = min(until_ns, unfolded[0])
        if until_ns <= mark_ns:
            return row
        if state == RUNNING and slot in self._hung:
            row[_SLOWDOWN] = until_ns - mark_ns
            return row
        cause = int(_GAP[state, STEP])
        since, until = np.array([mark_ns]), np.array([until_ns])
        device = self.replicas.device_of(slot, self.device)
        busy, paused = device.within(since, until, is_over=np.array([state == ARRIVING]))
        busy_ns, paused_ns = busy.item(), paused.item()
        if unfolded is not None and not paused_ns:
            begun_ns = max(unfolded[0], device.ended_ns, mark_ns)
            busy_ns += max(0, min(until_ns, unfolded[1]) - begun_ns)
        row[_BUSY[cause - _NUM]] += busy_ns
        row[_REST[cause - _NUM]] += until_ns - mark_ns - busy_ns - paused_ns
        row[_PAUSED] += paused_ns
        return row


class _Members:
    """Members of a window's steps, and the wait of each in its step.

    Attributes:
        at: [rows of all blocks], the member of each row of a step.
        is_prefill: [members].
        is_decode: [members].
        own_ns: [members].
        step_of: [members].
        of_steps: [7, steps], both classes, explained time, excess, rank wait, and the causes of
            the excess and of a decode's own time.
        whole_ns: [steps].
    """

    def __init__(self, blocks: list[_Block], sizes: Ints) -> None:
        steps: dict[int, Step] = {id(b.step): b.step for b in blocks if b.step is not None}
        self._steps = list(steps.values())
        self._sizes = np.array([len(step.slots) for step in self._steps], dtype=np.int64)
        offsets = self._sizes.cumsum() - self._sizes
        offset_of = dict(zip(steps, offsets.tolist(), strict=True))
        starts = sizes.cumsum() - sizes
        base = np.array([offset_of.get(id(block.step), 0) for block in blocks]) - starts
        self.at: Ints = np.arange(int(sizes.sum())) + np.repeat(base, sizes)
        for block, start in zip(blocks, starts.tolist(), strict=True):
            if block.members is not None:
                self.at[start : start + len(block.members)] = (
                    offset_of[id(block.step)] + block.members
                )
        self.is_prefill = np.zeros(int(self._sizes.sum()), dtype=np.bool_)
        prefills = [
            offset + at
            for step, offset in zip(self._steps, offsets.tolist(), strict=True)
            for at in step.delay.prefills
        ]
        self.is_prefill[prefills] = True
        self.is_decode = ~self.is_prefill
        for step, offset in zip(self._steps, offsets.tolist(), strict=True):
            if step.is_open:
                self.is_decode[offset : offset + len(step.slots)] = False
        self.step_of: Ints = np.repeat(np.arange(len(steps)), self._sizes)
        self.own_ns: Ints = np.zeros(0, dtype=np.int64)
        if steps:
            self.own_ns = np.concatenate([step.delay.own_ns for step in self._steps])
        self.of_steps: Ints = np.array(
            [
                (d.decode_class_ns, d.prefill_class_ns, d.explained_ns, d.excess_ns - s.wait_ns,
                 s.wait_ns, _COLD_START if s.is_cold else _SLOWDOWN,
                 _DRAFT if s.is_draft else _DECODE_OWN)
                for s in self._steps for d in (s.delay,)
            ],
            dtype=np.int64,
        ).reshape(-1, 7).T.copy()  # fmt: skip
        self.whole_ns: Ints = self.of_steps[2:5].sum(axis=0)

    def book(self, booked: Ints, cell: Ints, member: Ints, took_ns: Ints) -> None:
        """Add steps; scale down the parts of a row that is partly booked.

        Args:
            booked: [cells], target of the addition.
            cell: [rows], first cell of the row's request.
            member: [rows].
            took_ns: [rows], largest time that each may book.
        """
        if not len(member):
            return
        of_steps = self.of_steps.take(self.step_of[member], axis=1)
        decode_ns, prefill_ns, explained_ns, excess_ns, wait_ns, excess, decode_own = of_steps
        is_prefill, own_ns = self.is_prefill[member], self.own_ns[member]
        class_ns = np.where(is_prefill, prefill_ns, decode_ns)
        own = np.where(is_prefill, _PREFILL_OWN, _DECODE_OWN)
        own_cause = np.where(is_prefill, _PREFILL_OWN, decode_own)
        columns: list[Ints | int] = [own_cause, own + 1, own + 2, excess, _RANK_WAIT]
        parts = [own_ns, class_ns - own_ns, explained_ns - class_ns, excess_ns, wait_ns]
        delays = [step.delay for step in self._steps]
        if any(delay.recompute_ns is not None for delay in delays):
            again = [_none(d.own_ns) if d.recompute_ns is None else d.recompute_ns for d in delays]
            columns.append(_RECOMPUTE)
            parts.append(np.concatenate(again)[member])
            parts[1] = parts[1] - parts[-1]
        cut = (took_ns < self.whole_ns[self.step_of[member]]).nonzero()[0]
        if len(cut):
            left = scaled(np.stack([part[cut] for part in parts], axis=1), took_ns[cut])
            for part, found in zip(parts, left.T, strict=True):
                part[cut] = found
        for column, part in zip(columns, parts, strict=True):
            if part.any():
                np.add.at(booked, cell + column, part)


def scaled(rows: Ints, totals_ns: Ints) -> Ints:
    """Scale rows of whole nanoseconds down to totals, each by largest remainder.

    Args:
        rows: [members, causes].
        totals_ns: [members]; a row that sums to no more than its total stays as it is.

    Returns:
        [members, causes]
    """
    wholes_ns = rows.sum(axis=1)
    exact = rows * (totals_ns / np.maximum(wholes_ns, 1))[:, None]
    parts = np.minimum(np.floor(exact).astype(np.int64), rows)
    missing = totals_ns - parts.sum(axis=1)
    member, order = np.arange(len(rows))[:, None], (parts - exact).argsort(axis=1, kind="stable")
    while True:
        has_room = (rows > parts)[member, order]
        is_given = has_room & (has_room.cumsum(axis=1) <= missing[:, None])
        if not is_given.any():
            break
        parts[member, order] += is_given
        missing -= is_given.sum(axis=1)
    found: Ints = np.where((totals_ns < wholes_ns)[:, None], parts, rows)
    return found


def _none(like: Ints) -> Ints:
    return np.zeros_like(like)


def _with_emissions(blocks: list[_Block]) -> tuple[list[_Block], Ints]:
    """Join each step with the emission directly after it if all its members emit.

    Returns:
        the blocks, and the emission times that were joined with them, else -1: [blocks + 1].
    """
    found: list[_Block] = []
    emitted_ns: list[int] = []
    for block in blocks:
        if block.kind == EMIT and found and emitted_ns[-1] < 0:
            last = found[-1]
            if (
                last.kind == STEP
                and block.made_ns >= last.end_ns <= block.at_ns
                and len(block.slots) == len(last.slots)
                and (block.slots is last.slots or bool((block.slots == last.slots).all()))
            ):
                emitted_ns[-1] = block.at_ns
                continue
        found.append(block)
        emitted_ns.append(-1)
    return found, np.array([*emitted_ns, -1])


def _divided(block: _Block, is_kept: Flags) -> tuple[_Block | None, _Block | None]:
    """Divide a block into the part to book now and the part to keep."""
    if is_kept.all():
        return None, block
    if not is_kept.any():
        return block, None
    divided = []
    for part in (~is_kept, is_kept):
        members = None
        if block.step is not None:
            members = part.nonzero()[0] if block.members is None else block.members[part]
        divided.append(replace(block, slots=block.slots[part], members=members))
    return divided[0], divided[1]


def _marks(tail_ns: Ints, group: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return the time through which each row's request is booked, before and after the row."""
    base_ns = int(tail_ns.min())
    span_ns = int(tail_ns.max()) - base_ns + 1
    if span_ns * len(starts) < 1 << 62:
        lift = group * span_ns - base_ns
        mark_ns: Ints = np.maximum.accumulate(tail_ns + lift) - lift
    else:
        parts = np.split(tail_ns, starts[1:])
        mark_ns = np.concatenate([np.maximum.accumulate(part) for part in parts])
    before_ns = np.empty_like(mark_ns)
    before_ns[1:] = mark_ns[:-1]
    before_ns[starts] = tail_ns[starts]
    return before_ns, mark_ns


def _end_steps(at_ns: Ints, end_ns: Ints, tail_ns: Ints, kind: Ints, rows: slice) -> None:
    """End the steps of a request at the last of these rows, a boundary that no step outlasts."""
    begun_ns, over_ns = at_ns[rows], at_ns[rows][-1]
    is_cut = (kind[rows] == STEP) & (end_ns[rows] > over_ns)
    for times_ns in (end_ns[rows], tail_ns[rows]):
        times_ns[is_cut] = np.maximum(begun_ns[is_cut], over_ns)


def _filled_forward(values: NDArray[np.int8]) -> NDArray[np.int8]:
    """Replace each negative value by the last non-negative one before it."""
    last = np.where(values >= 0, np.arange(len(values)), 0)
    return values[np.maximum.accumulate(last)]


def _next(flags: Flags, group: Ints) -> Ints:
    """Return the first row of the same request from each row on that has the flag; -1 for none."""
    num = len(flags)
    at = np.where(flags, np.arange(num), num)
    found: Ints = np.minimum.accumulate(at[::-1])[::-1]
    found[np.append(group, -1)[found] != group] = -1
    return found


def _before(flags: Flags, group: Ints, num_groups: int) -> Flags:
    """Return whether a row of the same request before it has the flag."""
    flagged = flags.nonzero()[0][::-1]
    first = np.full(num_groups, len(flags))
    first[group[flagged]] = flagged  # of several in a group, the last to be assigned
    found: Flags = np.arange(len(flags)) > first[group]
    return found


def _up_to_end(is_end: Flags, is_first: Flags) -> Flags:
    """Return which rows have no END of their request before them."""
    group = is_first.cumsum() - 1
    return ~_before(is_end, group, group.item(-1) + 1)
