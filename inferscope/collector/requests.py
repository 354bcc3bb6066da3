"""Requests of one engine: cold facts in objects, hot numbers in columns, one slot each.

A slot is an index into the columns here, in the ledger, in `Tokens` and in `Work`; it is given back
when its request is final.
"""

from __future__ import annotations

from array import array
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.blocked import BlockedTime
from inferscope.attribution.ledger import NOBODY, Ledger
from inferscope.attribution.parts import PromptCost
from inferscope.collector.accounts import CounterShares
from inferscope.collector.finals import KvTransfer
from inferscope.collector.slots import SlotMap
from inferscope.collector.tokens import Tokens
from inferscope.collector.work import Work

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Request(msgspec.Struct, eq=False):
    """What is known of one request so far. Times are host nanoseconds, None until they come."""

    request_id: str
    slot: int
    arrived_ns: int
    arrived_at: str
    bindings: list[tuple[SlotMap, int]] = []
    """The rings that know it, and its index there."""
    external_id: str | None = None
    trace: str = ""
    attributes: dict[str, str] = {}
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    queued_ns: int | None = None
    accepted_ns: int | None = None
    """When its core reported it; later than `queued_ns` where a step was running."""
    admitted_ns: int | None = None
    first_edge_ns: int | None = None
    finished_ns: int | None = None
    finish: str | None = None
    is_undeliverable: bool = False
    """The front end that was to deliver it was killed."""
    num_preemptions: int = 0
    preempted_ns: list[tuple[int, int | None]] = []
    """From when until when; the last one's end is None until it is resumed."""
    transfers: list[KvTransfer] = []
    adapter: str = ""
    reasoning_tokens: int | None = None
    is_told_by_core: bool = False
    """A core ring has reported it, and was observed until its end there if that has come."""
    joined_late: bool = False
    """Part of its life was not seen: its ledger has holes."""
    is_first_unknown: bool = False
    """Its first token may be among what was not seen."""
    told_parts: tuple[tuple[str, int], ...] = ()
    """Of the prompt: names and tokens, as client or server said."""
    prompt_cost: PromptCost | None = None
    """Of these parts, from the first chunk on."""
    over_ns: int | None = None
    """When it ended or went out of sight: what comes from there on is not its own."""
    is_partial: bool = False
    """It was in a step of which no rank reported the execution."""
    tbt_p99: tuple[int, int] | None = None
    """Number of events it was computed from, nanoseconds."""

    def bind(self, slots: SlotMap, index: int) -> None:
        """Make the request known to a ring's map."""
        slots.put(index, self.slot)
        self.is_told_by_core |= not slots.is_front_end
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
    def runs_since_ns(self) -> int | None:
        """Return when it was admitted last, if that was reported."""
        return self.preempted_ns[-1][1] if self.preempted_ns else self.admitted_ns

    @property
    def is_streamed(self) -> bool:
        """Return whether a first token goes out by itself, as far as is known."""
        return self.attributes.get("stream", "").lower() != "false"

    @property
    def is_in_engine(self) -> bool:
        """Tell whether a core knows it."""
        return any(not slots.is_front_end for slots, _ in self.bindings)


class RequestTable:
    """All requests of one engine that are not final yet.

    Attributes:
        ledger: their latency ledgers, by slot.
        tokens: when their tokens left, by slot.
        work: what was computed for them, by slot.
        blocked: when their clients did not read, by slot.
        accounts: what counters say of it, by slot.
        by_id: the engine's own id → request.
        by_slot: slot → request, None for free slots.
        ids: slot → the engine's own id, "?" for free slots.
        num_changes: of `ids`.
        has_front_end: [slots], a front end is seen, so its times count.
        in_prefill: [slots], its last step computed prompt tokens.
        is_shared: [slots], it shared a step with another request.
        num_labelled: requests whose prompts have parts.
        num_refused: requests that found no room, counted once for each ring that reports them.
    """

    def __init__(self, num_slots: int = 256, *, most: int = 65_536) -> None:
        self.num_refused = 0
        self._most = most
        self._num_held = 0
        self.blocked = BlockedTime()
        self.ledger = Ledger(num_slots, self.blocked)
        self.tokens = Tokens(num_slots)
        self.work = Work(num_slots)
        self.by_id: dict[str, Request] = {}
        self.by_slot: list[Request | None] = [None] * num_slots
        self.ids = ["?"] * num_slots
        self.num_changes = 0
        self.has_front_end: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.in_prefill: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.is_shared: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.num_labelled = 0
        self._free = deque(range(NOBODY + 1, num_slots))
        """The one that is free for longest goes first: late words on its last owner hit nobody."""
        self.accounts = CounterShares(self.work, self._free)
        self.accounts.grow(num_slots)

    @property
    def compute_ns(self) -> Ints:
        """Return the attributed prefill and decode time: [slots, 2]."""
        return self.work.compute_ns

    @property
    def output_tokens(self) -> Ints:
        """Return the tokens emitted at the requests' edges: [slots]."""
        return self.tokens.num

    @property
    def token_times_ns(self) -> list[array[int]]:
        """Return, by slot, the emission events at the requests' edges."""
        return self.tokens.times_ns

    def refuses(self, slots: SlotMap, index: int) -> bool:
        """Return whether there is no room for another request, and count the one refused.

        Args:
            slots: of the ring that reports it.
            index: its index there.
        """
        if self._num_held < self._most:
            return False
        if index > slots.highest:
            slots.highest = index
            self.num_refused += 1
        return True

    def add(self, request_id: str, arrived_ns: int, *, is_front_end: bool, state: int) -> Request:
        """Give a new request a slot and start its ledger."""
        if not self._free:
            self._grow()
        slot = self._free.popleft()
        self._num_held += 1
        request = Request(request_id, slot, arrived_ns, "http" if is_front_end else "engine")
        self.by_id[request_id] = request
        self.by_slot[slot] = request
        self.ids[slot] = request_id
        self.num_changes += 1
        self.has_front_end[slot] = is_front_end
        self.in_prefill[slot] = True
        self.is_shared[slot] = False
        self.tokens.begin(slot)
        self.work.begin(slot)
        self.blocked.forget(slot)
        self.ledger.replicas.begin(slot, request_id)
        self.ledger.begin(slot, arrived_ns, state)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request: its slot is given back, its rings no longer know it."""
        for slots, index in request.bindings:
            slots.drop(index)
        slot = request.slot
        self._num_held -= 1
        self.num_labelled -= bool(request.told_parts)
        self.tokens.end(slot)
        self.blocked.forget(slot)
        self.ledger.free(slot)
        self.by_slot[slot] = None
        self.ids[slot] = "?"
        self.num_changes += 1
        if self.by_id.get(request.request_id) is request:
            del self.by_id[request.request_id]
        self.accounts.free(slot)

    def label(self, request: Request, parts: tuple[tuple[str, int], ...]) -> None:
        """Take what is said of the parts of a prompt; the last word before its first chunk counts.

        Args:
            request: whose prompt it is.
            parts: names and tokens, at least one.
        """
        if request.prompt_cost is None:
            self.num_labelled += not request.told_parts
            request.told_parts = parts

    def holds(self, request: Request) -> bool:
        """Return whether a request is not over yet."""
        return self.by_slot[request.slot] is request and request.over_ns is None

    def alive(self) -> list[Request]:
        """Return the requests that are not final, oldest first."""
        return list(self.by_id.values())

    def _grow(self) -> None:
        was = len(self.by_slot)
        self.ledger.grow(2 * was)
        self.tokens.grow(2 * was)
        self.work.grow(2 * was)
        self.accounts.grow(2 * was)
        self.by_slot += [None] * was
        self.ids += ["?"] * was
        no = np.zeros(was, dtype=np.bool_)
        self.has_front_end = np.concatenate([self.has_front_end, no])
        self.in_prefill = np.concatenate([self.in_prefill, no])
        self.is_shared = np.concatenate([self.is_shared, no])
        self._free += range(was, 2 * was)
