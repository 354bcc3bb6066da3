"""What happened, kept until nothing that happened before it can still come to light."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Actions by the time at which they happened; equal times in the order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def push(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Keep an action for the sweep over its time."""
        self._order += 1
        heapq.heappush(self._heap, (at_ns, self._order, action, arguments))

    def is_due(self, before_ns: int) -> bool:
        """Tell whether there is something to sweep over."""
        return bool(self._heap) and self._heap[0][0] < before_ns

    def sweep(self, before_ns: int, *, arrive: Callable[[int], None]) -> None:
        """Run all actions before a time, in order.

        Args:
            before_ns: nothing before this can change any more.
            arrive: called with each action's time ahead of it.
        """
        heap = self._heap
        while heap and heap[0][0] < before_ns:
            at_ns, _, action, arguments = heapq.heappop(heap)
            arrive(at_ns)
            action(*arguments)
