"""The latency ledger: every nanosecond of a request's life has exactly one cause.

Each request carries a mark: its life is explained up to there. Whatever happens next, at time t,
explains [mark, t) by the state the request was in and moves the mark to t. So the rows sum to the
request's life by construction, in any order of events, with no residual line and no negative row:
whatever is booked moves the mark by just as much.

The ledger sweeps over one engine's events in the order of time. While a step is open its members'
delay is not yet booked; at its end each member's row is added (see `counterfactual`). A token that
leaves the engine in the middle of the next step (overlapped scheduling) cuts its row pro rata; of
two steps that overlap, the earlier has its members first.

    │ frontend │ queue, queue_idle │ cpu_gap │ step │ output │ cpu_gap │ step … │ output, delivery
    received   queued              admitted  open  close     emitted            finished

Rows are integers in columns of one matrix, a request being a slot: no object per slice or token.
Slot 0 is nobody: members that leave an open step are replaced by it. While a batch steps and emits
together, what it is booked is kept as sums (see `together`); whoever asks for `rows` or `mark_ns`
gets them written first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.blame import Blame
from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.occupancy import Occupancy
from inferscope.attribution.open_step import Attendance, OpenStep, scaled, taken_until
from inferscope.attribution.stays import Grip
from inferscope.attribution.together import Together, outsiders
from inferscope.records import CAUSES

Ints = NDArray[np.int64]

FREE, ARRIVING, WAITING, RUNNING, HELD, LEAVING = range(6)
"""States of a slot: before the queue, in it, admitted, preempted, done in the engine."""
NOBODY = 0
_IS_IN_FLIGHT = [state in (WAITING, RUNNING, HELD) for state in range(6)]
"""By state."""

_C = {cause: column for column, cause in enumerate(CAUSES)}
_DELIVERY = _C["delivery"]
_OUTPUT, _CPU_GAP, _NOT_SCHEDULED = _C["output"], _C["cpu_gap"], _C["not_scheduled"]
_QUEUE, _QUEUE_IDLE, _PREEMPTED = _C["queue"], _C["queue_idle"], _C["preempted"]
_SLOWDOWN, _COLD_START = _C["slowdown"], _C["cold_start"]
_FRONTEND, _PAUSED = _C["frontend"], _C["paused"]
_HELD_UP = {ARRIVING: _FRONTEND, RUNNING: _CPU_GAP, HELD: _PREEMPTED}
"""By state, what a request waits for that is in no step while the engine is not paused."""
_FEW = 8
"""More than so many members leave a team at once by breaking it up."""


class Ledger:
    """Books the time of one engine's requests. All times are host nanoseconds.

    Attributes:
        state: [slots].
        device: where the device's time goes.
        blame: which other requests they waited for.
    """

    def __init__(self, num_slots: int = 256) -> None:
        """Start with room for this many requests; `grow` makes more."""
        self._rows = np.zeros((num_slots, len(CAUSES)), dtype=np.int64)
        self._mark_ns = np.zeros(num_slots, dtype=np.int64)
        self.state = np.zeros(num_slots, dtype=np.int8)
        self._busy_mark_ns = np.zeros(num_slots, dtype=np.int64)
        self.device = Occupancy()
        self.blame = Blame(num_slots)
        self._blamed_until_ns = 0
        """Who holds what others wait for is blamed up to here."""
        self._open: list[OpenStep] = []
        """By their ends."""
        self._attendance = Attendance(num_slots, self._open)
        self._num_in_flight = 0
        self._num_running = 0
        self._num_changes = 0
        """Of who runs."""
        self._paused_ns: int | None = None
        """Since when the engine is paused."""
        self._last_pause = (0, 0)
        """The one that is over: from when to when."""
        self._together: Together | None = None
        """Who stands at one mark; all of them run."""

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        self._scatter()
        more = num_slots - len(self.state)
        self._rows = np.vstack([self._rows, np.zeros((more, len(CAUSES)), dtype=np.int64)])
        self._mark_ns = np.concatenate([self._mark_ns, np.zeros(more, dtype=np.int64)])
        self.state = np.concatenate([self.state, np.zeros(more, dtype=np.int8)])
        self._attendance.grow(num_slots)
        self.blame.grow(num_slots)
        self._busy_mark_ns = np.concatenate([self._busy_mark_ns, np.zeros(more, dtype=np.int64)])

    @property
    def rows(self) -> Ints:
        """Return what is booked so far: [slots, causes]."""
        if self._together is not None:
            self._together.write()
        return self._rows

    @property
    def mark_ns(self) -> Ints:
        """Return up to where that is: [slots]."""
        if self._together is not None:
            self._together.write()
        return self._mark_ns

    def row(self, slot: int) -> Ints:
        """Return a copy of what is booked for one request: [causes]."""
        together = self._together
        if together is not None and slot in together.members:
            return together.row(slot)
        own: Ints = self._rows[slot].copy()
        return own

    def mark_of(self, slot: int) -> int:
        """Return up to where that is."""
        together = self._together
        if together is not None and slot in together.members:
            return together.mark_ns
        return self._mark_ns.item(slot)

    # --- requests -----------------------------------------------------------------------------

    def begin(self, slot: int, at_ns: int, state: int) -> None:
        """Start a request's ledger, in a free slot."""
        self._rows[slot] = 0
        self._mark_ns[slot] = at_ns
        self._attendance.num_steps()[slot] = 0
        self.state[slot] = FREE
        self._change(slot, at_ns, state)

    def queued(self, slot: int, at_ns: int) -> None:
        """Move a request from the front end into the queue."""
        if self.state[slot] == ARRIVING:
            if held_ns(
                self._last_pause, self.mark_of(slot), at_ns
            ):  # a front end that held it tells of it only now
                self._book(slot, max(self._last_pause[0], self.mark_of(slot)), _FRONTEND)
                self._book(slot, self._last_pause[1], _PAUSED)
            self._book(slot, at_ns, _FRONTEND)
            self._change(slot, at_ns, WAITING)

    def admitted(self, slot: int, at_ns: int) -> None:
        """Move a waiting or preempted request into the batch."""
        state = self.state[slot]
        if state == ARRIVING:
            self.queued(slot, at_ns)
        if state in (ARRIVING, WAITING):
            self._book_wait(slot, at_ns)
        elif state == HELD:
            self._book_held_up(slot, at_ns, _PREEMPTED)
        else:
            return
        self._change(slot, at_ns, RUNNING)

    def preempted(self, slot: int, at_ns: int) -> None:
        """Take a running request out of the batch."""
        if self.state[slot] == RUNNING:
            self._leave_steps(slot, at_ns)
            self._book_held_up(slot, at_ns, _CPU_GAP)
            self._change(slot, at_ns, HELD)

    def transferred(self, slot: int, start_ns: int, end_ns: int) -> None:
        """Book what a request in the queue waited for KV blocks that another worker sent."""
        if self.state[slot] != WAITING or end_ns <= self.mark_of(slot):
            return
        self._book_wait(slot, start_ns)
        self._book(slot, end_ns, _C["kv_transfer"])
        self._busy_mark_ns[slot] = self._busy_until(end_ns)

    def finished(self, slot: int, at_ns: int, *, emitted_ns: int) -> None:
        """End a request in the engine; after its last token it was only being written out."""
        state = self.state[slot]
        if state == RUNNING:
            self._leave_steps(slot, at_ns)
            has_output = emitted_ns and emitted_ns >= self.mark_of(slot)
            self._book_held_up(slot, at_ns, _OUTPUT if has_output else _CPU_GAP)
        elif state == WAITING:
            self._book_wait(slot, at_ns)
        elif state == HELD:
            self._book_held_up(slot, at_ns, _PREEMPTED)
        elif state == ARRIVING:
            self._book_held_up(slot, at_ns, _FRONTEND)
        self._change(slot, at_ns, LEAVING)

    def delivered(self, slot: int, last_token_ns: int, at_ns: int, *, blocked_ns: int = 0) -> None:
        """Book the front end's part: writing out up to the last token, then the last byte.

        Args:
            slot: of a request that has ended in the engine.
            last_token_ns: when its last token was written.
            at_ns: when its last byte was.
            blocked_ns: of the time up to the last token, for how long the client did not read.
        """
        self._book(slot, last_token_ns, _OUTPUT)
        self._rows[slot, _OUTPUT] -= blocked_ns
        self._rows[slot, _DELIVERY] += blocked_ns
        self._book(slot, at_ns, _DELIVERY)

    def lost(self, slot: int, at_ns: int) -> None:
        """End a request whose engine is gone, at the time when that was decided."""
        self._leave_steps(slot, at_ns)
        self._book(slot, at_ns, _C["engine_lost"])
        self._change(slot, at_ns, LEAVING)

    def free(self, slot: int) -> None:
        """Give the slot back."""
        self._leave_steps(slot, self.mark_of(slot))
        self._change(slot, self.mark_of(slot), FREE)
        self.blame.end(slot)

    # --- the engine ---------------------------------------------------------------------------

    def paused(self, at_ns: int) -> None:
        """Note that the engine is paused: whoever waits from here on waits for that."""
        self.pass_idle(at_ns)
        self._paused_ns = at_ns

    def unpaused(self, at_ns: int) -> None:
        """Book the pause to all that have waited for its end."""
        self.pass_idle(at_ns)
        in_steps = self._attendance.num_steps()
        for slot in self.state.nonzero()[0].tolist():
            state = self.state.item(slot)
            if state == WAITING:
                self._book_wait(slot, at_ns)
            elif state in _HELD_UP and not in_steps.item(slot):
                self._book_held_up(slot, at_ns, _HELD_UP[state])
        if self._paused_ns is not None:
            self._last_pause = (self._paused_ns, at_ns)
        self._paused_ns = None

    # --- tokens -------------------------------------------------------------------------------

    def emitted(self, slots: Ints, at_ns: int) -> None:
        """Note that tokens of these requests left the engine's loop."""
        if self._is_emitted_together(slots, at_ns):
            return
        running = slots[(self.state[slots] == RUNNING) & (self.mark_ns[slots] < at_ns)]
        if not len(running):
            return
        self._scatter()
        is_emitting = np.zeros(len(self.state), dtype=np.bool_)
        is_emitting[running] = True
        for step in self._open:
            self._cut(step, is_emitting[step.slots].nonzero()[0], at_ns)
        if self._open:
            running = running[self._attendance.num_steps()[running] == 0]
        self.rows[running, _OUTPUT] += at_ns - self.mark_ns[running]
        self.mark_ns[running] = at_ns

    def _is_emitted_together(self, slots: Ints, at_ns: int) -> bool:
        """Book an emission of those who stand together, and tell whether it was one."""
        together = self._together
        if together is None or self._open:
            return False
        if together.team is not slots:
            emitting = set(slots.tolist())
            silent = together.members - emitting
            if len(emitting) + len(silent) > len(together.members) or len(silent) > _FEW:
                return False
            if at_ns > together.mark_ns:
                for slot in silent:
                    together.leave(slot)
                together.team = slots if len(slots) == len(emitting) else None
        if at_ns > together.mark_ns:
            together.emit(at_ns)
        return True

    # --- steps --------------------------------------------------------------------------------

    def open_step(
        self,
        slots: Ints,
        delay: Delay,
        *,
        start_ns: int,
        end_ns: int,
        is_cold: bool,
        grip: Grip | None = None,
    ) -> None:
        """Begin a step; between the members' marks and its start the host had the floor.

        Args:
            slots: [members], each request once.
            delay: what each member waits for.
            start_ns: on the earliest rank.
            end_ns: on the latest.
            is_cold: the step was the first of its shape.
            grip: what the members hold that keeps others out; None where that is not known.
        """
        self.close_steps(start_ns)
        members = slots if self._is_brought_together(slots, start_ns) else None
        if members is None:
            members = self._gather(slots, start_ns)
        is_whole = members is slots and self._num_running == len(slots)
        if not self._open:
            self.device.begin_step(start_ns, is_work_there=self._is_work_there)
        step = OpenStep(
            members,
            delay,
            start_ns=start_ns,
            end_ns=end_ns,
            excess_column=_COLD_START if is_cold else _SLOWDOWN,
            whole_at=self._num_changes if is_whole else -1,
            grip=grip,
        )
        self.blame.step(members, delay, grip)
        if self._together is None:
            taken_ns = taken_until(members, self._mark_ns, self._open)
            late = (taken_ns > start_ns).nonzero()[0]
            if len(late):
                # Their lives are explained beyond the start, or will be: book only the rest.
                kept_ns = np.maximum(end_ns - taken_ns[late], 0)
                step.rows()[late] = scaled(step.rows()[late], kept_ns)
        self._open.append(step)
        if len(self._open) > 1:
            self._open.sort(key=lambda step: step.end_ns)

    def take_back(self, slot: int, since_ns: int) -> None:
        """Undo what a running request was booked since a time, if all of it was slowdown."""
        self._part(slot)
        spent_ns = self._mark_ns.item(slot) - since_ns
        if self.state.item(slot) == RUNNING and 0 < spent_ns <= self._rows.item(slot, _SLOWDOWN):
            self._rows[slot, _SLOWDOWN] -= spent_ns
            self._mark_ns[slot] = since_ns

    def _gather(self, slots: Ints, start_ns: int) -> Ints:
        """Bring all members into the batch and those running to the start; return the members."""
        is_running = self.state[slots] == RUNNING
        if np.count_nonzero(is_running) < len(slots):
            for slot in slots[~is_running].tolist():
                self.admitted(slot, start_ns)
            is_running = self.state[slots] == RUNNING
            if np.count_nonzero(is_running) < len(slots):
                slots = np.where(is_running, slots, NOBODY)  # some have ended
                self._book_gap(None, start_ns)
                return slots
        self._book_gap(slots if self._num_running == len(slots) else None, start_ns)
        if not self._open and np.maximum.reduce(self._mark_ns[slots], initial=0) == start_ns:
            # None of those running stands before it now.
            self._together = self._team_at(slots, start_ns)
        return slots

    def _is_brought_together(self, slots: Ints, start_ns: int) -> bool:
        """Bring those who stand together, and some who join them, to the start of their step.

        Returns:
            False where that is not all there is to it: `_gather` does the rest.
        """
        together = self._together
        if together is None or self._open or together.mark_ns > start_ns:
            return False
        joining: list[int] = []
        if together.team is not slots:
            joining = outsiders(slots, together.is_member)
            if len(slots) - len(joining) < len(together.members):
                return False
            for slot in joining:
                self.admitted(slot, start_ns)
                if self.state.item(slot) != RUNNING or self._mark_ns.item(slot) > start_ns:
                    return False
        if self._num_running != len(slots):
            return False
        together.wait(start_ns)
        for slot in joining:
            self._book(slot, start_ns, _CPU_GAP)
            together.join(slot)
        together.team = slots
        return True

    def _team_at(self, slots: Ints, mark_ns: int) -> Together:
        return Together(slots, mark_ns, rows=self._rows, marks_ns=self._mark_ns)

    def _part(self, slot: int) -> None:
        """Note that a request will stand elsewhere than the team."""
        together = self._together
        if together is not None and slot in together.members:
            together.leave(slot)

    def _scatter(self) -> None:
        """Note that somebody in the team will, nobody knows who."""
        if self._together is not None:
            self._together.write()
            self._together = None

    def _book_gap(self, everybody: Ints | None, start_ns: int) -> None:
        """Book what lies between the marks of those running and the start of a step.

        Args:
            everybody: the slots that are running, if known.
            start_ns: of the step.
        """
        self._scatter()
        running = self._bystanders() if everybody is None or self._open else everybody
        column = _NOT_SCHEDULED if self._open else _CPU_GAP
        waited_ns = start_ns - self._mark_ns[running]
        np.maximum(waited_ns, 0, out=waited_ns)
        self._rows.reshape(-1)[running * len(CAUSES) + column] += waited_ns
        self._mark_ns[running] += waited_ns

    def close_steps(self, until_ns: int) -> None:
        """Book the steps that end by then."""
        while self._open and self._open[0].end_ns <= until_ns:
            self._close(self._open.pop(0))

    def _close(self, step: OpenStep) -> None:
        slots, end_ns, parts = step.slots, step.end_ns, step.parts
        if self._together is not None and self._together.team is not slots:
            self._scatter()
        together = self._together
        self._attendance.end(step)
        if parts is not None:
            self._scatter()
            np.add.at(self._rows, slots, parts)
            np.add.at(self._mark_ns, slots, parts.sum(axis=1))
        elif together is None:
            # The members stood at its start, and what it books is all of its time.
            step.book(self._rows)
            self._mark_ns[slots] = end_ns
            if np.minimum.reduce(slots, initial=1) > NOBODY:
                self._together = self._team_at(slots, end_ns)
        elif not together.book(step):
            step.book(self.rows)
            together.stand(end_ns)
        if step.whole_at != self._num_changes or self._open:
            for slot in self._bystanders().tolist():
                if self.mark_of(slot) < end_ns:
                    self._book(slot, end_ns, _NOT_SCHEDULED)
        if self.blame.num_waiting:
            self._hold(step, end_ns)
        self.device.pass_busy(end_ns)

    def _bystanders(self) -> Ints:
        """Return the slots that run but are in no step."""
        found: Ints = ((self.state == RUNNING) & (self._attendance.num_steps() == 0)).nonzero()[0]
        return found

    def _cut(self, step: OpenStep, members: Ints, at_ns: int) -> None:
        """Book members' parts of an open step up to `at_ns`, keep the rest for its end."""
        slots = step.slots[members]
        spent_ns = at_ns - np.maximum(self.mark_ns[slots], step.start_ns)
        is_cut = (spent_ns > 0) & (slots != NOBODY)
        if not is_cut.any():
            return
        self._scatter()
        members, slots = members[is_cut], slots[is_cut]
        parts = scaled(step.rows()[members], spent_ns[is_cut])
        self._rows[slots] += parts
        self._mark_ns[slots] += parts.sum(axis=1)
        step.rows()[members] -= parts

    def _leave_steps(self, slot: int, at_ns: int) -> None:
        """Take a request out of the open steps: what it has spent there is booked."""
        if self._open and self._attendance.num_steps()[slot]:
            for step in self._open:
                members = (step.slots == slot).nonzero()[0]
                if not len(members):
                    continue
                self._cut(step, members, at_ns)
                step.rows()[members] = 0
                step.slots = step.slots.copy()  # the team's own array is not ours to change
                step.slots[members] = NOBODY
            self._attendance.num_steps()[slot] = 0

    # --- marks --------------------------------------------------------------------------------

    def _book(self, slot: int, until_ns: int, column: int) -> None:
        self._part(slot)
        spent = until_ns - self._mark_ns.item(slot)
        if spent > 0:
            self._rows[slot, column] += spent
            self._mark_ns[slot] = until_ns

    def _book_held_up(self, slot: int, until_ns: int, column: int) -> None:
        """Book a wait: from where the engine is paused, to that."""
        if self._paused_ns is not None:
            self._book(slot, min(self._paused_ns, until_ns), column)
            column = _PAUSED
        self._book(slot, until_ns, column)

    def _book_wait(self, slot: int, until_ns: int) -> None:
        """Book a wait in the queue: from where the engine is paused, to that."""
        if self._paused_ns is None:
            self._split_wait(slot, until_ns)
            return
        self._split_wait(slot, min(self._paused_ns, until_ns))
        self._book(slot, until_ns, _PAUSED)
        self._busy_mark_ns[slot] = self._busy_until(until_ns)

    def _split_wait(self, slot: int, until_ns: int) -> None:
        """Split a wait: behind other requests' steps, or with the device idle."""
        spent = until_ns - self._mark_ns.item(slot)
        if spent <= 0:
            return
        busy = self._busy_until(until_ns) - self._busy_mark_ns.item(slot)
        busy = max(0, min(spent, busy))
        self._rows[slot, _QUEUE] += busy
        self._rows[slot, _QUEUE_IDLE] += spent - busy
        self._mark_ns[slot] = until_ns

    def waited_ns(self, slot: int) -> int:
        """Return how long a request in the queue has waited for steps that have ended by now."""
        if self.state.item(slot) != WAITING:
            return 0
        return max(0, self.device.busy_ns - self._busy_mark_ns.item(slot))

    def _hold(self, step: OpenStep, until_ns: int) -> None:
        """Blame a step's members for its time up to here, in which others waited in the queue."""
        since_ns = max(self._blamed_until_ns, self.device.mark_ns or 0)
        if until_ns > since_ns:
            self.blame.hold(step.slots, step.delay, step.grip, until_ns - since_ns)
            self._blamed_until_ns = until_ns

    def _queue_changes(self, slot: int, at_ns: int, *, is_coming: bool) -> None:
        """Let a request into the queue or out of it, with those blamed who held it up so far."""
        if self._open and self.blame.num_waiting:
            self._hold(self._open[0], min(at_ns, self._open[0].end_ns))
        elif is_coming:
            self._blamed_until_ns = max(self._blamed_until_ns, at_ns)
        if is_coming:
            self.blame.queued(slot, at_ns)
        else:
            self.blame.admitted(slot, self._busy_until(at_ns) - self._busy_mark_ns.item(slot))

    def _busy_until(self, at_ns: int) -> int:
        end_ns = self._open[-1].end_ns if self._open else None
        return self.device.busy_until(at_ns, open_until_ns=end_ns)

    def _change(self, slot: int, at_ns: int, state: int) -> None:
        before = self.state.item(slot)
        will = _IS_IN_FLIGHT[state]
        if _IS_IN_FLIGHT[before] is not will:
            self.pass_idle(at_ns)
            self._num_in_flight += 1 if will else -1
        if before == WAITING:
            self._queue_changes(slot, at_ns, is_coming=False)
        elif before == HELD:
            self.blame.resumed(slot, at_ns)
        elif before == RUNNING:
            self.blame.left(slot)
            self._part(slot)
            self._num_running -= 1
            self._num_changes += 1
        if state == RUNNING:
            self._num_running += 1
            self._num_changes += 1
        self.state[slot] = state
        if state == WAITING:
            self._busy_mark_ns[slot] = self._busy_until(at_ns)
            self._queue_changes(slot, at_ns, is_coming=True)
        elif state == HELD:
            self.blame.preempted(slot, at_ns)

    # --- the device ---------------------------------------------------------------------------

    def pass_idle(self, until_ns: int) -> None:
        """Explain the device's idle time up to here: somebody was waiting, or nobody was there."""
        if not self._open:
            self.device.pass_idle(until_ns, is_work_there=self._is_work_there)

    @property
    def _is_work_there(self) -> bool:
        """Tell whether an idle device is kept waiting; a paused engine has no work for it."""
        return self._num_in_flight > 0 and self._paused_ns is None


def held_ns(pause: tuple[int, int], since_ns: int, until_ns: int) -> int:
    """Return for how long of its way to the queue a request was held by a pause.

    Whoever comes to the queue before the pause is over was not held on the way.

    Args:
        pause: from when to when.
        since_ns: when the request was received.
        until_ns: when it came to the queue.
    """
    began_ns, ended_ns = pause
    return max(0, ended_ns - max(began_ns, since_ns)) if until_ns >= ended_ns else 0
