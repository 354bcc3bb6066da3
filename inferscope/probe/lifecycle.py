"""State machine of a probe: whether it records, and the records of each change.

    ON ── control byte ──► OFF ──┐
     │ ◄─────────────────────────┤ control byte, off and on again
     ├─── costs too much ──► OVER_BUDGET
     ├─── `give_up` ───────► UNSUPPORTED for good; `close` still writes CLOSED
     ├─── `close` ─────────► CLOSED      for good
     └─── any exception ───► FAILED      for good; so is a forked child's

Each change writes a keyframe, for readers that attach later, and a report, for those attached. The
control byte is followed between two steps: half a step cannot be attributed to requests.

Every call goes through `perform`. A signal handler, or a finaliser that the garbage collector runs,
may call the probe while the same thread is inside it: such a call is queued and carried out before
the outer one returns. The wait for another thread is bounded: that thread may be running a
finaliser that waits for a lock of this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from inferscope.host_signals import pass_on, suppressed
from inferscope.probe.budget import Budget, budget_share
from inferscope.probe.columns import text
from inferscope.probe.host_log import warn, would_block
from inferscope.probe.log import MOST_UNSUPPORTED, Log
from inferscope.probe.process_mark import ProcessMark, process_mark
from inferscope.probe.spans import Spans
from inferscope.records import CLOSED, FAILED, OFF, ON, OVER_BUDGET, UNSUPPORTED

_PATIENCE_S = 0.1
"""A thread holds the lock for less than a millisecond, unless it is descheduled."""
_IMPATIENT_NS = 10_000_000_000
"""No second wait within this time: a thread that never releases it costs the engine 1 %."""
_MOST_QUEUED = 1024
_MOST_MESSAGE_BYTES = 200
_MOST_MESSAGES = 16
"""Messages pending while the host's log is full; of more the oldest are dropped."""

Action = Callable[[Any], object]


class Life:
    """State machine of a probe; it serialises the calls into the probe.

    The log's lock stands around `turn`, `report`, `close` and `catch_up`.

    Attributes:
        on: whether the probe records now.
        wants_on: value that `on` takes between the next two steps.
        writes_plans: whether plans are recorded; False while the budget omits them.
        first_step: first step whose start was seen since the probe was switched on.
    """

    def __init__(self, log: Log, spans: Spans) -> None:
        self.on = self.wants_on = log.ring is not None
        self.writes_plans = True
        self.first_step = -1
        self._log = log
        self._spans = spans
        self._now = log.clock.monotonic_ns
        self._budget = Budget(budget_share(), self._now())
        self._mark: ProcessMark = b"\1" if log.ring is None else process_mark()
        self._queued: deque[tuple[Action, Any]] = deque()
        self._waits_again_ns = 0
        self._messages: deque[str] = deque(maxlen=_MOST_MESSAGES)

    def is_ours(self) -> bool:
        """Return whether this is the process that opened the probe; silence it where it is not."""
        if self._mark[0]:
            return True
        self.fork()
        return False

    def perform(self, t_ns: int, later: Action | None, action: Action, argument: Any) -> object:
        """Call an action under the lock, at once or, within another call of this thread, after it.

        Return what the action returned; None if it is called later, or not at all.

        No exception leaves the lock held or a frame torn, not even one of a signal handler.

        Args:
            t_ns: when the call into the probe began; its cost is counted from here.
            later: what to queue in place of the action; None where it makes no sense later.
            action: what to call.
            argument: of either; one, for a star costs 0.2 µs, five times a step.

        Raises:
            Exception: what the action raised.
        """
        if not self._mark[0]:
            self.fork()
            return None
        log, queued = self._log, self._queued
        lock = log.lock
        if lock._is_owned():  # type: ignore[attr-defined]
            self._queue(later, argument)
            return None
        try:
            if not lock.acquire(False) and not self._wait_for(lock):
                self._queue(later, argument)
                return None
            if queued:
                self.catch_up()
            result = action(argument)
            log.cost_ns += self._now() - t_ns
            return result
        finally:
            # The first thing here: no signal handler can run between an exception and this call.
            try:
                lock.release()
            except RuntimeError as error:  # it was not acquired, or a signal handler's
                pass_on(error)
            finally:
                if queued:
                    self.catch_up_unlocked()

    def catch_up(self) -> None:
        """Carry out what was queued; the lock is held."""
        queued = self._queued
        while queued:
            action, argument = queued.popleft()
            action(argument)

    def catch_up_unlocked(self) -> None:
        """Carry out what was queued, unless another thread holds the lock: it does so itself.

        Also after an exception of a signal handler: the process may be about to end.
        """
        lock = self._log.lock
        while self._queued:
            try:  # around `acquire` as well: a signal handler may raise right behind it
                if not lock.acquire(False):
                    return
                self.catch_up()
            except Exception as error:  # noqa: PERF203 -- a lap is rare, the lock must be free
                self.caught(error)
            finally:
                try:
                    lock.release()
                except RuntimeError as error:  # as in `perform`
                    pass_on(error)

    def _queue(self, later: Action | None, argument: Any) -> None:
        if later is None or len(self._queued) >= _MOST_QUEUED:
            self._log.num_lost_calls += 1
        else:
            self._queued.append((later, argument))

    def _wait_for(self, lock: Any) -> bool:
        """Wait for another thread to release the lock; after it did not, not again for a while."""
        now_ns = self._now()
        if now_ns < self._waits_again_ns:
            return False
        if lock.acquire(True, _PATIENCE_S):
            return True
        self._waits_again_ns = now_ns + _IMPATIENT_NS
        return False

    def refuse(self, call: str, error: Exception) -> None:
        """Count a call that is left out for its arguments; report the first one.

        Raises:
            Exception: the same one, where it is of a signal handler of the host.
        """
        pass_on(error)
        log = self._log
        log.odd.num += 1
        if not log.message:
            log.message = text(f"{call}() was left out: {_described(error)}", _MOST_MESSAGE_BYTES)
            self._messages.append(log.message)

    def queue_message(self, line: str) -> None:
        """Add a message to the pending ones."""
        self._messages.append(line)

    @property
    def has_messages(self) -> bool:
        """Return whether messages are pending."""
        return bool(self._messages)

    def write_messages(self) -> None:
        """Write pending messages to the host's log: on a thread of its own, without the lock.

        A handler of that log may block: another thread holds its lock. While the pipe of one is
        full, messages stay pending.
        """
        with suppress(Exception):  # of a handler of that log
            while self._messages and not would_block():
                warn("%s", self._messages.popleft())

    def caught(self, error: Exception) -> None:
        """Handle an exception within a call: a fault of the probe, or a process at its limits.

        Raises:
            Exception: the same one, where it is of a signal handler of the host.
        """
        if isinstance(error, (RecursionError, MemoryError)) or _is_at_stack_end(error):
            self._log.num_lost_calls += 1
        else:
            pass_on(error)
            self.fail(error)

    def follow(self, step: int) -> None:
        """Stop or resume by the control byte, between two steps of the engine."""
        now_ns = self._now()
        self.perform(now_ns, self._turn, self._turn, (now_ns, step))

    def _turn(self, at: tuple[int, int]) -> None:
        self.turn(*at)

    def turn(self, now_ns: int, step: int) -> None:
        """Switch to the wanted state, from this step on."""
        if self._log.ring is None or self.wants_on is self.on:
            return
        if self.wants_on:
            self._resume(now_ns, step)
        else:
            self._spans.reap(now_ns)
            self._pause(now_ns, OFF)

    def want(self, *, is_on: bool) -> None:
        """Read the control byte; a probe that has failed stays off whatever it holds."""
        self.wants_on = is_on and self._log.state not in (FAILED, UNSUPPORTED)

    def note_unsupported(self, noted: tuple[int, str, bool]) -> None:
        """Report a feature that cannot be observed; record nothing more where it is everything."""
        now_ns, feature, is_everything = noted
        log = self._log
        if log.ring is None or log.state in (FAILED, CLOSED):
            return
        if feature not in log.unsupported:
            log.unsupported = (*log.unsupported, feature)[:MOST_UNSUPPORTED]
        if is_everything:
            self._pause(now_ns, UNSUPPORTED)
        else:
            self.report(now_ns)

    def report(self, now_ns: int) -> None:
        """Write the probe's health, and enforce its budget."""
        self._spans.report(now_ns)
        if self.on:
            self._keep_to_budget(now_ns)

    def close(self, now_ns: int) -> None:
        """Write a last report, that the process ends in good order, and leave the ring on disk."""
        self._leave(now_ns, is_closed=True)

    def abandon(self, now_ns: int) -> None:
        """Write a last report without that: the process is taken to have died."""
        self._leave(now_ns, is_closed=False)

    def _leave(self, now_ns: int, *, is_closed: bool) -> None:
        log = self._log
        if log.ring is None:
            return
        if self.on:
            self._spans.reap(now_ns)
        if is_closed and log.state != FAILED:
            log.state = CLOSED
        self.on = self.wants_on = False
        log.ring.set_pending(0)
        self._spans.report(now_ns)
        log.close()

    def fail(self, error: Exception) -> None:
        """Disable the probe permanently and report it once; no exception leaves this method."""
        self.on = self.wants_on = False
        log = self._log
        if log.state in (FAILED, CLOSED) or not self.is_ours():
            return
        log.state = FAILED
        log.num_errors += 1
        try:
            log.message = text(_described(error), _MOST_MESSAGE_BYTES)
            self._messages.append(f"the probe failed and is off: {log.message}")
            now_ns = self._now()
            self.perform(now_ns, self._write_failure, self._write_failure, now_ns)
        except Exception as raised:
            pass_on(raised)

    def _write_failure(self, now_ns: int) -> None:
        if self._log.ring is not None:
            self._log.ring.set_pending(0)
        self._spans.report(now_ns)

    def fork(self) -> None:
        """Leave the parent's ring alone: a forked child opens its own or stays silent."""
        self.on = self.wants_on = False
        self._mark = b"\1"
        self._queued.clear()
        self._messages.clear()
        ring = self._log.abandon()
        if ring is not None:
            with suppressed(Exception):  # its lock on the ring must die with the parent
                ring.forked()
                ring.close()

    def _keep_to_budget(self, now_ns: int) -> None:
        """Leave out plans, or stop, when the probe costs its host more than it may."""
        log, budget = self._log, self._budget
        verdict = budget.judge(now_ns, log.cost_ns)
        if verdict == "keep":
            return
        self.writes_plans = verdict == "restore"
        cost = f"{budget.last_share:.1%} of wall time, more than {budget.share:.1%}"
        if verdict == "restore":
            log.message = ""
            return
        if verdict == "shed":
            log.message = f"the probe took {cost}: step plans are left out"
        else:
            log.message = f"the probe took {cost}, without step plans too: it has stopped"
            self._pause(now_ns, OVER_BUDGET)
        self._messages.append(f"{log.message} (INFERSCOPE_BUDGET)")

    def _pause(self, now_ns: int, state: int) -> None:
        """Stop recording; record that in a keyframe, for later readers, and in a report."""
        self._log.state = state
        self._spans.forget()
        self._log.restate(now_ns)
        self._spans.report(now_ns)
        self.on = self.wants_on = False  # at the end: a signal handler may raise before it

    def _resume(self, now_ns: int, step: int) -> None:
        """Record again, from this step on: of one under way now, the beginning was not seen."""
        log = self._log
        log.state, log.message = ON, ""
        self.first_step = step
        self._budget.restart(now_ns, log.cost_ns)
        self.writes_plans = True
        self._spans.forget()
        self.on = self.wants_on = True
        log.restate(now_ns)
        self.report(now_ns)


def _is_at_stack_end(error: Exception) -> bool:
    """Return whether ctypes could not convert arguments because the stack was at its end.

    It wraps that RecursionError in an ArgumentError; what the probe passes always converts.
    """
    return type(error).__name__ == "ArgumentError"


def _described(error: BaseException) -> str:
    """Return type and text of an exception; its `__str__` may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as raised:
        pass_on(raised)
        return type(error).__name__
