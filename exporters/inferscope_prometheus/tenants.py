"""Bounded tenant labels: the top users have series of their own, all others are `other`.

The name comes from a header, so clients can send any number of names. A name gets a series only if
it recurs, and the second half of the series go only to names with a large share of the use.

A series is reclaimed from an unused name and, if none is free, from the name with the least use for
one with much more. Its counts are dropped: in `other` they would show as a rate without use. A name
that returns starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

import msgspec

UNNAMED, OTHER, WASTE, IDLE = "none", "other", "waste", "idle"
"""Labels of: no name; a name without a series; time of no tenant."""
RESERVED = (UNNAMED, OTHER, WASTE, IDLE)
_COMES_AGAIN = 3
_MOST_CANDIDATES = 1024
_HALVED_AFTER = 10_000
"""Number of requests after which use is halved: old use counts less."""
KEPT_NS = 3_600_000_000_000
"""Minimum time in ns for which a name keeps its series, from its start and from its last request.
"""
UNUSED_AFTER = 1000
"""Minimum number of other requests since a name's last one: a night without requests reclaims none.
"""
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
    """Map of names to labels, at most `most` besides RESERVED.

    Attributes:
        labels: labels with a series, without RESERVED.
        num_changes: number of labels given or reclaimed.
    """

    def __init__(self, known: Iterable[str] = (), *, most: int) -> None:
        """Start with the names that have series from the start."""
        self.labels = [name for name in known if name not in RESERVED]
        self.num_changes = 0
        self._most = most
        self._holders: dict[str, _Holder] = {}
        """Names with series, without the configured ones, which keep theirs."""
        self._candidates: dict[str, _Candidate] = {}
        self._total_ns = 0
        self._num = 0
        self._num_all = 0
        self._now_ns = 0

    def change(self, known: Iterable[str], *, most: int) -> None:
        """Change the names that always have a series, and the maximum number of series."""
        has = set(self.labels)
        for name in known:
            self._holders.pop(name, None)
            if name not in RESERVED and name not in has:
                self.labels.append(name)
        self.num_changes += 1
        self._most = most

    def label(self, name: str | None, spent_ns: int, at_ns: int = 0) -> str:
        """Return the label under which a request is counted.

        Args:
            name: tenant name; None or empty without one.
            spent_ns: device time of the request.
            at_ns: end time of the request.
        """
        if not name:
            return UNNAMED
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
            self._drop_least_used()
            found = self._candidates[name] = _Candidate()
        found.num += 1
        found.spent_ns += spent_ns
        self._reclaim_unused()
        is_scarce = 2 * len(self.labels) >= self._most
        uses_much = found.spent_ns * self._most >= self._total_ns
        if found.num < _COMES_AGAIN or (is_scarce and not uses_much):
            return OTHER
        if len(self.labels) >= self._most and not self._reclaim_for(found):
            return OTHER
        del self._candidates[name]
        self.labels.append(name)
        self.num_changes += 1
        now_ns = self._now_ns
        self._holders[name] = _Holder(found.spent_ns, now_ns, now_ns, self._num_all)
        return name

    def _reclaim_unused(self) -> None:
        for name, holder in list(self._holders.items()):
            is_old = self._now_ns - holder.used_ns >= KEPT_NS
            if is_old and self._num_all - holder.used_at >= UNUSED_AFTER:
                self._reclaim(name)

    def _reclaim_for(self, candidate: _Candidate) -> bool:
        """Reclaim the series with the least use; return False if its use is too high."""
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
        self._reclaim(name)
        return True

    def _reclaim(self, name: str) -> None:
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

    def _drop_least_used(self) -> None:
        """Drop the half of the candidates with the least use."""
        if len(self._candidates) < _MOST_CANDIDATES:
            return
        kept = nlargest(
            _MOST_CANDIDATES // 2, self._candidates.items(), key=lambda item: item[1].spent_ns
        )
        self._candidates = dict(kept)
