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
from inferscope.collector.teamwork import Emissions, Work
from inferscope.cost.shape import FlopRates

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
        found: Ints = self._slot.take(at)
        is_other = self._owner.take(at) != indices
        if np.logical_or.reduce(is_other):
            found[is_other] = NOBODY
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
        "preempted_ns",
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
        self.preempted_ns: list[tuple[int, int | None]] = []
        """From when until when; the last one's end is None until it is resumed."""
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
        has_front_end: [slots], a front end is seen, so its times count.
        in_prefill: [slots], its last step computed prompt tokens.
        is_shared: [slots], it shared a step with another request.
    """

    def __init__(self, num_slots: int = 256) -> None:
        self.ledger = Ledger(num_slots)
        self.by_id: dict[str, Request] = {}
        self.by_slot: list[Request | None] = [None] * num_slots
        self._compute_ns = np.zeros((num_slots, 2), dtype=np.int64)
        self._flops = np.zeros((num_slots, 2), dtype=np.int64)
        self._output_tokens = np.zeros(num_slots, dtype=np.int64)
        self._edge_ns = np.zeros(num_slots, dtype=np.int64)
        self._engine_ns = np.zeros(num_slots, dtype=np.int64)
        self.has_front_end: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.in_prefill: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.is_shared: Flags = np.zeros(num_slots, dtype=np.bool_)
        self._token_times_ns = [array("q") for _ in range(num_slots)]
        self._token_counts: dict[int, array[int]] = {}
        """Tokens per event, by slot, for requests whose events do not all bring one."""
        self._free = deque(range(NOBODY + 1, num_slots))
        """The one that is free for longest goes first: late words on its last owner hit nobody."""
        self._emissions = Emissions()
        self._work = Work(np.zeros(0, dtype=np.int64), None)

    @property
    def compute_ns(self) -> Ints:
        """Return the attributed prefill and decode time: [slots, 2]."""
        self._work.tell(self._compute_ns, self._flops)
        return self._compute_ns

    @property
    def flops(self) -> Ints:
        """Return the modelled prefill and decode FLOPs: [slots, 2]."""
        self._work.tell(self._compute_ns, self._flops)
        return self._flops

    @property
    def output_tokens(self) -> Ints:
        """Return the tokens emitted at the requests' edges: [slots]."""
        self._tell_emissions()
        return self._output_tokens

    @property
    def edge_ns(self) -> Ints:
        """Return when the last of them was, 0 before the first: [slots]."""
        self._tell_emissions()
        return self._edge_ns

    @property
    def engine_ns(self) -> Ints:
        """Return the same at the engine's edge: [slots]."""
        if self._emissions.is_in_engine:
            self._tell_emissions()
        return self._engine_ns

    @property
    def token_times_ns(self) -> list[array[int]]:
        """Return, by slot, the emission events at the requests' edges."""
        self._tell_emissions()
        return self._token_times_ns

    def emitted_together(self, slots: Ints, at_ns: int, *, is_in_engine: bool) -> None:
        """Note an emission event that brings each of these requests one token.

        Args:
            slots: [requests]; the same array says that it is the same requests.
            at_ns: when.
            is_in_engine: the engine's edge is the requests' edge.
        """
        emissions = self._emissions
        if not emissions.takes(slots, is_in_engine=is_in_engine):
            self._tell_emissions()
            emissions.slots, emissions.is_in_engine = slots, is_in_engine
        emissions.times_ns.append(at_ns)

    def decoded_together(
        self, slots: Ints, shares_ns: list[Ints], contexts: Ints, rates: FlopRates | None
    ) -> None:
        """Book a step in which each of these requests decodes one token.

        Args:
            slots: [requests]; the same array says that it is the same requests.
            shares_ns: for each rank, [requests].
            contexts: [requests].
            rates: of the model's shape, None where it is not known.
        """
        if not self._work.takes(slots, rates):
            self._work.tell(self._compute_ns, self._flops)
            self._work = Work(slots, rates)
        self._work.add(shares_ns, contexts)

    def prefilled_instead(
        self, slot: int, shares_ns: list[int], flops: int, decode_flops: int
    ) -> None:
        """Book a prefill whose step is booked as if it had been a decode.

        Args:
            slot: the request's.
            shares_ns: its share on each rank.
            flops: that it computed.
            decode_flops: that it would have computed as a decode.
        """
        share_ns, cells = sum(shares_ns), self._compute_ns
        cells[slot, 0] += share_ns
        cells[slot, 1] -= share_ns
        if flops:
            self._flops[slot, 0] += flops
            self._flops[slot, 1] -= decode_flops

    def _tell_emissions(self) -> None:
        emissions = self._emissions
        if emissions.times_ns:
            if emissions.is_in_engine:
                self._engine_ns[emissions.slots] = emissions.times_ns[-1]
            emissions.tell(self._output_tokens, self._edge_ns, self._token_times_ns)

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
        self._token_times_ns[slot] = array("q")
        self._token_counts.pop(slot, None)
        self.has_front_end[slot] = is_front_end
        self.in_prefill[slot] = True
        self.ledger.begin(slot, arrived_ns, state)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request: its slot is given back, its rings no longer know it."""
        for slots, index in request.bindings:
            slots.drop(index)
        self._tell_emissions()
        self._work.tell(self._compute_ns, self._flops)
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
        self._token_times_ns += [array("q") for _ in range(was)]
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free += range(was, 2 * was)


_COLUMNS = (
    "_compute_ns",
    "_flops",
    "_output_tokens",
    "_edge_ns",
    "_engine_ns",
    "has_front_end",
    "in_prefill",
    "is_shared",
)
