"""Map of one ring's request indices to slots: each ring numbers its own requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import UNKNOWN_SLOT

Ints = NDArray[np.int64]

_MOST_CELLS = 1 << 16
_FREE = 0xFFFFFFFF
"""Value of an empty cell; it is not a valid index."""


class SlotMap:
    """Map of one ring's request indices to slots, looked up by whole columns.

    Indices only grow and requests end, so the table is a ring with a power-of-two size. It is
    enlarged when an old request still occupies the cell of a new one; beyond a size limit the old
    request moves to a separate dictionary.

    Attributes:
        origin: role and rank of the ring.
        num_dropped: number of changes that may invalidate earlier look-ups.
        highest: highest index seen; an unknown one below it has ended.
    """

    def __init__(self, role: str = "core", rank: int = 0) -> None:
        self.origin = (role, rank)
        self.num_dropped = 0
        self.highest = -1
        self._stragglers: dict[int, int] = {}
        self._owner = np.full(256, _FREE, dtype=np.uint32)
        self._slot = np.zeros(256, dtype=np.int64)
        self._last_cell = np.uint32(255)
        self._team: tuple[bytes, int, Ints | None] = (b"", 0, None)
        """Last column looked up as a batch, `num_dropped` at that time, and the result."""

    @property
    def is_front_end(self) -> bool:
        """Return whether the ring belongs to a front end."""
        return self.origin[0] == "frontend"

    def put(self, index: int, slot: int) -> None:
        """Map an index to a slot."""
        if index <= self.highest:  # it may have been looked up before
            self.num_dropped += 1
        self.highest = max(self.highest, index)
        self._stragglers.pop(index, None)
        while self._owner.item(at := index & (len(self._owner) - 1)) not in (_FREE, index):
            if len(self._owner) >= _MOST_CELLS:
                self._stragglers[self._owner.item(at)] = self._slot.item(at)
                break
            self._enlarge()
        self._owner[at], self._slot[at] = index, slot

    def drop(self, index: int) -> None:
        """Remove an index."""
        at = index & (len(self._owner) - 1)
        if self._owner.item(at) == index:
            self._owner[at], self._slot[at] = _FREE, UNKNOWN_SLOT
        elif self._stragglers.pop(index, None) is None:
            return
        self.num_dropped += 1

    def get(self, index: int) -> int:
        """Return the slot of an index; UNKNOWN_SLOT if it is unknown."""
        at = index & (len(self._owner) - 1)
        if self._owner.item(at) == index:
            return self._slot.item(at)
        return self._stragglers.get(index, UNKNOWN_SLOT)

    def slots(self, indices: NDArray[np.uint32]) -> Ints:
        """Return the slots of a column of indices; UNKNOWN_SLOT for each unknown one."""
        at = indices & self._last_cell
        found: Ints = self._slot.take(at)
        owners = self._owner.take(at)
        if owners.tobytes() != indices.tobytes():
            found[owners != indices] = UNKNOWN_SLOT
        if self._stragglers:
            for at_row in np.flatnonzero(found == UNKNOWN_SLOT).tolist():
                found[at_row] = self._stragglers.get(int(indices[at_row]), UNKNOWN_SLOT)
        return found

    def team(self, requests: bytes) -> Ints | None:
        """Return the slots of a recorded column; None if an index is unknown or repeated.

        The same array object is returned while the slots are the same as the last time.
        """
        column, num_dropped, team = self._team
        is_same = column == requests and team is not None
        if is_same and num_dropped == self.num_dropped:
            return team
        slots: Ints | None = self.slots(np.frombuffer(requests, dtype=np.uint32))
        assert slots is not None
        if is_same and team is not None and slots.tobytes() == team.tobytes():
            slots = team
        else:
            of_column = set(slots.tolist())
            if not of_column or UNKNOWN_SLOT in of_column or len(of_column) < len(slots):
                slots = None
        self._team = (requests, self.num_dropped, slots)
        return slots

    def known(self) -> list[int]:
        """Return all currently mapped indices."""
        found: list[int] = self._owner[self._owner != _FREE].tolist()
        return found + list(self._stragglers)

    def _enlarge(self) -> None:
        owners, slots = self._owner, self._slot
        self._owner = np.full(2 * len(owners), _FREE, dtype=np.uint32)
        self._slot = np.zeros(2 * len(owners), dtype=np.int64)
        self._last_cell = np.uint32(2 * len(owners) - 1)
        for owner, slot in zip(owners.tolist(), slots.tolist(), strict=True):
            if owner != _FREE:
                at = owner & (len(self._owner) - 1)
                self._owner[at], self._slot[at] = owner, slot
