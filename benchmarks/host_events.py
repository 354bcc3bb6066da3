"""Events of a device that is the host itself, to measure hooks that time steps by events."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class HostEvents:
    """Events that store the time of recording; the device passes each at once."""

    def new(self) -> list[int]:
        """Create an event."""
        return [0]

    def record(self, event: list[int]) -> None:
        """Store the current time."""
        event[0] = time.perf_counter_ns()

    def record_aside(self, event: list[int]) -> None:
        """Store the current time, off the steps' stream."""
        event[0] = time.perf_counter_ns()

    def is_done(self, event: list[int]) -> bool:
        """Return True: the host has passed the event."""
        return True

    def elapsed_ms(self, start: list[int], end: list[int]) -> float:
        """Return the milliseconds between two events."""
        return (end[0] - start[0]) / 1e6

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def aside(self) -> AbstractContextManager[bool]:
        """Return a context in which any thread may query."""
        return nullcontext(True)

    def reset(self) -> None:
        """Do nothing: no event is stored."""


class QueuedEvents(HostEvents):
    """Events of a device that has passed all but the newest."""

    def __init__(self) -> None:
        self._newest: Any = None

    def record(self, event: list[int]) -> None:
        """Store the time; the device passes it when the next event is recorded."""
        event[0] = time.perf_counter_ns()
        self._newest = event

    def is_done(self, event: list[int]) -> bool:
        """Return whether another event was recorded since."""
        return event is not self._newest
