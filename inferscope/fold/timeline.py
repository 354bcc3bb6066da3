"""Timeline of facts, each kept until the watermark passes its time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

_AT_NS = itemgetter(0)
Fact = tuple[int, Callable[..., None], tuple[Any, ...]]
"""Time of the fact, the action that processes it, and the action's arguments."""


class Timeline:
    """Facts ordered by time; equal times in the order of arrival."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []

    def push(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Add a fact at its time."""
        self._facts.append((at_ns, action, arguments))

    def waiting(self) -> Iterable[Fact]:
        """Return the kept facts, in no order."""
        return self._facts

    def take(self, before_ns: int) -> list[Fact]:
        """Remove and return all facts before a time, in order."""
        self._facts.sort(key=_AT_NS)
        num = bisect_left(self._facts, before_ns, key=_AT_NS)
        taken = self._facts[:num]
        del self._facts[:num]
        return taken
