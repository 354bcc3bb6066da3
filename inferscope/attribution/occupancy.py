"""Where an engine's device time goes: steps, idle while somebody waits, idle for want of work.

Time is explained up to a mark that only moves on, so that the three always sum to what lies between
the first call and the mark. A step that is announced after its start takes back idle time.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED_STEPS = 256
"""Events may come this many steps late and still find which part of their past was busy."""


class Occupancy:
    """The time of one engine's device. All times are host nanoseconds.

    Attributes:
        mark_ns: explained up to here, None before the first call.
        busy_ns: time in which a step was being executed.
        idle_host_gap_ns: idle time while a request was waiting or running.
        idle_no_work_ns: idle time while none was, or the engine was paused.
    """

    def __init__(self) -> None:
        self.mark_ns: int | None = None
        self.busy_ns = 0
        self.idle_host_gap_ns = 0
        self.idle_no_work_ns = 0
        self._idle_from_ns = 0
        """From where on it has been idle, if it is."""
        self._past: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED_STEPS)

    def pass_idle(self, until_ns: int, *, is_work_there: bool) -> None:
        """Explain idle time up to here."""
        if self.mark_ns is None:
            self.mark_ns = self._idle_from_ns = until_ns
        spent_ns = until_ns - self.mark_ns
        if spent_ns <= 0:
            return
        if is_work_there:
            self.idle_host_gap_ns += spent_ns
        else:
            self.idle_no_work_ns += spent_ns
        self.mark_ns = until_ns

    def begin_step(self, start_ns: int, *, is_work_there: bool) -> None:
        """Explain the time up to the start of a step, or take back what was said of it as idle."""
        if self.mark_ns is None or start_ns >= self.mark_ns:
            self.pass_idle(start_ns, is_work_there=is_work_there)
            return
        start_ns = max(start_ns, self._idle_from_ns)
        if start_ns < self.mark_ns:
            excess_ns = self.mark_ns - start_ns
            of_gap_ns = min(excess_ns, self.idle_host_gap_ns)
            self.idle_host_gap_ns -= of_gap_ns
            self.idle_no_work_ns -= excess_ns - of_gap_ns
            self.mark_ns = start_ns

    def pass_busy(self, until_ns: int) -> None:
        """Explain the time up to the end of a step: since the mark it has been busy."""
        since_ns = self.mark_ns
        if since_ns is not None and until_ns > since_ns:
            self.busy_ns += until_ns - since_ns
            self._past.append((since_ns, until_ns))
            self.mark_ns = self._idle_from_ns = until_ns

    def busy_until(self, at_ns: int, *, open_until_ns: int | None) -> int:
        """Return how long the device had been busy by then, which may lie a little back.

        Args:
            at_ns: when.
            open_until_ns: the end of the last step that is being executed, None where none is.
        """
        busy_ns = self.busy_ns
        for start_ns, end_ns in reversed(self._past):
            if end_ns <= at_ns:
                break
            busy_ns -= end_ns - max(start_ns, at_ns)
        if open_until_ns is not None and self.mark_ns is not None:
            busy_ns += max(0, min(open_until_ns, at_ns) - self.mark_ns)
        return busy_ns
