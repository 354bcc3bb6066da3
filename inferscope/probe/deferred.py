"""Facts that an engine's hooks have noted, to be recorded while its device computes.

    hook, before dispatch ── add ──► facts ──► flush ── hook, after dispatch
                                          └──► flush_overdue ── housekeeping, where no hook comes

A fact is an action and its arguments: references to what the engine does not change before the next
flush, and the time at which it happened. `lock` is around the actions, for those of housekeeping
run on another thread; a hook that changes what they read holds it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from inferscope.probe.forked_locks import forked_lock
from inferscope.probe.probe import Probe

OVERDUE_NS = 50_000_000
"""Facts noted for longer are recorded by the probe's own thread: the engine's may hang."""


class Deferred:
    """Facts in the order in which they happened.

    Attributes:
        probe: records them; its reports have the time since which some are deferred.
        facts: when each happened, what records it, and with what.
        lock: is held while a fact is being recorded; its thread may acquire it again.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.lock = forked_lock()
        self.facts: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()

    def add(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Add a fact.

        Args:
            at_ns: when it happened.
            action: records it.
            arguments: of the action.
        """
        if not self.facts:
            self.probe.defer(at_ns)
        self.facts.append((at_ns, action, arguments))

    def flush_hidden(self) -> None:
        """Record all facts behind a launch: the device computes, and no step waits for it."""
        with self.probe.hidden:
            self.flush()

    def flush(self) -> None:
        """Record all facts; wait for another thread that does so."""
        facts = self.facts
        with self.lock:
            while facts:
                _, action, arguments = facts.popleft()
                action(*arguments)
            self.probe.defer(self._oldest_ns())  # one may have been added meanwhile

    def flush_overdue(self, now_ns: int) -> None:
        """Record facts that are overdue, unless another thread is recording some."""
        since_ns = self._oldest_ns()
        if since_ns and now_ns - since_ns > OVERDUE_NS and self.lock.acquire(blocking=False):
            try:
                self.flush()
            finally:
                self.lock.release()

    def _oldest_ns(self) -> int:
        """Return the time of the oldest fact, 0 for none; another thread may be taking it."""
        try:
            return self.facts[0][0]
        except IndexError:
            return 0
