"""What ended lately, and when: for words on it that come late."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")

_FEWEST = 64
"""Before it is worth to look who may go."""
_END_OF_TIME_NS = 1 << 62


class Recent(Generic[Key]):
    """The last things noted, so many at least; at most a quarter more."""

    def __init__(self, num: int, *, for_ns: int = _END_OF_TIME_NS) -> None:
        """Start with nothing.

        Args:
            num: to remember.
            for_ns: after which one may be forgotten sooner.
        """
        self._num = num
        self._for_ns = for_ns
        self._room = num + num // 4
        self._at_ns: dict[Key, int] = {}
        if for_ns < _END_OF_TIME_NS:
            self._room = min(self._room, _FEWEST)

    def note(self, key: Key, at_ns: int) -> None:
        """Note a thing as the newest."""
        self._at_ns.pop(key, None)
        self._at_ns[key] = at_ns
        if len(self._at_ns) > self._room:
            self._forget(at_ns - self._for_ns)

    def at_ns(self, key: Key) -> int:
        """Return when it ended, -1 if that is not known."""
        return self._at_ns.get(key, -1)

    def _forget(self, before_ns: int) -> None:
        """Let go of many at once: a dict that loses its first entry again and again gets slower."""
        newest = itertools.islice(self._at_ns.items(), max(0, len(self._at_ns) - self._num), None)
        if self._for_ns == _END_OF_TIME_NS:
            self._at_ns = dict(newest)
        else:
            self._at_ns = {key: at_ns for key, at_ns in newest if at_ns >= before_ns}
            some = max(_FEWEST, len(self._at_ns) + len(self._at_ns) // 4)
            self._room = min(self._num + self._num // 4, some)
