"""Error budget of one objective: good and bad requests over a window that moves with wall time.

The window is divided into pieces, so that the state does not grow with the load; a piece expires as
a whole. A clock that is set back books into existing pieces. Expired pieces are retained for a
while, so that a clock that is briefly ahead removes none; counts further ahead than a window do not
belong to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferscope.slo.objectives import Objective

_PIECES = 144
"""Number of pieces: 10 min for a day, 5 h for 30 days; the window is exact to one piece."""
_NS = 1_000_000_000


class Budget:
    """Requests of one objective and one model over its window."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._piece_ns = max(_NS, round(objective.window_ns / _PIECES))
        self._pieces: dict[int, list[int]] = {}
        """Good and bad counts by piece number since the epoch."""

    def add(self, real_ns: int, *, good: int = 0, bad: int = 0) -> None:
        """Count requests judged at a wall time."""
        piece = self._pieces.setdefault(real_ns // self._piece_ns, [0, 0])
        piece[0] += good
        piece[1] += bad
        if len(self._pieces) > 2 * _PIECES:
            now = real_ns // self._piece_ns
            del self._pieces[max(self._pieces, key=lambda number: abs(number - now))]

    def counts(self, real_ns: int) -> tuple[int, int]:
        """Return the good and bad counts over the window that ends at a wall time."""
        now = real_ns // self._piece_ns
        window = range(now - _PIECES + 1, now + _PIECES)
        pieces = [piece for number, piece in self._pieces.items() if number in window]
        return sum(piece[0] for piece in pieces), sum(piece[1] for piece in pieces)

    def remaining(self, real_ns: int) -> float:
        """Return the share of the budget that is left: 1 unspent, 0 spent, below 0 overspent."""
        good, bad = self.counts(real_ns)
        return 1.0 - bad / ((good + bad) * self._objective.budget) if bad else 1.0

    def entries(self) -> list[tuple[int, int, int]]:
        """Return wall time, good and bad counts of each piece, for the state file."""
        return [(at * self._piece_ns, good, bad) for at, (good, bad) in self._pieces.items()]

    def restore(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Add stored pieces, also those of a window of another length."""
        for real_ns, good, bad in entries:
            self.add(real_ns, good=good, bad=bad)
