"""What was written to clients, for the records: a record per turn of the loop, not per chunk."""

from __future__ import annotations

import asyncio
import time

from inferscope.probe import LEAST_BLOCKED_NS, Probe

_SPREAD_NS = 200_000
"""A record has one time, so it takes no more than this of chunks."""


class Written:
    """Gathers the chunks that connections have just taken."""

    def __init__(self, probe: Probe) -> None:
        """Take the front end's probe; called in its event loop."""
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._indices: list[int] = []
        self._counts: list[int] = []
        self._blocked_ns: dict[int, int] = {}
        self._first_ns = 0

    def note(self, index: int, num_tokens: int, blocked_ns: int = 0) -> None:
        """Note the tokens of a chunk, and for how long its client had not read before."""
        now_ns = time.monotonic_ns()
        if index in self._indices:
            self.tell()  # a column names each request once
        if not self._indices:
            self._first_ns = now_ns
            self._loop.call_soon(self.tell)
        self._indices.append(index)
        self._counts.append(num_tokens)
        if blocked_ns >= LEAST_BLOCKED_NS:
            self._blocked_ns[index] = blocked_ns
        if now_ns - self._first_ns > _SPREAD_NS:
            self.tell()

    def tell(self) -> None:
        """Write what was noted into the records."""
        if self._indices:
            indices, counts, blocked_ns = self._indices, self._counts, self._blocked_ns
            self._indices, self._counts, self._blocked_ns = [], [], {}
            column = [blocked_ns.get(index, 0) for index in indices] if blocked_ns else ()
            self._probe.emitted(indices, counts, blocked_ns=column)
