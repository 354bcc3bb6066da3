"""Bounded table of recent ends, for records that arrive late."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")

_FEWEST = 64
"""Minimum number of entries before expired ones are removed."""
_END_OF_TIME_NS = 1 << 62


class Recent(Generic[Key]):
    """End times of the last `num` keys noted; the table holds at most a quarter more."""

    def __init__(self, num: int, *, for_ns: int = _END_OF_TIME_NS) -> None:
        """Start with an empty table.

        Args:
            num: number of keys to keep.
            for_ns: age after which a key may be removed earlier.
        """
        self._num = num
        self._for_ns = for_ns
        self._room = num + num // 4
        self._at_ns: dict[Key, int] = {}
        if for_ns < _END_OF_TIME_NS:
            self._room = min(self._room, _FEWEST)

    def note(self, key: Key, at_ns: int) -> None:
        """Add a key as the newest, with its end time."""
        self._at_ns.pop(key, None)
        self._at_ns[key] = at_ns
        if len(self._at_ns) > self._room:
            self._forget(at_ns - self._for_ns)

    def at_ns(self, key: Key) -> int:
        """Return the end time of a key; -1 if it is unknown."""
        return self._at_ns.get(key, -1)

    def _forget(self, before_ns: int) -> None:
        """Remove many keys at once: removing the first key of a dict repeatedly slows it down."""
        newest = itertools.islice(self._at_ns.items(), max(0, len(self._at_ns) - self._num), None)
        if self._for_ns == _END_OF_TIME_NS:
            self._at_ns = dict(newest)
        else:
            self._at_ns = {key: at_ns for key, at_ns in newest if at_ns >= before_ns}
            some = max(_FEWEST, len(self._at_ns) + len(self._at_ns) // 4)
            self._room = min(self._num + self._num // 4, some)
