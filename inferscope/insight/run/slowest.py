"""The requests of a run that took the longest, from arrival to the end of delivery."""

from __future__ import annotations

import heapq

from inferscope.fold import FinalRequest

MOST_SLOWEST = 10


class SlowestRequests:
    """Final requests by duration, of which only the longest are kept."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, FinalRequest]] = []
        self._num = 0

    def add(self, request: FinalRequest) -> None:
        """Add a request; one that was not observed from its beginning has no known duration."""
        if request.joined_late:
            return
        self._num += 1  # the earlier of two equally long requests is kept
        entry = (request.delivered_ns - request.arrived_ns, -self._num, request)
        if len(self._heap) < MOST_SLOWEST:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def requests(self) -> tuple[FinalRequest, ...]:
        """Return them, the longest first."""
        return tuple(request for *_, request in sorted(self._heap, reverse=True, key=_by_length))


def _by_length(entry: tuple[int, int, FinalRequest]) -> tuple[int, int]:
    return entry[:2]
