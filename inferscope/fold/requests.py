"""Request table of one engine: cold facts in objects, hot numbers in columns, one slot each.

A slot is an index into the columns here, in the ledger, in `EmissionLog` and in `WorkTotals`. It is
freed when its request is final.
"""

from __future__ import annotations

from array import array
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import UNKNOWN_SLOT, BlockedTime, Ledger, PromptCost
from inferscope.fold.cache_accounts import CacheAccounts, CacheFacts
from inferscope.fold.emission_log import EmissionLog
from inferscope.fold.final_records import KvTransfer
from inferscope.fold.join.counter_shares import CounterShares
from inferscope.fold.slots import SlotMap
from inferscope.fold.work_totals import WorkTotals

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Request(msgspec.Struct, eq=False):
    """State of one request. Times are host nanoseconds; None until reported."""

    request_id: str
    slot: int
    arrived_ns: int
    arrived_at: str
    bindings: list[tuple[SlotMap, int]] = []
    """Slot maps of the rings that report it, each with its index there."""
    external_id: str | None = None
    trace: str = ""
    attributes: dict[str, str] = {}
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    queued_ns: int | None = None
    accepted_ns: int | None = None
    """Time of the core's report; later than `queued_ns` if a step was running."""
    admitted_ns: int | None = None
    first_edge_ns: int | None = None
    finished_ns: int | None = None
    finish: str | None = None
    is_undeliverable: bool = False
    """Whether the front end that had to deliver it was killed."""
    num_preemptions: int = 0
    preempted_ns: list[tuple[int, int | None]] = []
    """Start and end of each preemption; the last end is None until the request resumes."""
    transfers: list[KvTransfer] = []
    adapter: str = ""
    reasoning_tokens: int | None = None
    is_known_to_core: bool = False
    """Whether a core ring reported it, and was observed until its end there if that has come."""
    joined_late: bool = False
    """Whether part of its lifetime was not observed: its ledger has gaps."""
    is_first_unknown: bool = False
    """Whether its first token may not have been observed."""
    declared_parts: tuple[tuple[str, int], ...] = ()
    """Names and token counts of the prompt's parts, as client or server declared them."""
    prompt_cost: PromptCost | None = None
    """Cost of these parts; None before the first chunk."""
    cache: CacheFacts | None = None
    """Records of the prefix cache; None if the engine reports none."""
    over_ns: int | None = None
    """Time at which it ended or became unobserved; later records do not belong to it."""
    is_partial: bool = False
    """Whether it was in a step whose execution no rank reported."""
    tbt_p99: tuple[int, int] | None = None
    """Number of emission events of the estimate, and the p99 in nanoseconds."""

    def bind(self, slots: SlotMap, index: int) -> None:
        """Add the request to a ring's slot map."""
        slots.put(index, self.slot)
        self.is_known_to_core |= not slots.is_front_end
        self.bindings.append((slots, index))

    def unbind(self, slots: SlotMap) -> None:
        """Remove the request from a ring's slot map."""
        for bound, index in self.bindings:
            if bound is slots:
                slots.drop(index)
        self.bindings = [binding for binding in self.bindings if binding[0] is not slots]

    def is_known_to(self, origin: tuple[str, int]) -> bool:
        """Return whether a ring of this role and rank reports the request."""
        return any(slots.origin == origin for slots, _ in self.bindings)

    @property
    def runs_since_ns(self) -> int | None:
        """Return when the request was last admitted; None if that was not reported."""
        return self.preempted_ns[-1][1] if self.preempted_ns else self.admitted_ns

    @property
    def is_streamed(self) -> bool:
        """Return whether the response streams, as far as is known."""
        return self.attributes.get("stream", "").lower() != "false"

    @property
    def is_in_engine(self) -> bool:
        """Return whether a core holds the request."""
        return any(not slots.is_front_end for slots, _ in self.bindings)


class RequestTable:
    """All requests of one engine that are not final yet.

    Attributes:
        ledger: latency ledgers by slot.
        tokens: emission times of tokens by slot.
        work: computed work by slot.
        blocked: time in which clients did not read, by slot.
        accounts: counter values by slot.
        by_id: requests by the engine's own ID.
        by_slot: requests by slot; None for free slots.
        ids: the engine's own IDs by slot; "?" for free slots.
        num_changes: number of changes of `ids`.
        has_front_end: whether a front end is observed and its times count, [slots].
        in_prefill: whether the last step computed prompt tokens, [slots].
        is_shared: whether the request shared a step with another request, [slots].
        num_labelled: number of requests whose prompts have parts.
        cache: accounts of the prefix cache.
        num_refused: number of requests beyond the limit, counted once for each ring.
    """

    def __init__(self, num_slots: int = 256, *, most: int = 65_536) -> None:
        self.num_refused = 0
        self._most = most
        self._num_held = 0
        self.blocked = BlockedTime()
        self.ledger = Ledger(num_slots, self.blocked)
        self.tokens = EmissionLog(num_slots)
        self.work = WorkTotals(num_slots)
        self.by_id: dict[str, Request] = {}
        self.by_slot: list[Request | None] = [None] * num_slots
        self.ids = ["?"] * num_slots
        self.num_changes = 0
        self.has_front_end: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.in_prefill: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.is_shared: Flags = np.zeros(num_slots, dtype=np.bool_)
        self.num_labelled = 0
        self.cache = CacheAccounts()
        self._free = deque(range(UNKNOWN_SLOT + 1, num_slots))
        """Free slots, longest free first: late records of the previous owner hit no request."""
        self.accounts = CounterShares(self.work, self._free)
        self.accounts.grow(num_slots)

    @property
    def output_tokens(self) -> Ints:
        """Return the tokens emitted at the requests' edges: [slots]."""
        return self.tokens.num

    @property
    def token_times_ns(self) -> list[array[int]]:
        """Return, by slot, the emission events at the requests' edges."""
        return self.tokens.times_ns

    def refuses(self, slots: SlotMap, index: int) -> bool:
        """Return whether the table is full; if it is, count the refused request once.

        Args:
            slots: slot map of the ring that reports the request.
            index: index of the request in that ring.
        """
        if self._num_held < self._most:
            return False
        if index > slots.highest:
            slots.highest = index
            self.num_refused += 1
        return True

    def add(self, request_id: str, arrived_ns: int, *, is_front_end: bool, state: int) -> Request:
        """Assign a slot to a new request and start its ledger."""
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
        """Remove a request: free its slot, and drop it from the slot maps of its rings."""
        for slots, index in request.bindings:
            slots.drop(index)
        slot = request.slot
        self._num_held -= 1
        self.num_labelled -= bool(request.declared_parts)
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
        """Set the parts of a prompt; the last declaration before its first chunk counts.

        Args:
            request: request of the prompt.
            parts: names and token counts, at least one.
        """
        if request.prompt_cost is None:
            self.num_labelled += not request.declared_parts
            request.declared_parts = parts

    def holds(self, request: Request) -> bool:
        """Return whether a request has not ended yet."""
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
