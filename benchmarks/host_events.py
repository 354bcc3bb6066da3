"""Events of a device that is this host, for measuring hooks that time steps by events."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class HostEvents:
    """Events that hold the time at which they were recorded; the device has passed each at once."""

    def new(self) -> list[int]:
        """Make an event."""
        return [0]

    def record(self, event: list[int]) -> None:
        """Take the time."""
        event[0] = time.perf_counter_ns()

    def record_aside(self, event: list[int]) -> None:
        """Take the time, off the stream of the steps."""
        event[0] = time.perf_counter_ns()

    def is_done(self, event: list[int]) -> bool:
        """Return True: the host has passed it."""
        return True

    def elapsed_ms(self, start: list[int], end: list[int]) -> float:
        """Return the time between two events."""
        return (end[0] - start[0]) / 1e6

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def aside(self) -> AbstractContextManager[bool]:
        """Allow any thread to ask."""
        return nullcontext(True)

    def reset(self) -> None:
        """Nothing is held."""


class QueuedEvents(HostEvents):
    """The same, of a device that has passed all but the newest."""

    def __init__(self) -> None:
        self._newest: Any = None

    def record(self, event: list[int]) -> None:
        """Take the time; the device has not passed it until the next is recorded."""
        event[0] = time.perf_counter_ns()
        self._newest = event

    def is_done(self, event: list[int]) -> bool:
        """Return whether another one was recorded since."""
        return event is not self._newest
