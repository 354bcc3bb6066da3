"""Records of delivered tokens: one record per event-loop iteration, not per chunk."""

from __future__ import annotations

import asyncio
import time

from inferscope.probe import LEAST_BLOCKED_NS, Probe

_SPREAD_NS = 200_000
"""Maximum time between the first and last chunk of a record, which has a single time."""


class DeliveryLog:
    """Buffer of delivered chunks that are not yet recorded."""

    def __init__(self, probe: Probe) -> None:
        """Set up on the front end's probe; must run in its event loop."""
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._indices: list[int] = []
        self._counts: list[int] = []
        self._blocked_ns: dict[int, int] = {}
        self._first_ns = 0

    def note(self, index: int, num_tokens: int, blocked_ns: int = 0) -> None:
        """Add a delivered chunk and how long its client did not read before."""
        now_ns = time.monotonic_ns()
        if index in self._indices:
            self.flush()  # a record has at most one entry per request
        if not self._indices:
            self._first_ns = now_ns
            self._loop.call_soon(self.flush)
        self._indices.append(index)
        self._counts.append(num_tokens)
        if blocked_ns >= LEAST_BLOCKED_NS:
            self._blocked_ns[index] = blocked_ns
        if now_ns - self._first_ns > _SPREAD_NS:
            self.flush()

    def flush(self) -> None:
        """Record the buffered chunks."""
        if self._indices:
            indices, counts, blocked_ns = self._indices, self._counts, self._blocked_ns
            self._indices, self._counts, self._blocked_ns = [], [], {}
            column = [blocked_ns.get(index, 0) for index in indices] if blocked_ns else ()
            self._probe.emitted(indices, counts, blocked_ns=column)
