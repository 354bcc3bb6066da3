"""Requests that others are compared with, each looked at once for each objective.

Of two hundred peers a breach needs the median of those that met the objective. What they spent, and
whether it was within the limit, stays the same from one breach to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.spent import Explained, Metric, Spent, spent
from inferscope.records import CAUSES

Floats = NDArray[np.float64]

_MOST_OBJECTIVES = 64
"""That compliant peers are remembered for: of a configuration, and of some before it."""


class Objective(msgspec.Struct, frozen=True):
    """What a request has to meet."""

    metric: Metric
    limit_ns: int


class Peer(msgspec.Struct):
    """A request that met an objective."""

    request: Explained
    took: Spent
    number: int
    """How many peers came before it."""
    row: Floats | None = None
    """Nanoseconds by cause, for each gap: made when somebody asks."""

    def row_ns(self) -> Floats:
        """Return what it spent on each of CAUSES, divided by its gaps."""
        if self.row is None:
            by_cause, num = self.took.by_cause, self.took.num_gaps
            self.row = np.array([by_cause.get(cause, 0) / num for cause in CAUSES])
        return self.row


class Peers:
    """Some requests, the newest of many."""

    def __init__(self, requests: Iterable[Explained] = (), *, most: int | None = None) -> None:
        """Take the first ones, and how many to keep; None for all."""
        self._requests = deque(requests, maxlen=most)
        self._num = len(self._requests)
        self._compliant: dict[Objective, tuple[int, deque[Peer]]] = {}
        """By objective: how many peers have been looked at, and who met it."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Explained]:
        return iter(self._requests)

    def newest(self) -> Explained | None:
        """Return the last one that came."""
        return self._requests[-1] if self._requests else None

    def append(self, request: Explained) -> None:
        """Take one more; the oldest goes where there are too many."""
        self._requests.append(request)
        self._num += 1

    def compliant(self, objective: Objective) -> Iterable[Peer]:
        """Return who was seen whole and met an objective, in the order in which they came."""
        first = self._num - len(self._requests)
        num_seen, found = self._compliant.get(objective) or (0, deque[Peer]())
        while found and found[0].number < first:
            found.popleft()
        num_new = min(self._num - num_seen, len(self._requests))
        for back in range(num_new, 0, -1):
            request = self._requests[-back]
            took = None if request.joined_late else spent(request, objective.metric)
            if took is not None and not beyond_ns(request, objective, took):
                found.append(Peer(request, took, self._num - back))
        if len(self._compliant) >= _MOST_OBJECTIVES and objective not in self._compliant:
            self._compliant.clear()
        self._compliant[objective] = self._num, found
        return found


def beyond_ns(request: Explained, objective: Objective, took: Spent) -> int:
    """Return what is beyond the limit, over all gaps; 0 for nothing."""
    if objective.metric == "tbt":
        if request.longest_gap_ns <= objective.limit_ns:
            return 0  # as most are; to go through all gaps takes ten times as long
        return sum(max(0, gap_ns - objective.limit_ns) for gap_ns in request.tbt_ns)
    return max(0, took.whole_ns - took.num_gaps * objective.limit_ns)
