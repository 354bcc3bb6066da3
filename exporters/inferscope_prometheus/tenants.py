"""Who has series of its own: the few that use most, whatever clients send; all others are `other`.

A name comes from a header, so anybody can make up as many as he likes. What is given away is not
taken back, for the sum of a series that goes would have to go somewhere: either into `other`, whose
rate would then show what nobody used, or nowhere. So a series is given late, to who comes again,
and the second half of them only to who uses a good part of it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

import msgspec

NOBODY, OTHER, WASTE, IDLE = "none", "other", "waste", "idle"
"""Who said no name; whose name has no series; and what is nobody's."""
RESERVED = (NOBODY, OTHER, WASTE, IDLE)
_COMES_AGAIN = 3
_MOST_CANDIDATES = 1024
_HALVED_AFTER = 10_000
"""Requests: what was used long ago counts less and less."""


class _Candidate(msgspec.Struct):
    spent_ns: int = 0
    num: int = 0


class Tenants:
    """Turns names into labels, of which there are at most `most` and RESERVED.

    Attributes:
        labels: that have been given, RESERVED aside.
    """

    def __init__(self, known: Iterable[str] = (), *, most: int) -> None:
        """Start with those that have series from the start."""
        self.labels = [name for name in known if name not in RESERVED]
        self._most = most
        self._candidates: dict[str, _Candidate] = {}
        self._total_ns = 0
        self._num = 0

    def change(self, known: Iterable[str], *, most: int) -> None:
        """Give series to these as well, and up to so many in all; who has one keeps it."""
        has = set(self.labels)
        self.labels += [name for name in known if name not in RESERVED and name not in has]
        self._most = most

    def label(self, name: str | None, spent_ns: int) -> str:
        """Return under which label a request is counted.

        Args:
            name: what it said; None or nothing where it said none.
            spent_ns: what it took.
        """
        if not name:
            return NOBODY
        if name in self.labels:
            return name
        self._age()
        self._total_ns += spent_ns
        if name in RESERVED or len(self.labels) >= self._most:
            return OTHER
        found = self._candidates.get(name)
        if found is None:
            self._make_room()
            found = self._candidates[name] = _Candidate()
        found.num += 1
        found.spent_ns += spent_ns
        is_scarce = 2 * len(self.labels) >= self._most
        uses_much = found.spent_ns * self._most >= self._total_ns
        if found.num < _COMES_AGAIN or (is_scarce and not uses_much):
            return OTHER
        del self._candidates[name]
        self.labels.append(name)
        return name

    def _age(self) -> None:
        self._num += 1
        if self._num < _HALVED_AFTER:
            return
        self._num, self._total_ns = 0, self._total_ns // 2
        for candidate in self._candidates.values():
            candidate.spent_ns //= 2

    def _make_room(self) -> None:
        """Forget the half that used least."""
        if len(self._candidates) < _MOST_CANDIDATES:
            return
        kept = nlargest(
            _MOST_CANDIDATES // 2, self._candidates.items(), key=lambda item: item[1].spent_ns
        )
        self._candidates = dict(kept)
