"""Ledgers of the slowest requests, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

_BINS_PER_E = 10


class Tail:
    """Ledger rows of requests by duration, in bins of 10 %.

    Attributes:
        num: number of requests.
        whole_ns: rows of all requests.
    """

    def __init__(self) -> None:
        self.num = 0
        self.whole_ns: Counter[str] = Counter()
        self._bins: dict[int, tuple[list[int], Counter[str]]] = {}

    def add(self, took_ns: int, rows_ns: Mapping[str, int]) -> None:
        """Count one request.

        Args:
            took_ns: duration that ranks it.
            rows_ns: its ledger by cause.
        """
        self.num += 1
        self.whole_ns.update(rows_ns)
        at = int(math.log(max(1, took_ns)) * _BINS_PER_E)
        num, rows = self._bins.setdefault(at, ([0], Counter()))
        num[0] += 1
        rows.update(rows_ns)

    def slowest(self, share: float) -> tuple[int, Counter[str]]:
        """Return the number and the rows of the slowest requests, at least this share of all."""
        num, rows = 0, Counter[str]()
        for at in sorted(self._bins, reverse=True):
            if num >= share * self.num:
                break
            of_bin, rows_ns = self._bins[at]
            num += of_bin[0]
            rows.update(rows_ns)
        return num, rows
