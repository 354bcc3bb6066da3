"""Busy and paused time of an engine's device, as sums up to any time.

    B(t)  how long the device had been busy by t: the union of all steps

A look-up answers for any past time within the last `_MOST_STEPS` steps, so an event that is
reported late still finds which part of its past was busy.
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MOST_STEPS = 4096
_MOST_PAUSES = 64
NEVER_NS = 1 << 62


class Busy:
    """Time of one engine's device, in host nanoseconds.

    Attributes:
        mark_ns: time through which everything is accounted for; None before the first call.
        busy_ns: time in which a step was executed.
        idle_host_gap_ns: idle time while a request was waiting or running.
        idle_no_work_ns: idle time while none was, or the engine was paused.
        paused_ns: since when the engine is paused, None while it is not.
    """

    def __init__(self) -> None:
        self.mark_ns: int | None = None
        self.busy_ns = 0
        self.idle_host_gap_ns = 0
        self.idle_no_work_ns = 0
        self.paused_ns: int | None = None
        self._idle_from_ns = 0
        """Start of the current idle time."""
        self._pauses: list[tuple[int, int]] = []
        """Past pauses: start and end of each."""
        self._new: list[tuple[int, int, int]] = []
        """Start, end and prior busy time of the steps that are not in the arrays yet."""
        self._starts: Ints = np.zeros(1, dtype=np.int64)
        self._ends: Ints = np.zeros(1, dtype=np.int64)
        self._before: Ints = np.zeros(1, dtype=np.int64)

    # --- in the order of time -----------------------------------------------------------------

    def idle(self, until_ns: int, *, is_work_there: bool) -> None:
        """Account for the idle time up to `until_ns`."""
        if self.mark_ns is None:
            self.mark_ns = self._idle_from_ns = until_ns
        spent_ns = until_ns - self.mark_ns
        if spent_ns <= 0:
            return
        if is_work_there and self.paused_ns is None:
            self.idle_host_gap_ns += spent_ns
        else:
            self.idle_no_work_ns += spent_ns
        self.mark_ns = until_ns

    def step(self, start_ns: int, end_ns: int, *, is_work_there: bool) -> tuple[int, int]:
        """Account for a step; return the interval in which the device executed only this step.

        A step that is reported after its start replaces time that was counted as idle.
        """
        mark_ns = self.mark_ns
        if mark_ns is None or start_ns >= mark_ns:
            self.idle(start_ns, is_work_there=is_work_there)
            from_ns = start_ns
        else:
            from_ns = min(mark_ns, max(start_ns, self._idle_from_ns))
            of_gap_ns = min(mark_ns - from_ns, self.idle_host_gap_ns)
            self.idle_host_gap_ns -= of_gap_ns
            self.idle_no_work_ns -= mark_ns - from_ns - of_gap_ns
        self.mark_ns = until_ns = max(from_ns, end_ns)
        if until_ns > from_ns:
            self._new.append((from_ns, until_ns, self.busy_ns))
            self.busy_ns += until_ns - from_ns
        self._idle_from_ns = until_ns
        return from_ns, until_ns

    def pause(self, at_ns: int) -> None:
        """Record the start of a pause."""
        if self.paused_ns is None:
            self.paused_ns = max(at_ns, self._pauses[-1][1] if self._pauses else at_ns)

    def unpause(self, at_ns: int) -> None:
        """Record the end of a pause."""
        if self.paused_ns is not None:
            self._pauses.append((self.paused_ns, max(self.paused_ns, at_ns)))
            del self._pauses[:-_MOST_PAUSES]
        self.paused_ns = None

    def idle_like(self) -> Busy:
        """Return an unused device with the same pauses."""
        other = Busy()
        other.paused_ns, other._pauses = self.paused_ns, list(self._pauses)
        return other

    def copied(self) -> Busy:
        """Return an independent copy of the device."""
        other = copy(self)
        other._pauses, other._new = list(self._pauses), list(self._new)
        return other

    @property
    def ended_ns(self) -> int:
        """Return when the last step ended."""
        return self._idle_from_ns if self.busy_ns else 0

    # --- look-ups -----------------------------------------------------------------------------

    def at(self, times_ns: Ints) -> Ints:
        """Return the total busy time by each time: [times]."""
        if self._new:
            starts, ends, before = np.array(self._new, dtype=np.int64).T
            self._new.clear()
            kept = slice(-_MOST_STEPS, None)
            self._starts = np.concatenate([self._starts[kept], starts])
            self._ends = np.concatenate([self._ends[kept], ends])
            self._before = np.concatenate([self._before[kept], before])
        k = np.maximum(self._starts.searchsorted(times_ns, "right") - 1, 0)
        spent_ns = np.minimum(times_ns, self._ends[k]) - self._starts[k]
        busy_ns: Ints = self._before[k] + np.maximum(spent_ns, 0)
        return busy_ns

    def within(
        self, since_ns: Ints, until_ns: Ints, *, is_over: NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """Return the busy and the paused nanoseconds of each interval.

        Paused time is not busy.

        Args:
            since_ns: [spans], starts of the intervals.
            until_ns: [spans], ends of the intervals.
            is_over: [spans], whether to count only pauses that ended within the interval.
        """
        busy_ns = self.at(until_ns) - self.at(since_ns)
        paused_ns = np.zeros_like(busy_ns)
        for begun_ns, ended_ns in self._pauses_since(int(since_ns.min(initial=NEVER_NS))):
            first_ns, last_ns = np.maximum(since_ns, begun_ns), np.minimum(until_ns, ended_ns)
            is_in = (first_ns < last_ns) & (~is_over | (until_ns >= ended_ns))
            if is_in.any():
                first_ns, last_ns = first_ns[is_in], last_ns[is_in]
                paused_ns[is_in] += last_ns - first_ns
                busy_ns[is_in] -= self.at(last_ns) - self.at(first_ns)
        return busy_ns, paused_ns

    def paused_within_ns(self, since_ns: int, until_ns: int) -> int:
        """Return how long the engine was paused within an interval, in nanoseconds."""
        if self.paused_ns is None and not self._pauses:
            return 0
        return sum(
            max(0, min(until_ns, ended_ns) - max(since_ns, begun_ns))
            for begun_ns, ended_ns in self._pauses_since(since_ns)
        )

    def _pauses_since(self, since_ns: int) -> list[tuple[int, int]]:
        found = [pause for pause in self._pauses if pause[1] > since_ns]
        if self.paused_ns is not None:
            found.append((self.paused_ns, NEVER_NS))
        return found
