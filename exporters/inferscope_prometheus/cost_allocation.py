"""Who an engine's devices worked for: tenants, nobody (waste), and requests that have not ended.

What a request took is known step by step; whose it is and whether anybody got it, when it ends. And
the shares of steps sum to the steps' own lengths, which overlap where a host's clock times steps
that are launched ahead. So at each look the devices' time that is not given out yet is divided:

    devices' prefill time not given out       by what each took:  ended since the last look │ in
                                              flight, whose part waits

Nobody is given more than his steps took, and all that is given out is the devices' time, so that

    Σ tenants + waste + idle + in flight = wall time of the devices
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from inferscope.collector.finals import FinalRequest
from inferscope_prometheus import names
from inferscope_prometheus.tenants import IDLE, NOBODY, OTHER, RESERVED, WASTE, Tenants


def tenant_of(request: FinalRequest) -> str | None:
    """Return who asked."""
    return request.attributes.get("tenant")


def adapter_of(request: FinalRequest) -> str | None:
    """Return which LoRA adapter was asked for."""
    return request.adapter


class CostAllocation:
    """The bill of one engine: by tenant, or by whatever else a request may be of.

    Attributes:
        device_ns: of its devices' time what was given out, by label of the payer and phase.
        tokens: of requests that were seen whole, by label and kind.
    """

    def __init__(
        self,
        tenants: Tenants,
        payer_of: Callable[[FinalRequest], str | None] = tenant_of,
        *,
        price: float | None = None,
    ) -> None:
        """Start with nothing.

        Args:
            tenants: all engines'.
            payer_of: tells whose a request was, None or nothing where nobody says.
            price: of an hour of a device, in dollars; None for none.
        """
        self._price = price
        self._priced_ns: dict[tuple[str, str], int] = {}
        """Of `device_ns`, what came before the price in force."""
        self._paid: dict[tuple[str, str], float] = {}
        """Dollars for that."""
        self._tenants = tenants
        self._payer_of = payer_of
        self.device_ns: dict[tuple[str, str], int] = {}
        self.tokens: dict[tuple[str, str], int] = {}
        self._attributed_ns = dict.fromkeys(names.PHASES, 0)
        """By steps, of requests that have not ended."""
        self._waiting_ns: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Of requests that have ended, by payer and phase; not given out yet."""
        self._retired_ns: defaultdict[str, int] = defaultdict(int)
        """Nanoseconds given out to payers whose series has ended, by phase."""
        self._num_seeded = -1
        self._seed()

    def attributed(self, prefill_ns: int, decode_ns: int) -> None:
        """Take what a step's requests took."""
        self._attributed_ns["prefill"] += prefill_ns
        self._attributed_ns["decode"] += decode_ns

    def unnamed(self, prefill_ns: int, decode_ns: int) -> None:
        """Take what a step took of requests that end on another host: here they are nobody's."""
        self._waiting_ns[NOBODY, "prefill"] += prefill_ns
        self._waiting_ns[NOBODY, "decode"] += decode_ns

    def ended(self, request: FinalRequest) -> dict[str, int]:
        """Take what a request took; return how much of it was in vain, by reason."""
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
        """Charge another price for what is given out from now on."""
        if price != self._price:
            self._paid = self.dollars() or {}
            self._priced_ns = self.device_ns.copy()
            self._price = price

    def dollars(self) -> dict[tuple[str, str], float] | None:
        """Return what was given out, at the prices of its time; None where there is no price."""
        price = self._price
        if price is None:
            return None
        return {
            at: self._paid.get(at, 0.0) + (ns - self._priced_ns.get(at, 0)) / 3600e9 * price
            for at, ns in self.device_ns.items()
        }

    def settle(self, device_ns: Mapping[str, int]) -> None:
        """Give out the devices' time.

        Args:
            device_ns: of all devices together, by phase, since the counting began.
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
        """Drop the series of payers that have none any more, once all that they took is given out.

        A sum over all payers is then short of theirs; a rate is not.
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
        """Let every payer's series be there before it pays."""
        if self._num_seeded == self._tenants.num_changes:
            return
        self._num_seeded = self._tenants.num_changes
        for payer in (NOBODY, OTHER, WASTE, *self._tenants.labels):
            for phase in names.PHASES:
                self.device_ns.setdefault((payer, phase), 0)
        for payer in (NOBODY, OTHER, *self._tenants.labels):
            for kind in names.TENANT_TOKENS:
                self.tokens.setdefault((payer, kind), 0)


_ENTIRELY = frozenset({"cancel", "retry"})


def _waste(request: FinalRequest) -> dict[str, int]:
    """Return what of a request's time was in vain, by reason; nothing is in two of them.

    What the server itself failed its client must ask for again: that is a retry's waste, wherever
    the client asks next.
    """
    wasted = {"recompute": request.recomputed.ns, "rejected_draft": request.rejected.ns}
    rest_ns = max(0, request.prefill_ns + request.decode_ns - sum(wasted.values()))
    if request.finish in names.CANCELS:
        wasted["cancel"] = rest_ns
    elif request.finish in names.FAILURES:
        wasted["retry"] = rest_ns
    return wasted
