"""Blame totals of a request, scaled to its ledger, with the largest contributors by name.

For each cause, a request keeps its largest contributors and the total of all.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_NAMED = 5
"""Number of contributors reported by name, for each cause."""
_KEPT = 16
"""Number of contributors kept, since one that was small may contribute again."""


class BlameShare(NamedTuple):
    """Share of one request in the wait of another, for one cause."""

    cause: str
    """Ledger row of the wait."""
    request_id: str | None
    """Request that was waited for; None for all others combined, including unknown ones."""
    ns: int
    """Share of the wait in nanoseconds."""


_blame_share = tuple.__new__
"""Constructor from a tuple, in half the time of the named tuple's own Python constructor."""


class BlameTotals(msgspec.Struct):
    """Total and largest contributors of one cause of one request's wait."""

    total_ns: float = 0.0
    by_name: dict[str, float] = {}

    def add_rows(
        self, parts: Floats, names: list[str | None], *, total_ns: float, but_for: str
    ) -> None:
        """Add one wait by row.

        Args:
            parts: [rows], share of each row in nanoseconds.
            names: [rows], request IDs; None for a free row.
            total_ns: length of the wait; more than the sum of the parts if some are unknown.
            but_for: request that waited.
        """
        rows = parts.nonzero()[0]
        found = parts[rows]
        if len(rows) > _KEPT:
            most = found.argpartition(-_KEPT)[-_KEPT:]
            rows, found = rows[most], found[most]
        by_name: dict[str, float] = {}
        for row, part in zip(rows.tolist(), found.tolist(), strict=True):
            name = names[row]
            if part > 0 and name is not None and name != but_for:
                by_name[name] = by_name.get(name, 0.0) + part
        self.add(by_name, total_ns=total_ns)

    def add(self, parts: dict[str, float], *, total_ns: float) -> None:
        """Add one wait by contributor, with its total."""
        self.total_ns += max(total_ns, sum(parts.values()))
        if not self.by_name:
            self.by_name = by_name = parts
        else:
            by_name = self.by_name
            for name, part in parts.items():
                by_name[name] = by_name.get(name, 0.0) + part
        if len(by_name) > _KEPT:
            self.by_name = dict(sorted(by_name.items(), key=_by_ns)[:_KEPT])

    def to_shares(self, cause: str, row_ns: int) -> list[BlameShare]:
        """Return the largest contributors, scaled to whole nanoseconds that sum to `row_ns`."""
        most = sorted([(-part, name) for name, part in self.by_name.items()])[:NUM_NAMED]
        scale = row_ns / self.total_ns if self.total_ns > 0 else 0.0
        exact = [-part * scale for part, _ in most]
        exact.append(max(0.0, row_ns - sum(exact)))
        whole = list(map(int, exact))
        missing = row_ns - sum(whole)
        if missing:
            order = sorted([(whole[at] - part, at) for at, part in enumerate(exact)])
            for _, at in order[: max(0, missing)]:
                whole[at] += 1
            whole[order[0][1]] += row_ns - sum(whole)  # floats are inexact beyond a hundred days
        names = [*[name for _, name in most], None]
        return [
            _blame_share(BlameShare, (cause, name, ns))
            for name, ns in zip(names, whole, strict=True)
            if ns > 0
        ]


def _by_ns(item: tuple[str, float]) -> tuple[float, str]:
    return -item[1], item[0]
