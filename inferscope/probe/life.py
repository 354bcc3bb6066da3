"""The life of a probe: whether it records, and what is written where that changes.

    ON ── control byte ──► OFF ──┐
     │ ◄─────────────────────────┤ control byte, off and on again
     ├─── costs too much ──► OVER_BUDGET
     ├─── `close` ─────────► CLOSED      for good
     └─── any exception ───► FAILED      for good; so is a forked child's

Each change is a keyframe, for readers who come, and a report, for those who are there. The control
byte is followed between two steps: half a step can be attributed to nobody.
"""

from __future__ import annotations

from contextlib import suppress

from inferscope.probe.budget import Budget, budget_share
from inferscope.probe.log import Log
from inferscope.probe.spans import Spans
from inferscope.probe.voice import note, warn
from inferscope.records import CLOSED, FAILED, OFF, ON, OVER_BUDGET


class Life:
    """Switches a probe. The log's lock stands around all calls but `follow`, `fail` and `fork`.

    Attributes:
        on: recording now.
        wants_on: what `on` is to become, between two steps.
        tells_plans: False while the budget has plans left out.
        first_step: the first whose beginning was seen since the probe was switched on.
    """

    def __init__(self, log: Log, spans: Spans) -> None:
        self.on = self.wants_on = log.ring is not None
        self.tells_plans = True
        self.first_step = -1
        self._log = log
        self._spans = spans
        self._now = log.clock.monotonic_ns
        self._budget = Budget(budget_share(), self._now())

    def follow(self, step: int) -> None:
        """Stop or resume as the control byte says, between two steps of the engine."""
        try:
            with self._log.lock:
                self.turn(self._now(), step)
        except Exception as error:
            self.fail(error)

    def turn(self, now_ns: int, step: int) -> None:
        """Become what is wanted, from this step on."""
        if self._log.ring is None or self.wants_on is self.on:
            return
        if self.wants_on:
            self._resume(now_ns, step)
        else:
            self._spans.reap(now_ns)
            self._pause(now_ns, OFF)

    def want(self, *, is_on: bool) -> None:
        """Note what the control byte says; one that has failed stays off whatever it says."""
        self.wants_on = is_on and self._log.state != FAILED

    def report(self, now_ns: int) -> None:
        """Write how the probe is, and keep it to its budget."""
        self._spans.report(now_ns)
        if self.on:
            self._keep_to_budget(now_ns)

    def close(self, now_ns: int) -> None:
        """Write the last word and leave the ring on disk."""
        log = self._log
        if log.ring is None:
            return
        if self.on:
            self._spans.reap(now_ns)
        if log.state != FAILED:
            log.state = CLOSED
        self.on = self.wants_on = False
        log.ring.set_pending(0)
        self._spans.report(now_ns)
        log.close()

    def fail(self, error: Exception) -> None:
        """Switch off for good, say so once, and never let anything out."""
        self.on = self.wants_on = False
        log = self._log
        if log.state in (FAILED, CLOSED):
            return
        log.state = FAILED
        log.num_errors += 1
        log.message = f"{type(error).__name__}: {error}"[:200]
        try:
            warn("the probe failed and is off: %s", log.message)
            if log.lock.acquire(blocking=False):
                try:
                    if log.ring is not None:
                        log.ring.set_pending(0)
                    self._spans.report(self._now())
                finally:
                    log.lock.release()
        except Exception:
            note("the failure could not be recorded")

    def fork(self) -> None:
        """Leave the parent's ring alone: a forked child opens its own or stays silent."""
        self.on = self.wants_on = False
        ring = self._log.abandon()
        if ring is not None:
            with suppress(Exception):  # its lock on the ring must die with the parent
                ring.close()

    def _keep_to_budget(self, now_ns: int) -> None:
        """Leave out plans, or stop, when the probe costs its host more than it may."""
        log, budget = self._log, self._budget
        verdict = budget.judge(now_ns, log.cost_ns)
        if verdict == "keep":
            return
        self.tells_plans = verdict == "restore"
        cost = f"{budget.last_share:.1%} of wall time, more than {budget.share:.1%}"
        if verdict == "restore":
            log.message = ""
            return
        if verdict == "shed":
            log.message = f"the probe took {cost}: step plans are left out"
        else:
            log.message = f"the probe took {cost}, without step plans too: it has stopped"
            self._pause(now_ns, OVER_BUDGET)
        warn("%s (INFERSCOPE_BUDGET)", log.message)

    def _pause(self, now_ns: int, state: int) -> None:
        """Stop recording and say so: in a keyframe, for those who come, and in a report."""
        self.on = self.wants_on = False
        self._log.state = state
        self._spans.forget()
        self._log.restate(now_ns)
        self._spans.report(now_ns)

    def _resume(self, now_ns: int, step: int) -> None:
        """Record again, from this step on: of one under way now, the beginning was not seen."""
        log = self._log
        log.state, log.message = ON, ""
        self.first_step = step
        self._budget.restart(now_ns, log.cost_ns)
        self.tells_plans = True
        self._spans.forget()
        self.on = self.wants_on = True
        log.restate(now_ns)
        self.report(now_ns)
