"""Who has series of its own: the few that use most, whatever clients send; all others are `other`.

A name comes from a header, so anybody can make up as many as he likes. A series is given late, to
who comes again, and the second half of them only to who uses a good part of it all.

A series is taken back from a name that is not used any more, and, where there are no more to give,
from the one that uses least for one that uses much more. What it had counted goes with it, for in
`other` it would show as a rate without any use; a name that returns begins at 0.
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
KEPT_NS = 3_600_000_000_000
"""Minimum time for which a name keeps its series, from its start and from its last request."""
UNUSED_AFTER = 1000
"""Minimum number of other requests since a name's last one: a night without any takes nothing."""
_TIMES_MORE = 4
"""Ratio of use from which one name takes the series of another."""


class _Candidate(msgspec.Struct):
    spent_ns: int = 0
    num: int = 0


class _Holder(msgspec.Struct):
    """A name that has a series."""

    spent_ns: int
    since_ns: int
    used_ns: int
    """Time of its last request."""
    used_at: int
    """Number of requests up to then."""


class Tenants:
    """Turns names into labels, of which there are at most `most` and RESERVED.

    Attributes:
        labels: that have a series, RESERVED aside.
        num_changes: times that a label was given or taken back.
    """

    def __init__(self, known: Iterable[str] = (), *, most: int) -> None:
        """Start with those that have series from the start."""
        self.labels = [name for name in known if name not in RESERVED]
        self.num_changes = 0
        self._most = most
        self._holders: dict[str, _Holder] = {}
        """Without those that are known from the start, which keep their series."""
        self._candidates: dict[str, _Candidate] = {}
        self._total_ns = 0
        self._num = 0
        self._num_all = 0
        self._now_ns = 0

    def change(self, known: Iterable[str], *, most: int) -> None:
        """Change the names that always have a series, and the maximum of series."""
        has = set(self.labels)
        for name in known:
            self._holders.pop(name, None)
            if name not in RESERVED and name not in has:
                self.labels.append(name)
        self.num_changes += 1
        self._most = most

    def label(self, name: str | None, spent_ns: int, at_ns: int = 0) -> str:
        """Return under which label a request is counted.

        Args:
            name: what it said; None or nothing where it said none.
            spent_ns: what it took.
            at_ns: when it ended.
        """
        if not name:
            return NOBODY
        self._num_all += 1
        self._now_ns = max(self._now_ns, at_ns)
        if name in self.labels:
            holder = self._holders.get(name)
            if holder is not None:
                holder.spent_ns += spent_ns
                holder.used_ns, holder.used_at = self._now_ns, self._num_all
            return name
        self._age()
        self._total_ns += spent_ns
        if name in RESERVED:
            return OTHER
        found = self._candidates.get(name)
        if found is None:
            self._make_room()
            found = self._candidates[name] = _Candidate()
        found.num += 1
        found.spent_ns += spent_ns
        self._take_back_unused()
        is_scarce = 2 * len(self.labels) >= self._most
        uses_much = found.spent_ns * self._most >= self._total_ns
        if found.num < _COMES_AGAIN or (is_scarce and not uses_much):
            return OTHER
        if len(self.labels) >= self._most and not self._take_back_for(found):
            return OTHER
        del self._candidates[name]
        self.labels.append(name)
        self.num_changes += 1
        now_ns = self._now_ns
        self._holders[name] = _Holder(found.spent_ns, now_ns, now_ns, self._num_all)
        return name

    def _take_back_unused(self) -> None:
        for name, holder in list(self._holders.items()):
            is_old = self._now_ns - holder.used_ns >= KEPT_NS
            if is_old and self._num_all - holder.used_at >= UNUSED_AFTER:
                self._take_back(name)

    def _take_back_for(self, candidate: _Candidate) -> bool:
        """Take back the series with the least use; return False if that is too much."""
        old = [
            (holder.spent_ns, name)
            for name, holder in self._holders.items()
            if self._now_ns - holder.since_ns >= KEPT_NS
        ]
        if not old or len(self.labels) > self._most:
            return False
        spent_ns, name = min(old)
        if spent_ns * _TIMES_MORE > candidate.spent_ns:
            return False
        self._take_back(name)
        return True

    def _take_back(self, name: str) -> None:
        del self._holders[name]
        self.labels.remove(name)
        self.num_changes += 1

    def _age(self) -> None:
        self._num += 1
        if self._num < _HALVED_AFTER:
            return
        self._num, self._total_ns = 0, self._total_ns // 2
        for candidate in self._candidates.values():
            candidate.spent_ns //= 2
        for holder in self._holders.values():
            holder.spent_ns //= 2

    def _make_room(self) -> None:
        """Forget the half that used least."""
        if len(self._candidates) < _MOST_CANDIDATES:
            return
        kept = nlargest(
            _MOST_CANDIDATES // 2, self._candidates.items(), key=lambda item: item[1].spent_ns
        )
        self._candidates = dict(kept)
