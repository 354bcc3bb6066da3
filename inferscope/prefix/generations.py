"""Bounded dictionary that forgets its older half at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Generations(Generic[Key, Value]):
    """Dictionary of the newest entries, at most `capacity`, at least half of them.

    New entries go into the young half; when it is full it becomes the old half, whose entries are
    dropped together. So an entry costs one store, and forgetting costs nothing. A dictionary in
    order of use costs twice the memory and a deletion per entry.

    Attributes:
        young: newest entries; the caller may replace them.
        old: entries before them; an entry of `young` hides an equal key here.
        half: number of young entries at which the halves turn.
    """

    __slots__ = ("half", "old", "young")

    def __init__(self, capacity: int) -> None:
        """Create an empty dictionary of at most `capacity` entries."""
        self.half = max(1, capacity // 2)
        self.young: dict[Key, Value] = {}
        self.old: dict[Key, Value] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def put(self, key: Key, value: Value) -> None:
        """Store a value, over an earlier one of the key."""
        self.young[key] = value
        if len(self.young) >= self.half:
            self.turn()

    def put_all(self, keys: Sequence[Key], value: Value) -> None:
        """Store one value for several keys."""
        at = 0
        while at < len(keys):
            part = keys[at : at + self.half - len(self.young)]
            self.young.update(zip(part, repeat(value)))
            at += len(part)
            if len(self.young) >= self.half:
                self.turn()

    def get(self, key: Key) -> Value | None:
        """Return the newest value of a key, or None."""
        value = self.young.get(key)
        return self.old.get(key) if value is None else value

    def turn(self) -> None:
        """Drop the old half; the young one becomes old."""
        self.old, self.young = self.young, {}

    def clear(self) -> None:
        """Drop all entries."""
        self.young, self.old = {}, {}
