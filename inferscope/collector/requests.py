"""Requests of one engine: cold facts in objects, hot numbers in columns, one slot each.

A slot is an index into the columns here and in the ledger; it is given back when its request is
final. Rings number their requests on their own, so each ring has a map from its indices to slots.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.ledger import NOBODY, Ledger

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


_MOST_CELLS = 1 << 16


class SlotMap:
    """One ring's request indices → slots, looked up by whole columns.

    Indices only grow and requests leave, so the table is a ring of a power of two, enlarged when an
    old request is still alive where a new one would go; beyond a limit it is kept aside.

    Attributes:
        teller: the ring's role and rank.
        num_dropped: changes when a look-up made before may no longer hold.
        highest: of all indices seen; an unknown one below it has ended.
    """

    def __init__(self, role: str = "core", rank: int = 0) -> None:
        self.teller = (role, rank)
        self.num_dropped = 0
        self.highest = -1
        self._stragglers: dict[int, int] = {}
        self._owner = np.full(256, -1, dtype=np.int64)
        self._slot = np.zeros(256, dtype=np.int64)

    @property
    def is_front_end(self) -> bool:
        """Tell whether it is a front end's."""
        return self.teller[0] == "frontend"

    def put(self, index: int, slot: int) -> None:
        """Map an index to a slot."""
        self.num_dropped += index <= self.highest  # it may have been looked up before
        self.highest = max(self.highest, index)
        self._stragglers.pop(index, None)
        while self._owner[at := index & (len(self._owner) - 1)] not in (-1, index):
            if len(self._owner) >= _MOST_CELLS:
                self._stragglers[int(self._owner[at])] = int(self._slot[at])
                break
            self._enlarge()
        self._owner[at], self._slot[at] = index, slot

    def drop(self, index: int) -> None:
        """Forget an index."""
        at = index & (len(self._owner) - 1)
        if self._owner[at] == index:
            self._owner[at], self._slot[at] = -1, NOBODY
            self.num_dropped += 1
        elif self._stragglers.pop(index, None) is not None:
            self.num_dropped += 1

    def get(self, index: int) -> int:
        """Return the slot of an index, NOBODY if it is not known."""
        at = index & (len(self._owner) - 1)
        if self._owner[at] == index:
            return int(self._slot[at])
        return self._stragglers.get(index, NOBODY)

    def slots(self, indices: NDArray[np.uint32]) -> Ints:
        """Return the slots of a column of indices, NOBODY where one is not known."""
        at = indices & np.uint32(len(self._owner) - 1)
        found: Ints = np.where(self._owner[at] == indices, self._slot[at], NOBODY)
        if self._stragglers:
            for at_row in np.flatnonzero(found == NOBODY).tolist():
                found[at_row] = self._stragglers.get(int(indices[at_row]), NOBODY)
        return found

    def known(self) -> list[int]:
        """Return all indices mapped now."""
        found: list[int] = self._owner[self._owner >= 0].tolist()
        return found + list(self._stragglers)

    def _enlarge(self) -> None:
        owners, slots = self._owner, self._slot
        self._owner = np.full(2 * len(owners), -1, dtype=np.int64)
        self._slot = np.zeros(2 * len(owners), dtype=np.int64)
        for owner, slot in zip(owners.tolist(), slots.tolist(), strict=True):
            if owner >= 0:
                at = owner & (len(self._owner) - 1)
                self._owner[at], self._slot[at] = owner, slot


class Request:
    """What is known of one request so far. Times are host nanoseconds, None until they come."""

    __slots__ = (
        "admitted_ns",
        "arrived_at",
        "arrived_ns",
        "attributes",
        "bindings",
        "cached_tokens",
        "external_id",
        "finish",
        "finished_ns",
        "first_edge_ns",
        "is_first_unknown",
        "joined_late",
        "num_preemptions",
        "prompt_tokens",
        "queued_ns",
        "request_id",
        "slot",
        "tbt_p99",
        "trace",
        "ttft_row",
    )

    def __init__(self, request_id: str, slot: int, arrived_ns: int, *, arrived_at: str) -> None:
        self.request_id = request_id
        self.slot = slot
        self.arrived_ns = arrived_ns
        self.arrived_at = arrived_at
        self.bindings: list[tuple[SlotMap, int]] = []
        """The rings that know it, and its index there."""
        self.external_id: str | None = None
        self.trace = ""
        self.attributes: dict[str, str] = {}
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
        self.queued_ns: int | None = None
        self.admitted_ns: int | None = None
        self.first_edge_ns: int | None = None
        self.finished_ns: int | None = None
        self.finish: str | None = None
        self.num_preemptions = 0
        self.joined_late = False
        """Part of its life was not seen: its ledger has holes."""
        self.is_first_unknown = False
        """Its first token may be among what was not seen."""
        self.ttft_row: Ints | None = None
        self.tbt_p99: tuple[int, float] | None = None
        """Number of events it was computed from, nanoseconds."""

    def bind(self, slots: SlotMap, index: int) -> None:
        """Make the request known to a ring's map."""
        slots.put(index, self.slot)
        self.bindings.append((slots, index))

    def unbind(self, slots: SlotMap) -> None:
        """Make a ring's map forget the request."""
        for bound, index in self.bindings:
            if bound is slots:
                slots.drop(index)
        self.bindings = [binding for binding in self.bindings if binding[0] is not slots]

    def is_told_by(self, teller: tuple[str, int]) -> bool:
        """Tell whether a ring of this role and rank knows the request."""
        return any(slots.teller == teller for slots, _ in self.bindings)

    @property
    def is_in_engine(self) -> bool:
        """Tell whether a core knows it."""
        return any(not slots.is_front_end for slots, _ in self.bindings)


class RequestTable:
    """All requests of one engine that are not final yet.

    Attributes:
        ledger: their latency ledgers, by slot.
        by_id: the engine's own id → request.
        by_slot: slot → request, None for free slots.
        compute_ns: [slots, 2], attributed prefill and decode time.
        flops: [slots, 2], modelled prefill and decode FLOPs.
        output_tokens: [slots], tokens emitted at the request's edge.
        edge_ns: [slots], when the last of them was, 0 before the first.
        engine_ns: [slots], the same at the engine's edge.
        has_front_end: [slots], a front end is seen, so its times count.
        in_prefill: [slots], its last step computed prompt tokens.
        is_shared: [slots], it shared a step with another request.
        token_times_ns: by slot, the emission events at the request's edge.
    """

    def __init__(self, num_slots: int = 256) -> None:
        self.ledger = Ledger(num_slots)
        self.by_id: dict[str, Request] = {}
        self.by_slot: list[Request | None] = [None] * num_slots
        self.compute_ns = np.zeros((num_slots, 2), dtype=np.int64)
        self.flops = np.zeros((num_slots, 2), dtype=np.int64)
        self.output_tokens = np.zeros(num_slots, dtype=np.int64)
        self.edge_ns = np.zeros(num_slots, dtype=np.int64)
        self.engine_ns = np.zeros(num_slots, dtype=np.int64)
        self.has_front_end: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.in_prefill: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.is_shared: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.token_times_ns = [array("q") for _ in range(num_slots)]
        self._token_counts: dict[int, array[int]] = {}
        """Tokens per event, by slot, for requests whose events do not all bring one."""
        self._free = deque(range(NOBODY + 1, num_slots))
        """The one that is free for longest goes first: late words on its last owner hit nobody."""

    def add(self, request_id: str, arrived_ns: int, *, is_front_end: bool, state: int) -> Request:
        """Give a new request a slot and start its ledger."""
        if not self._free:
            self._grow()
        slot = self._free.popleft()
        arrived_at = "http" if is_front_end else "engine"
        request = Request(request_id, slot, arrived_ns, arrived_at=arrived_at)
        self.by_id[request_id] = request
        self.by_slot[slot] = request
        for name in _COLUMNS:
            getattr(self, name)[slot] = 0
        self.token_times_ns[slot] = array("q")
        self._token_counts.pop(slot, None)
        self.has_front_end[slot] = is_front_end
        self.in_prefill[slot] = True
        self.ledger.begin(slot, arrived_ns, state)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request: its slot is given back, its rings no longer know it."""
        for slots, index in request.bindings:
            slots.drop(index)
        self.ledger.free(request.slot)
        self.by_slot[request.slot] = None
        # Its final record keeps the old array: late words must not grow it.
        self.token_times_ns[request.slot] = array("q")
        self._token_counts.pop(request.slot, None)
        if self.by_id.get(request.request_id) is request:
            del self.by_id[request.request_id]
        self._free.append(request.slot)

    def emitted_several(self, slot: int, at_ns: int, num_tokens: int) -> None:
        """Note an emission event that may bring any number of tokens."""
        times_ns = self.token_times_ns[slot]
        counts = self._token_counts.get(slot)
        if counts is None and num_tokens != 1:
            counts = self._token_counts[slot] = array("I")
        times_ns.append(at_ns)
        if counts is not None:
            counts.extend([1] * (len(times_ns) - 1 - len(counts)))
            counts.append(num_tokens)

    def tokens_per_event(self, slot: int) -> tuple[int, ...]:
        """Return how many tokens each emission event of a request brought."""
        num = len(self.token_times_ns[slot])
        counts = tuple(self._token_counts.get(slot, ()))
        return counts + (1,) * (num - len(counts))

    def holds(self, request: Request) -> bool:
        """Tell whether a request is not final yet."""
        return self.by_slot[request.slot] is request

    def alive(self) -> list[Request]:
        """Return the requests that are not final, oldest first."""
        return list(self.by_id.values())

    def _grow(self) -> None:
        was = len(self.by_slot)
        self.ledger.grow(2 * was)
        self.by_slot += [None] * was
        self.token_times_ns += [array("q") for _ in range(was)]
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free += range(was, 2 * was)


_COLUMNS = (
    "compute_ns",
    "flops",
    "output_tokens",
    "edge_ns",
    "engine_ns",
    "has_front_end",
    "in_prefill",
    "is_shared",
)
