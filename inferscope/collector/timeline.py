"""Facts, kept until the watermark has passed the time at which they happened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

_AT_NS = itemgetter(0)
Fact = tuple[int, Callable[..., None], tuple[Any, ...]]
"""When it happened, what takes it, and with what."""


class Timeline:
    """Facts by the time at which they happened; equal times in the order of arrival."""

    def __init__(self) -> None:
        self._facts: list[Fact] = []

    def push(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Keep a fact for the window over its time."""
        self._facts.append((at_ns, action, arguments))

    def waiting(self) -> Iterable[Fact]:
        """Return what is kept, in no order."""
        return self._facts

    def take(self, before_ns: int) -> list[Fact]:
        """Return all facts before a time, in order, and keep the others."""
        self._facts.sort(key=_AT_NS)
        num = bisect_left(self._facts, before_ns, key=_AT_NS)
        taken = self._facts[:num]
        del self._facts[:num]
        return taken
