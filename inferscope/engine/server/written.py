"""What was written to clients, for the records: a record per turn of the loop, not per chunk."""

from __future__ import annotations

import asyncio
import time

from inferscope.probe import Probe

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
        self._first_ns = 0

    def note(self, index: int, num_tokens: int) -> None:
        """Note the tokens of a chunk."""
        now_ns = time.monotonic_ns()
        if index in self._indices:
            self.tell()  # a column names each request once
        if not self._indices:
            self._first_ns = now_ns
            self._loop.call_soon(self.tell)
        self._indices.append(index)
        self._counts.append(num_tokens)
        if now_ns - self._first_ns > _SPREAD_NS:
            self.tell()

    def tell(self) -> None:
        """Write what was noted into the records."""
        if self._indices:
            indices, counts = self._indices, self._counts
            self._indices, self._counts = [], []
            self._probe.emitted(indices, counts)
