"""Intervals in which a request's client did not read what the server had written.

A front end reports each interval where it ends, with the tokens that waited for it (`Emitted`). In
time that would be `output`, the overlap with them is `delivery`: the engine and its front end were
done, and the connection would not take more. Computed while its client did not read, a request's
steps keep their causes.

    output      finished ───────────── last token at the front end
    blocked         ├────┤   ├──────┤                                 → `delivery`
"""

from __future__ import annotations

from array import array
from bisect import bisect_left


class _Intervals:
    """Disjoint intervals in order: starts, ends, and prefix sums of their lengths."""

    __slots__ = ("ends_ns", "starts_ns", "sums_ns")

    def __init__(self) -> None:
        self.starts_ns, self.ends_ns = array("q"), array("q")
        self.sums_ns = array("q", [0])

    def add(self, since_ns: int, until_ns: int) -> None:
        since_ns = max(since_ns, self.ends_ns[-1] if self.ends_ns else since_ns)
        if until_ns > since_ns:
            self.starts_ns.append(since_ns)
            self.ends_ns.append(until_ns)
            self.sums_ns.append(self.sums_ns[-1] + until_ns - since_ns)

    def up_to_ns(self, at_ns: int) -> int:
        num = bisect_left(self.starts_ns, at_ns)
        beyond_ns = max(0, self.ends_ns[num - 1] - at_ns) if num else 0
        return self.sums_ns[num] - beyond_ns


class BlockedTime:
    """Blocked intervals by slot; most requests have none."""

    def __init__(self) -> None:
        self._of_slot: dict[int, _Intervals] = {}

    def forget(self, slot: int) -> None:
        """Drop a slot's intervals when its request is final or a new one begins there."""
        self._of_slot.pop(slot, None)

    def add(self, slot: int, blocked_ns: int, until_ns: int) -> None:
        """Add an interval by its length and end; call in the order of the ends.

        Overlapping time counts once.
        """
        intervals = self._of_slot.get(slot)
        if intervals is None:
            intervals = self._of_slot[slot] = _Intervals()
        intervals.add(until_ns - blocked_ns, until_ns)

    def within_ns(self, slot: int, since_ns: int, until_ns: int) -> int:
        """Return how long a request's connection was blocked within an interval, in nanoseconds."""
        intervals = self._of_slot.get(slot)
        if intervals is None or until_ns <= since_ns:
            return 0
        return intervals.up_to_ns(until_ns) - intervals.up_to_ns(since_ns)
