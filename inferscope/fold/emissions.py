"""Effects of token emissions on their requests: ledger, first token and gaps between tokens.

Tokens leave the core's loop first, then a front end. A request is timed at the last observed edge:
that of its front end, if it has one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import EDGE
from inferscope.fold.requests import Request, RequestTable
from inferscope.fold.windows import Windows

Ints = NDArray[np.int64]
Counts = NDArray[np.uint32]


class Emissions:
    """Emissions of one engine's requests, in order of time.

    Attributes:
        num_front_ends: number of observed front ends; their emissions are the delivery.
    """

    def __init__(self, table: RequestTable, windows: Windows) -> None:
        self._table = table
        self._windows = windows
        self.num_front_ends = 0

    def in_core(
        self, slots: Ints, counts: Counts | None, at_ns: int, step: int = -1, dp_rank: int = 0
    ) -> None:
        """Book tokens that leave the engine's loop; without a front end this is their delivery.

        Args:
            slots: [requests].
            counts: [requests], tokens of each; None if slots are distinct with one token each.
            at_ns: time of the emission.
            step: number of the step that computed them; -1 if unknown.
            dp_rank: data-parallel rank of its replica.
        """
        if not len(slots):
            return
        self._table.ledger.emitted(slots, at_ns, step=step, dp_rank=dp_rank)
        if self.num_front_ends:
            at_edge = ~self._table.has_front_end[slots]
            slots = slots[at_edge]
            counts = None if counts is None else counts[at_edge]
        self._at_edge(slots, counts, at_ns)

    def at_front_end(self, slots: Ints, counts: Counts | None, at_ns: int) -> None:
        """Book tokens that leave a front end, except those of requests timed in the engine."""
        at_edge = self._table.has_front_end[slots]
        if not at_edge.all():
            slots = slots[at_edge]
            counts = None if counts is None else counts[at_edge]
        self._at_edge(slots, counts, at_ns)

    def blocked(self, slots: Ints, blocked_ns: Ints, until_ns: int) -> None:
        """Record the time for which clients did not read; call this before their tokens."""
        table = self._table
        for slot, ns in zip(slots.tolist(), blocked_ns.tolist(), strict=True):
            if ns > 0 and table.has_front_end[slot]:
                table.blocked.add(slot, ns, until_ns)

    def _at_edge(self, slots: Ints, counts: Counts | None, at_ns: int) -> None:
        """Book tokens at the last observed edge before the client."""
        if not len(slots):
            return
        before_ns = self._table.tokens.emit(slots, counts, at_ns)
        if np.count_nonzero(before_ns) < len(slots):
            self._first_tokens(slots[before_ns == 0].tolist(), at_ns)

    def flush(self) -> None:
        """Write the emissions since the last call to their requests and to the windows."""
        at_ns, before_ns = self._table.tokens.flush()
        has_before = (before_ns > 0).nonzero()[0]
        at_ns = at_ns[has_before]
        self._windows.observe("tbt", at_ns - before_ns[has_before], at_ns)

    # --- first tokens -------------------------------------------------------------------------

    def _first_tokens(self, slots: list[int], at_ns: int) -> None:
        for slot in slots:
            request = self._table.by_slot[slot]
            if request is not None:
                self._first_token(request, at_ns)

    def _first_token(self, request: Request, at_ns: int) -> None:
        if (
            request.over_ns is not None
            or request.is_first_unknown
            or request.first_edge_ns is not None
        ):
            return
        ttft_ns = max(0, at_ns - request.arrived_ns)
        request.first_edge_ns = request.arrived_ns + ttft_ns
        self._windows.observe_one("ttft", ttft_ns, at_ns)
        if request.is_streamed:
            self._table.ledger.deliver_first(request.slot, request.first_edge_ns)
        self._table.ledger.note(request.slot, EDGE, request.first_edge_ns)
