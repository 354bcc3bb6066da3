"""The data-parallel replicas of one engine: busy time and blame of each.

A request waits for the replica that it is on, and for no other: a step on another
replica delays no request here. The core's first record of a request says which replica it is on.
Until then an engine's only replica is assumed; among several none is.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.blame import Blame, unknown
from inferscope.attribution.busy import Busy
from inferscope.attribution.culprits import Culprit

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NONE = -1


class Replica(msgspec.Struct, eq=False, gc=False):
    """One replica: when its device was busy, and the blame among its requests."""

    device: Busy
    blame: Blame


class Replicas:
    """The replicas of one engine by data-parallel rank, and the replica of each slot."""

    def __init__(self, num_slots: int) -> None:
        """Start without replicas; `grow` makes room for more requests."""
        self.by_rank: dict[int, Replica] = {}
        self._names = [""] * num_slots
        self._rank: Ints = np.full(num_slots, _NONE)
        """[slots], where each request is kept; assumed of those that follow."""
        self._assumed: dict[int, int] = {}
        """Waiting requests of which no core has reported the replica, and since when they wait."""

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        more = num_slots - len(self._names)
        self._names += [""] * more
        self._rank = np.concatenate([self._rank, np.full(more, _NONE)])
        for replica in self.by_rank.values():
            replica.blame.grow(num_slots)

    def on(self, rank: int, like: Busy) -> Replica:
        """Return a replica. The device of an engine's only one is the engine's.

        Args:
            rank: its data-parallel rank.
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
        """Take a new request, in a free slot."""
        self._names[slot] = name

    def place(self, slot: int, rank: int, like: Busy, *, is_running: bool) -> None:
        """Note which replica a request is on; one that is known stays where it is.

        Args:
            slot: the request's.
            rank: the replica's.
            like: the engine's device.
            is_running: it holds a slot of the engine.
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
        """Start a request's wait."""
        if self._rank.item(slot) == _NONE:
            self._assumed[slot] = at_ns
            if len(self.by_rank) == 1:
                self._enter(slot, next(iter(self.by_rank)))
        if (blame := self.blame(slot)) is not None:
            blame.queued(slot, at_ns)

    def left_out(self, slot: int, since_ns: int, until_ns: int) -> None:
        """Note a span of time in which a request in the queue waited for no other request."""
        if (blame := self.blame(slot)) is not None:
            blame.left_out(slot, since_ns, until_ns)

    def admitted(self, slot: int, at_ns: int) -> None:
        """End a request's wait."""
        self._assumed.pop(slot, None)
        if (blame := self.blame(slot)) is not None:
            blame.admitted(slot, at_ns)

    def end(self, slot: int) -> None:
        """Forget a request, as a victim; others may blame it yet."""
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
        """Add the steps since the last time to the blame."""
        for replica in self.by_rank.values():
            replica.blame.fold()

    def pause(self, at_ns: int) -> None:
        """Note that the engine is paused from here on."""
        for replica in self.by_rank.values():
            replica.device.pause(at_ns)

    def unpause(self, at_ns: int) -> None:
        """Note that it is paused no more."""
        for replica in self.by_rank.values():
            replica.device.unpause(at_ns)

    # --- look-ups -----------------------------------------------------------------------------

    def device_of(self, slot: int, engine: Busy) -> Busy:
        """Return the device that a request waits for; the engine's while that is not known."""
        rank = self._rank.item(slot)
        return engine if rank == _NONE else self.by_rank[rank].device

    def within(
        self, slots: Ints, since_ns: Ints, until_ns: Ints, engine: Busy, *, is_over: Flags
    ) -> tuple[Ints, Ints]:
        """Return of some spans of time how much was busy, and how much was paused; see `Busy`.

        Args:
            slots: [spans], of the requests that waited.
            since_ns: [spans], where they begin.
            until_ns: [spans], where they end.
            engine: the engine's device.
            is_over: [spans], count a pause only if it had ended by the end of the span.
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

    def blame_of(self, slot: int, row_ns: dict[str, int], *, at_ns: int) -> tuple[Culprit, ...]:
        """Return a request's blame; see `Blame.of`. Unknown while its replica is."""
        if (blame := self.blame(slot)) is not None:
            return blame.of(slot, row_ns, at_ns=at_ns)
        return unknown(row_ns)

    def blame(self, slot: int) -> Blame | None:
        """Return the blame of the replica that a request is on; None while that is not known."""
        rank = self._rank.item(slot)
        return None if rank == _NONE else self.by_rank[rank].blame
