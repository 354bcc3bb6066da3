"""Log of token emissions: at the edge that the client sees, and at the engine's edge.

A decode batch emits together, step after step. Writing each time for every member would cost more
than all other work on such a step. So the batch has one log of times, and each member stores the
position at which it joined. A member's own times are written when it leaves or when they are read.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_MOST_LOGGED = 4096
_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class EmissionLog:
    """Emission events by slot; all times are host nanoseconds."""

    def __init__(self, num_slots: int) -> None:
        self._num = np.zeros(num_slots, dtype=np.int64)
        self._edge_ns = np.zeros(num_slots, dtype=np.int64)
        self._engine_ns = np.zeros(num_slots, dtype=np.int64)
        self._times_ns = [array("q") for _ in range(num_slots)]
        self._counts: dict[int, array[int]] = {}
        """Tokens per event by slot, for requests with events of other than one token."""
        self._log = array("q")
        """Emission times of the batch."""
        self._since: dict[int, int] = {}
        """Position in the log at which each member joined, by slot."""
        self._is_in = np.zeros(num_slots, dtype=np.bool_)
        """Whether the request is a member of the batch, [slots]."""
        self._team = _NOBODY
        """Slots of the members, if none has left since; empty otherwise."""
        self._is_in_engine = False
        """Whether the log's times are also those of the engine's edge."""

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self._num[slot] = self._edge_ns[slot] = self._engine_ns[slot] = 0

    def end(self, slot: int) -> None:
        """Free a slot; arrays of times returned before are not changed by later records."""
        self.part(slot)
        self._times_ns[slot] = array("q")
        self._counts.pop(slot, None)

    def grow(self, num_slots: int) -> None:
        """Enlarge the columns to this number of slots."""
        more = num_slots - len(self._num)
        none = np.zeros(more, dtype=np.int64)
        self._num = np.concatenate([self._num, none])
        self._edge_ns = np.concatenate([self._edge_ns, none])
        self._engine_ns = np.concatenate([self._engine_ns, none])
        self._times_ns += [array("q") for _ in range(more)]
        self._is_in = np.concatenate([self._is_in, none > 0])

    # --- the batch ----------------------------------------------------------------------------

    @property
    def last_ns(self) -> int:
        """Return when the batch last emitted."""
        return self._log[-1]

    def gather(self, slots: Ints, *, is_in_engine: bool) -> list[int]:
        """Set the members of the batch.

        Args:
            slots: slots of the members, each once, [requests]; the same array object means the
                same members.
            is_in_engine: whether the engine's edge is the requests' edge.

        Returns:
            Slots that were not in the previous batch.
        """
        if len(self._log) >= _MOST_LOGGED or is_in_engine is not self._is_in_engine:
            self._break_up()
            self._is_in_engine = is_in_engine
        if slots is self._team:
            return []
        since, joining = self._since, outsiders(slots, self._is_in)
        if len(slots) - len(joining) < len(since):
            for slot in since.keys() - set(slots.tolist()):
                self.part(slot)
        if not since:
            self._log = array("q")
        for slot in joining:
            since[slot] = len(self._log)
            self._is_in[slot] = True
        self._team = slots
        return joining

    def emit(self, at_ns: int) -> None:
        """Log that each member of the batch emits a token."""
        self._log.append(at_ns)

    def _tell(self, slot: int) -> None:
        """Write a member's unwritten times from the log."""
        since, log = self._since[slot], self._log
        if since < len(log):
            self._since[slot] = len(log)
            self._num[slot] += len(log) - since
            self._edge_ns[slot] = log[-1]
            if self._is_in_engine:
                self._engine_ns[slot] = log[-1]
            self._times_ns[slot] += log[since:] if since else log

    def part(self, slot: int) -> None:
        """Remove a request from the batch, if it is a member."""
        if slot in self._since:
            self._tell(slot)
            del self._since[slot]
            self._is_in[slot] = False
            self._team = _NOBODY

    def _break_up(self) -> None:
        self._tell_all()
        self._since.clear()
        self._is_in[:] = False
        self._log = array("q")
        self._team = _NOBODY

    def _tell_all(self) -> None:
        for slot in self._since:
            self._tell(slot)

    # --- others -------------------------------------------------------------------------------

    def emit_several(self, slots: Ints, counts: list[int], at_ns: int) -> None:
        """Log events with any number of tokens each; a request may occur more than once."""
        self._break_up()
        for slot, num_tokens in zip(slots.tolist(), counts, strict=True):
            times_ns, told = self._times_ns[slot], self._counts.get(slot)
            if told is None and num_tokens != 1:
                told = self._counts[slot] = array("I")
            times_ns.append(at_ns)
            if told is not None:
                told.extend([1] * (len(times_ns) - 1 - len(told)))
                told.append(num_tokens)
            self._num[slot] += num_tokens
            self._edge_ns[slot] = at_ns

    def emit_in_engine(self, slots: Ints, at_ns: int) -> None:
        """Log that tokens pass the engine's edge, which may not be the requests' last edge."""
        self.engine_ns[slots] = at_ns

    # --- reading ------------------------------------------------------------------------------

    @property
    def num(self) -> Ints:
        """Return the number of emitted tokens: [slots]."""
        self._tell_all()
        return self._num

    @property
    def edge_ns(self) -> Ints:
        """Return the time of the last emission; 0 before the first: [slots]."""
        self._tell_all()
        return self._edge_ns

    @property
    def engine_ns(self) -> Ints:
        """Return the time of the last emission at the engine's edge: [slots]."""
        if self._is_in_engine:
            self._tell_all()
        return self._engine_ns

    @property
    def times_ns(self) -> list[array[int]]:
        """Return the times of each request's events, by slot."""
        self._tell_all()
        return self._times_ns

    def edges_of(self, slot: int) -> tuple[int, int]:
        """Return when a request's last token passed its edge and the engine's; 0 for never."""
        since = self._since.get(slot)
        if since is not None and since < len(self._log):
            self._tell(slot)
        return self._edge_ns.item(slot), self._engine_ns.item(slot)

    def num_of(self, slot: int) -> int:
        """Return the number of tokens that a request has emitted."""
        if slot in self._since:
            self._tell(slot)
        return self._num.item(slot)

    def events_of(self, slot: int) -> tuple[array[int], tuple[int, ...]]:
        """Return the times of a request's events, and the tokens of each."""
        if slot in self._since:
            self._tell(slot)
        times_ns, counts = self._times_ns[slot], tuple(self._counts.get(slot, ()))
        num_more = len(times_ns) - len(counts)
        return times_ns, counts + _ones(num_more) if counts else _ones(num_more)


@lru_cache(1024)
def _ones(num: int) -> tuple[int, ...]:
    """Return a cached tuple of `num` ones: the tokens per event of most requests."""
    return (1,) * num


def outsiders(slots: Ints, is_in: Flags) -> list[int]:
    """Return the slots that are not members; they are few, so each is searched by itself.

    Args:
        slots: slots to search, [requests].
        is_in: whether a slot is a member, [slots].
    """
    found, column = [], is_in[slots].tobytes()
    at = column.find(0)
    while at >= 0:
        found.append(slots.item(at))
        at = column.find(0, at + 1)
    return found
