"""Allocation of an engine's device time to tenants, waste and requests in flight.

A step determines the device time of its requests; their tenant and whether the result was used are
known only at their end. The step shares sum to step durations, which overlap if a host clock times
steps that are launched ahead. So each snapshot divides the unallocated device time:

    unallocated prefill time of the devices   by attributed time:  ended since the last
                                              snapshot │ in flight, which stays pending

No label gets more than its steps took, and the total is the devices' time:

    Σ tenants + waste + idle + in flight = wall time of the devices
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from inferscope.fold import FinalRequest
from inferscope_prometheus import names
from inferscope_prometheus.tenants import IDLE, OTHER, RESERVED, UNNAMED, WASTE, Tenants


def tenant_of(request: FinalRequest) -> str | None:
    """Return the tenant of a request."""
    return request.attributes.get("tenant")


def adapter_of(request: FinalRequest) -> str | None:
    """Return the LoRA adapter of a request."""
    return request.adapter


class CostAllocation:
    """Cost allocation of one engine by tenant or another request property.

    Attributes:
        device_ns: allocated device time, by label and phase.
        tokens: tokens of fully observed requests, by label and kind.
    """

    def __init__(
        self,
        tenants: Tenants,
        label_of: Callable[[FinalRequest], str | None] = tenant_of,
        *,
        price: float | None = None,
    ) -> None:
        """Start empty.

        Args:
            tenants: label table of all engines.
            label_of: returns a request's label value; None or empty if it has none.
            price: dollars per device hour; None for no price.
        """
        self._price = price
        self._priced_ns: dict[tuple[str, str], int] = {}
        """Part of `device_ns` allocated before the price in force, in ns."""
        self._paid: dict[tuple[str, str], float] = {}
        """Dollars for that part."""
        self._tenants = tenants
        self._payer_of = label_of
        self.device_ns: dict[tuple[str, str], int] = {}
        self.tokens: dict[tuple[str, str], int] = {}
        self._attributed_ns = dict.fromkeys(names.PHASES, 0)
        """Device time in ns of requests in flight, by phase."""
        self._waiting_ns: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Device time in ns of ended requests not allocated yet, by label and phase."""
        self._retired_ns: defaultdict[str, int] = defaultdict(int)
        """Nanoseconds allocated to labels whose series has ended, by phase."""
        self._num_seeded = -1
        self._seed()

    def attributed(self, prefill_ns: int, decode_ns: int) -> None:
        """Add the device time of a step's requests."""
        self._attributed_ns["prefill"] += prefill_ns
        self._attributed_ns["decode"] += decode_ns

    def unnamed(self, prefill_ns: int, decode_ns: int) -> None:
        """Add the device time of requests that end on another host; here they have no label."""
        self._waiting_ns[UNNAMED, "prefill"] += prefill_ns
        self._waiting_ns[UNNAMED, "decode"] += decode_ns

    def ended(self, request: FinalRequest) -> dict[str, int]:
        """Add an ended request; return its wasted time by reason."""
        took_ns = request.prefill_ns + request.decode_ns
        payer = self._tenants.label(self._payer_of(request), took_ns, request.delivered_ns)
        wasted = _waste(request)
        lost_ns = {
            "prefill": wasted["recompute"],
            "decode": wasted["rejected_draft"],
        }
        for phase, ns in (("prefill", request.prefill_ns), ("decode", request.decode_ns)):
            self._attributed_ns[phase] -= ns
            in_vain_ns = ns if wasted.keys() & _ENTIRELY else min(ns, lost_ns[phase])
            self._waiting_ns[WASTE, phase] += in_vain_ns
            self._waiting_ns[payer, phase] += ns - in_vain_ns
        self._seed()
        if not request.joined_late:
            cached = request.cached_tokens
            self.tokens[payer, "cached"] += cached
            self.tokens[payer, "input"] += max(0, (request.prompt_tokens or 0) - cached)
            self.tokens[payer, "output"] += request.output_tokens
        return wasted

    def reprice(self, price: float | None) -> None:
        """Apply a new price to time allocated from now on."""
        if price != self._price:
            self._paid = self.dollars() or {}
            self._priced_ns = self.device_ns.copy()
            self._price = price

    def dollars(self) -> dict[tuple[str, str], float] | None:
        """Return the cost at the prices in force when allocated; None without a price."""
        price = self._price
        if price is None:
            return None
        return {
            at: self._paid.get(at, 0.0) + (ns - self._priced_ns.get(at, 0)) / 3600e9 * price
            for at, ns in self.device_ns.items()
        }

    def settle(self, device_ns: Mapping[str, int]) -> None:
        """Allocate the devices' time.

        Args:
            device_ns: device time by phase over all devices, since counting began.
        """
        for phase in names.PHASES:
            waiting = {at: ns for at, ns in self._waiting_ns.items() if at[1] == phase and ns}
            given_ns = sum(ns for at, ns in self.device_ns.items() if at[1] == phase)
            given_ns += self._retired_ns[phase]
            left_ns = device_ns.get(phase, 0) - given_ns
            if not waiting or left_ns <= 0:
                continue
            in_flight_ns = max(0, self._attributed_ns[phase])
            part = min(1.0, left_ns / (sum(waiting.values()) + in_flight_ns))
            for at, ns in waiting.items():
                self.device_ns[at] = self.device_ns.get(at, 0) + int(ns * part)
                self._waiting_ns[at] = 0
        for phase, ns in device_ns.items():
            if phase not in names.PHASES:
                self.device_ns[WASTE if phase == "padding" else IDLE, phase] = ns
        self._retire()

    def _retire(self) -> None:
        """Drop the series of labels that lost theirs, once all their time is allocated.

        A sum over all labels then misses their time; a rate does not.
        """
        kept = {*RESERVED, *self._tenants.labels}
        gone = {payer for payer, _ in self.device_ns if payer not in kept}
        gone -= {payer for (payer, _), ns in self._waiting_ns.items() if ns}
        if not gone:
            return
        for at in [at for at in self.device_ns if at[0] in gone]:
            self._retired_ns[at[1]] += self.device_ns.pop(at)
            self._waiting_ns.pop(at, None)
            self._priced_ns.pop(at, None)
            self._paid.pop(at, None)
        for at in [at for at in self.tokens if at[0] in gone]:
            del self.tokens[at]

    def _seed(self) -> None:
        """Create each label's series before its first value."""
        if self._num_seeded == self._tenants.num_changes:
            return
        self._num_seeded = self._tenants.num_changes
        for payer in (UNNAMED, OTHER, WASTE, *self._tenants.labels):
            for phase in names.PHASES:
                self.device_ns.setdefault((payer, phase), 0)
        for payer in (UNNAMED, OTHER, *self._tenants.labels):
            for kind in names.TENANT_TOKENS:
                self.tokens.setdefault((payer, kind), 0)


_ENTIRELY = frozenset({"cancel", "retry"})


def _waste(request: FinalRequest) -> dict[str, int]:
    """Return the wasted time of a request by reason; no time counts twice.

    A request that the server failed must be sent again: its time is retry waste, on whichever
    server the retry runs.
    """
    wasted = {"recompute": request.recomputed.ns, "rejected_draft": request.rejected.ns}
    rest_ns = max(0, request.prefill_ns + request.decode_ns - sum(wasted.values()))
    if request.finish in names.CANCELS:
        wasted["cancel"] = rest_ns
    elif request.finish in names.FAILURES:
        wasted["retry"] = rest_ns
    return wasted
