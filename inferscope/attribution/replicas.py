"""The data-parallel replicas of one engine: busy time and blame of each.

A request waits for the replica that it is on, and for no other: a step on another
replica delays no request here. The core's first record of a request names its replica.
Until then an engine's only replica is assumed; among several none is.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.blame import Blame, unknown
from inferscope.attribution.blame_shares import BlameShare
from inferscope.attribution.busy import Busy

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NONE = -1


class Replica(msgspec.Struct, eq=False, gc=False):
    """Replica: busy time of its device, and the blame among its requests."""

    device: Busy
    blame: Blame


class Replicas:
    """Replicas of one engine by data-parallel rank, and the replica of each slot."""

    def __init__(self, num_slots: int) -> None:
        """Start without replicas; `grow` extends the columns."""
        self.by_rank: dict[int, Replica] = {}
        self._names = [""] * num_slots
        self._rank: Ints = np.full(num_slots, _NONE)
        """[slots], rank of each request's replica; assumed for those in `_assumed`."""
        self._assumed: dict[int, int] = {}
        """Start of the wait of each request whose replica no core has reported."""

    def grow(self, num_slots: int) -> None:
        """Extend the columns to `num_slots` requests."""
        more = num_slots - len(self._names)
        self._names += [""] * more
        self._rank = np.concatenate([self._rank, np.full(more, _NONE)])
        for replica in self.by_rank.values():
            replica.blame.grow(num_slots)

    def on(self, rank: int, like: Busy) -> Replica:
        """Return a replica, created at first use; an only replica shares the engine's device.

        Args:
            rank: data-parallel rank.
            like: the engine's device.
        """
        replica = self.by_rank.get(rank)
        if replica is None:
            replica = Replica(like, Blame(len(self._names), like))
            if self.by_rank:
                replica.device = like.idle_like()
                for other in self.by_rank.values():
                    if other.device is like:
                        other.device = like.copied()
            self.by_rank[rank] = replica
            if len(self.by_rank) == 1:
                for slot, at_ns in self._assumed.items():
                    self._enter(slot, rank)
                    replica.blame.queued(slot, at_ns)
        return replica

    # --- requests, in the order of time -------------------------------------------------------

    def begin(self, slot: int, name: str) -> None:
        """Register a new request in a free slot."""
        self._names[slot] = name

    def place(self, slot: int, rank: int, like: Busy, *, is_running: bool) -> None:
        """Record the replica of a request; a known replica does not change.

        Args:
            slot: slot of the request.
            rank: rank of the replica.
            like: the engine's device.
            is_running: whether the request holds a sequence slot.
        """
        replica, was = self.on(rank, like), self._rank.item(slot)
        since_ns = self._assumed.pop(slot, None)
        if was == rank or (was != _NONE and since_ns is None):
            return
        if was != _NONE:
            self.by_rank[was].blame.withdraw(slot)
        self._enter(slot, rank)
        if since_ns is not None:
            replica.blame.queued(slot, since_ns)
        elif is_running:
            replica.blame.runs(slot)

    def _enter(self, slot: int, rank: int) -> None:
        self._rank[slot] = rank
        self.by_rank[rank].blame.begin(slot, self._names[slot])

    def queued(self, slot: int, at_ns: int) -> None:
        """Start the queue time of a request."""
        if self._rank.item(slot) == _NONE:
            self._assumed[slot] = at_ns
            if len(self.by_rank) == 1:
                self._enter(slot, next(iter(self.by_rank)))
        if (blame := self.blame(slot)) is not None:
            blame.queued(slot, at_ns)

    def left_out(self, slot: int, since_ns: int, until_ns: int) -> None:
        """Exclude an interval in which a queued request waited for no other request."""
        if (blame := self.blame(slot)) is not None:
            blame.left_out(slot, since_ns, until_ns)

    def admitted(self, slot: int, at_ns: int) -> None:
        """End the queue time of a request."""
        self._assumed.pop(slot, None)
        if (blame := self.blame(slot)) is not None:
            blame.admitted(slot, at_ns)

    def end(self, slot: int) -> None:
        """Release a request as a victim; others may still blame it."""
        self._assumed.pop(slot, None)
        if (blame := self.blame(slot)) is not None:
            blame.end(slot)
        self._rank[slot] = _NONE

    # --- steps --------------------------------------------------------------------------------

    def strangers(self, slots: Ints, rank: int) -> list[int]:
        """Return the members of a step that are not known to be on its replica."""
        others: list[int] = slots[self._rank[slots] != rank].tolist()
        return others

    def fold(self) -> None:
        """Add the steps since the last call to the blame."""
        for replica in self.by_rank.values():
            replica.blame.fold()

    def pause(self, at_ns: int) -> None:
        """Record the start of a pause."""
        for replica in self.by_rank.values():
            replica.device.pause(at_ns)

    def unpause(self, at_ns: int) -> None:
        """Record the end of a pause."""
        for replica in self.by_rank.values():
            replica.device.unpause(at_ns)

    # --- look-ups -----------------------------------------------------------------------------

    def device_of(self, slot: int, engine: Busy) -> Busy:
        """Return the device that a request waits for; the engine's while its replica is unknown."""
        rank = self._rank.item(slot)
        return engine if rank == _NONE else self.by_rank[rank].device

    def within(
        self, slots: Ints, since_ns: Ints, until_ns: Ints, engine: Busy, *, is_over: Flags
    ) -> tuple[Ints, Ints]:
        """Return the busy and the paused nanoseconds of each interval; see `Busy`.

        Args:
            slots: [spans], slots of the requests that waited.
            since_ns: [spans], starts of the intervals.
            until_ns: [spans], ends of the intervals.
            engine: the engine's device.
            is_over: [spans], whether to count only pauses that ended within the interval.
        """
        busy_ns, paused_ns = engine.within(since_ns, until_ns, is_over=is_over)
        if len(self.by_rank) > 1:
            ranks = self._rank[slots]
            for rank, replica in self.by_rank.items():
                at = (ranks == rank).nonzero()[0]
                if len(at):
                    busy_ns[at], _ = replica.device.within(
                        since_ns[at], until_ns[at], is_over=is_over[at]
                    )
        return busy_ns, paused_ns

    def blame_of(self, slot: int, row_ns: dict[str, int], *, at_ns: int) -> tuple[BlameShare, ...]:
        """Return a request's blame; see `Blame.of`. It is unknown while its replica is."""
        if (blame := self.blame(slot)) is not None:
            return blame.of(slot, row_ns, at_ns=at_ns)
        return unknown(row_ns)

    def blame(self, slot: int) -> Blame | None:
        """Return the blame of a request's replica; None while the replica is unknown."""
        rank = self._rank.item(slot)
        return None if rank == _NONE else self.by_rank[rank].blame
