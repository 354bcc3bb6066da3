"""What ended lately, and when: for words on it that come late."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Recent(Generic[Key]):
    """The last things noted, so many at least; at most a quarter more."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._at_ns: dict[Key, int] = {}

    def note(self, key: Key, at_ns: int) -> None:
        """Note a thing as the newest."""
        self._at_ns.pop(key, None)
        self._at_ns[key] = at_ns
        if len(self._at_ns) > self._num + self._num // 4:
            # Many at once: a dict that loses its first entry again and again gets slower each time.
            newest = itertools.islice(self._at_ns.items(), len(self._at_ns) - self._num, None)
            self._at_ns = dict(newest)

    def at_ns(self, key: Key) -> int:
        """Return when it ended, -1 if that is not known."""
        return self._at_ns.get(key, -1)
