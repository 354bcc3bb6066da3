"""Peer requests for comparison, each evaluated once for each objective.

A breach needs the median of those of two hundred peers that met the objective. Their time by cause
and their compliance stay the same from one breach to the next. Long-lived peers are kept as
`remembered` records: for a hundred engines they take 50 MB less.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.metric_breakdown import LedgerView, Metric, MetricBreakdown, breakdown
from inferscope.records import CAUSES

Floats = NDArray[np.float64]

_MOST_OBJECTIVES = 64
"""Largest number of objectives with cached peers: those of a configuration and some earlier
ones."""


Row = tuple[tuple[str, ...], bytes]
"""Ledger: causes and their nanoseconds, eight bytes each; a quarter of a dict's size."""


class PeerRecord(msgspec.Struct, frozen=True, gc=False):
    """Finished request without its tokens: an `LedgerView` one for comparison with others.

    Only the longest of its gaps is known. It determines whether the request met an objective, but
    not by how much it missed one, which is not needed of a peer.
    """

    prompt_tokens: int | None
    output_tokens: int
    arrived_ns: int
    first_token_ns: int | None
    last_token_ns: int | None
    delivered_ns: int
    finish: str
    joined_late: bool
    is_in_one_piece: bool
    num_gaps: int
    longest_gap_ns: int
    ledger: Row
    ttft_ledger: Row

    @property
    def ledger_ns(self) -> dict[str, int]:
        """Return the causes of its whole time."""
        return _by_cause(self.ledger)

    @property
    def ttft_ledger_ns(self) -> dict[str, int]:
        """Return the causes of its time to first token."""
        return _by_cause(self.ttft_ledger)

    @property
    def tbt_ns(self) -> list[int]:
        """Return the longest of its gaps."""
        return [self.longest_gap_ns] if self.num_gaps else []


def remembered(request: LedgerView) -> PeerRecord:
    """Return the fields of a request that a comparison needs."""
    return PeerRecord(
        request.prompt_tokens,
        request.output_tokens,
        request.arrived_ns,
        request.first_token_ns,
        request.last_token_ns,
        request.delivered_ns,
        request.finish,
        request.joined_late,
        request.is_in_one_piece,
        request.num_gaps,
        request.longest_gap_ns,
        _row(request.ledger_ns),
        _row(request.ttft_ledger_ns),
    )


def _row(by_cause: dict[str, int]) -> Row:
    return tuple(by_cause), array("q", by_cause.values()).tobytes()


def _by_cause(row: Row) -> dict[str, int]:
    return dict(zip(row[0], array("q", row[1]), strict=True))


class LatencyLimit(msgspec.Struct, frozen=True):
    """Latency limit for one request."""

    metric: Metric
    """Limited metric."""
    limit_ns: int
    """Limit in nanoseconds."""


class Peer(msgspec.Struct):
    """Request that met an objective."""

    request: LedgerView
    took: MetricBreakdown
    number: int
    """Number of peers before it."""
    row: Floats | None = None
    """Nanoseconds by cause and gap; None until first read."""

    def row_ns(self) -> Floats:
        """Return the nanoseconds of each of CAUSES, divided by the number of gaps."""
        if self.row is None:
            by_cause, num = self.took.by_cause, self.took.num_gaps
            self.row = np.array([by_cause.get(cause, 0) / num for cause in CAUSES])
        return self.row


class Peers:
    """The newest of many requests."""

    def __init__(self, requests: Iterable[LedgerView] = (), *, most: int | None = None) -> None:
        """Start with the first requests; keep the newest `most`, or all for None."""
        self._requests = deque(requests, maxlen=most)
        self._num = len(self._requests)
        self._compliant: dict[LatencyLimit, tuple[int, deque[Peer]]] = {}
        """Number of peers evaluated and those that met the objective, by objective."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LedgerView]:
        return iter(self._requests)

    def newest(self) -> LedgerView | None:
        """Return the newest request."""
        return self._requests[-1] if self._requests else None

    def append(self, request: LedgerView) -> None:
        """Append a request; drop the oldest beyond the limit."""
        self._requests.append(request)
        self._num += 1

    def compliant(self, objective: LatencyLimit) -> Iterable[Peer]:
        """Return the fully observed requests that met an objective, in order of arrival."""
        first = self._num - len(self._requests)
        num_seen, found = self._compliant.get(objective) or (0, deque[Peer]())
        while found and found[0].number < first:
            found.popleft()
        num_new = min(self._num - num_seen, len(self._requests))
        for back in range(num_new, 0, -1):
            request = self._requests[-back]
            took = None if request.joined_late else breakdown(request, objective.metric)
            if took is not None and not beyond_ns(request, objective, took):
                found.append(Peer(request, took, self._num - back))
        if len(self._compliant) >= _MOST_OBJECTIVES and objective not in self._compliant:
            self._compliant.clear()
        self._compliant[objective] = self._num, found
        return found


def beyond_ns(request: LedgerView, objective: LatencyLimit, took: MetricBreakdown) -> int:
    """Return the nanoseconds beyond the limit, summed over all gaps; 0 for none."""
    if objective.metric == "tbt":
        if request.longest_gap_ns <= objective.limit_ns:
            return 0  # as most are; to go through all gaps takes ten times as long
        return sum(max(0, gap_ns - objective.limit_ns) for gap_ns in request.tbt_ns)
    return max(0, took.whole_ns - took.num_gaps * objective.limit_ns)
