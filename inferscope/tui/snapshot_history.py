"""Snapshots to step back to: fixed ones from before the screen, and those since."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inferscope.fold import Snapshot

KEPT_SNAPSHOTS = 120
KEPT_ROWS = 40_000
"""Maximum number of rows over all new snapshots, about 50 MB."""
_LATE_NS = 500_000_000
"""Age at which a step is in a snapshot at the latest."""
_SLICES_A_ROW = 12
"""Slices of steps that take as much memory as one row."""


class SnapshotHistory:
    """Snapshots in time order; of the new ones, the oldest are dropped.

    Attributes:
        shown_idx: index of the one on a frozen screen; it follows that snapshot when others are
            dropped.
    """

    def __init__(self, earlier: Sequence[Snapshot] = ()) -> None:
        """Start with snapshots that stay."""
        self._earlier = tuple(earlier)
        self._kept: deque[Snapshot] = deque()
        self._rows_of: deque[int] = deque()
        """Rows of each kept snapshot, the slices of its new steps included."""
        self._num_rows = 0
        self.shown_idx = 0

    def __len__(self) -> int:
        return len(self._earlier) + len(self._kept)

    def __getitem__(self, index: int) -> Snapshot:
        num = len(self._earlier)
        index = index + len(self) if index < 0 else index
        return self._earlier[index] if index < num else self._kept[index - num]

    def add(self, snapshot: Snapshot) -> None:
        """Add the newest; if nothing happened since the previous one, it replaces that."""
        if self._kept and self._kept[-1].mono_ns == snapshot.mono_ns:
            self._kept.pop()
            self._num_rows -= self._rows_of.pop()
        self._rows_of.append(_num_rows(snapshot, self._kept[-1] if self._kept else None))
        self._num_rows += self._rows_of[-1]
        self._kept.append(snapshot)
        while len(self._kept) > 1 and (
            len(self._kept) > KEPT_SNAPSHOTS or self._num_rows > KEPT_ROWS
        ):
            self._kept.popleft()
            self._num_rows -= self._rows_of.popleft()
            if self.shown_idx >= len(self._earlier):
                self.shown_idx = max(self.shown_idx - 1, len(self._earlier))

    def show(self, index: int) -> Snapshot:
        """Select the nearest snapshot, and return it."""
        self.shown_idx = max(min(index, len(self) - 1), 0)
        return self[self.shown_idx]


def _num_rows(snapshot: Snapshot, before: Snapshot | None) -> int:
    """Return the rows of a snapshot; steps that the one before it holds too are shared."""
    num_rows = num_slices = 0
    since_ns = 0 if before is None else before.mono_ns
    for view in snapshot.engines:
        num_rows += len(view.requests)
        for step in reversed(view.steps):
            if step.end_ns < since_ns - _LATE_NS:
                break
            num_slices += len(step.request_ids)
    return num_rows + num_slices // _SLICES_A_ROW
