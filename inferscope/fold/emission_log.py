"""Log of token emissions at the edge that the client sees."""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Counts = NDArray[np.uint32]

_OPEN = 1 << 62


class EmissionLog:
    """Emissions by slot; all times are host nanoseconds.

    Emissions are noted as they happen, and written to their requests many at once (`flush`).

    Attributes:
        edge_ns: [slots], time of the last emission; 0 before the first.
        num: [slots], number of emitted tokens; this and the next as of the last flush.
        times_ns: times of each request's events, by slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.edge_ns: Ints = np.zeros(num_slots, dtype=np.int64)
        self.num: Ints = np.zeros(num_slots, dtype=np.int64)
        self.times_ns = [array("q") for _ in range(num_slots)]
        self._counts: dict[int, array[int]] = {}
        """Tokens per event by slot, for requests with events of other than one token."""
        self._until: Ints = np.zeros(num_slots, dtype=np.int64)
        """[slots], position in the noted emissions from which they are not the request's."""
        self._noted: list[tuple[int, Ints, Counts | None, Ints]] = []
        """Time, slots, tokens and times of the previous emissions of each emission."""

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self.edge_ns[slot] = self.num[slot] = 0
        self.times_ns[slot] = array("q")
        self._counts.pop(slot, None)
        self._until[slot] = _OPEN

    def end(self, slot: int) -> None:
        """Ignore later emissions in a slot."""
        self._until[slot] = min(self._until.item(slot), len(self._noted))

    def grow(self, num_slots: int) -> None:
        """Enlarge the columns to this number of slots."""
        more = num_slots - len(self.num)
        none = np.zeros(more, dtype=np.int64)
        self.edge_ns = np.concatenate([self.edge_ns, none])
        self.num = np.concatenate([self.num, none])
        self._until = np.concatenate([self._until, none])
        self.times_ns += [array("q") for _ in range(more)]

    def emit(self, slots: Ints, counts: Counts | None, at_ns: int) -> Ints:
        """Note an emission; return the time of each request's previous one, 0 for none.

        Args:
            slots: [requests]; a request may occur more than once.
            counts: [requests], tokens of each; None for one token each.
            at_ns: time of the emission.
        """
        before_ns: Ints = self.edge_ns[slots]
        self.edge_ns[slots] = at_ns
        self._noted.append((at_ns, slots, counts, before_ns))
        return before_ns

    def flush(self) -> tuple[Ints, Ints]:
        """Write the noted emissions to their requests.

        Returns:
            time of each emission, and of the previous one of its request: [requests of all].
        """
        noted, self._noted = self._noted, []
        if not noted:
            return self.edge_ns[:0], self.edge_ns[:0]
        sizes = [len(slots) for _, slots, _, _ in noted]
        emission = np.repeat(np.arange(len(noted)), sizes)
        at_ns = np.array([at_ns for at_ns, _, _, _ in noted])[emission]
        slots = np.concatenate([slots for _, slots, _, _ in noted])
        rows = (emission < self._until[slots]).nonzero()[0]
        self._until[self._until < _OPEN] = 0
        slots = slots[rows]
        small = np.uint16 if len(self.num) <= 1 << 16 else np.int64
        rows = rows[slots.astype(small).argsort(kind="stable")]
        num_events = np.bincount(slots, minlength=len(self.num))
        tokens: Counts | None = None
        self.num += num_events
        if any(counts is not None for _, _, counts, _ in noted):
            tokens = np.concatenate(
                [np.ones(len(s), np.uint32) if of is None else of for _, s, of, _ in noted]
            )[rows]
        own_ns, members = at_ns[rows], num_events.nonzero()[0]
        ends = num_events[members].cumsum().tolist()
        for slot, (start, end) in zip(members.tolist(), pairwise([0, *ends]), strict=True):
            if tokens is not None:
                self._count(slot, tokens[start:end])
            self.times_ns[slot].frombytes(own_ns[start:end].tobytes())
        return at_ns, np.concatenate([before_ns for _, _, _, before_ns in noted])

    def _count(self, slot: int, tokens: Counts) -> None:
        """Add the tokens of a request's next events, before the times of these."""
        counts = self._counts.get(slot)
        if counts is None and (tokens == 1).all():
            return
        if counts is None:
            counts = self._counts[slot] = array("I")
        counts.extend(_ones(len(self.times_ns[slot]) - len(counts)))
        counts.frombytes(tokens.tobytes())
        self.num[slot] += int(tokens.sum()) - len(tokens)

    def events_of(self, slot: int) -> tuple[array[int], tuple[int, ...]]:
        """Return the times of a request's events, and the tokens of each."""
        times_ns, counts = self.times_ns[slot], tuple(self._counts.get(slot, ()))
        num_more = len(times_ns) - len(counts)
        return times_ns, counts + _ones(num_more) if counts else _ones(num_more)


@lru_cache(1024)
def _ones(num: int) -> tuple[int, ...]:
    """Return a cached tuple of `num` ones: the tokens per event of most requests."""
    return (1,) * num
