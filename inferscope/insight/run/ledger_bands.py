"""Ledgers of requests by their rank in a latency: of the fast half, and of the slowest percent.

    fastest half │ up to p90 │ up to p99 │ slowest
    ◄─── bins of 1 % of the latency, each with the summed ledgers of its requests ───►

The mean ledger of all requests hides the tail: what the slowest wait for, the others do not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inferscope.log_histogram import BINS_PER_E

BOUNDS = (0.5, 0.9, 0.99)
"""Shares of the requests at which bands end."""


@dataclass(frozen=True)
class LedgerBand:
    """Requests between two ranks of a latency."""

    low: float
    """Share of the requests in faster bands."""
    high: float
    """Share of the requests up to the end of this one; bins are whole, so it may exceed a bound."""
    num: int
    """Requests in the band."""
    fastest_ns: int
    """Smallest latency in the band."""
    slowest_ns: int
    """Largest latency in the band."""
    sum_ns: int
    """Sum of the latencies."""
    by_cause: dict[str, int]
    """Sums of the ledger's rows; they sum to `sum_ns`."""


@dataclass
class _Bin:
    num: int = 0
    fastest_ns: int = 0
    slowest_ns: int = 0
    sum_ns: int = 0
    by_cause: Counter[str] = field(default_factory=Counter)

    def add(
        self, num: int, low_ns: int, high_ns: int, sum_ns: int, rows: Mapping[str, int]
    ) -> None:
        self.fastest_ns = min(self.fastest_ns, low_ns) if self.num else low_ns
        self.slowest_ns = max(self.slowest_ns, high_ns)
        self.num += num
        self.sum_ns += sum_ns
        self.by_cause.update(rows)


class LedgerBands:
    """Ledger rows of requests by latency, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self.num = 0
        self._bins: dict[int, _Bin] = {}

    def add(self, took_ns: int, by_cause: Mapping[str, int]) -> None:
        """Count one request.

        Args:
            took_ns: latency that ranks it.
            by_cause: ledger of that latency.
        """
        self.num += 1
        at = math.floor(math.log(max(1, took_ns)) * BINS_PER_E)
        self._bins.setdefault(at, _Bin()).add(1, took_ns, took_ns, took_ns, by_cause)

    def bands(self) -> tuple[LedgerBand, ...]:
        """Return the bands that hold requests, the fastest first."""
        found = [_Bin() for _ in (*BOUNDS, 1.0)]
        at = seen = 0
        for _, each in sorted(self._bins.items()):
            while at < len(BOUNDS) and seen >= BOUNDS[at] * self.num:
                at += 1
            seen += each.num
            found[at].add(each.num, each.fastest_ns, each.slowest_ns, each.sum_ns, each.by_cause)
        bands: list[LedgerBand] = []
        reached = 0
        for of in filter(lambda each: each.num, found):
            low, reached = reached / self.num, reached + of.num
            bands.append(
                LedgerBand(
                    low,
                    reached / self.num,
                    of.num,
                    of.fastest_ns,
                    of.slowest_ns,
                    of.sum_ns,
                    dict(of.by_cause),
                )
            )
        return tuple(bands)
