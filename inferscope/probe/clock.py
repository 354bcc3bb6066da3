"""The clock as a seam: everything that reads time takes one of these."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic and wall time, in integer nanoseconds."""

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC, the same clock in every process of the host."""

    def real_ns(self) -> int:
        """Return the wall clock, which may jump."""


class SystemClock:
    """The machine's own clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    real_ns = staticmethod(time.time_ns)
