"""What was computed for each request: its shares of step time, and its FLOPs, by phase.

A team that decodes one token each in step after step is kept as sums, one vector each, keyed by its
array of slots: a team that stays keeps its array. The sums are told when another team comes, or
somebody asks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import FlopRates

Ints = NDArray[np.int64]

_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Work:
    """Compute by slot and phase: prefill, decode."""

    def __init__(self, num_slots: int) -> None:
        self._compute_ns = np.zeros((num_slots, 2), dtype=np.int64)
        self._flops = np.zeros((num_slots, 2), dtype=np.int64)
        self._team = _NOBODY
        self._rates: FlopRates | None = None
        self._num_steps = 0
        """Of the team, not told yet."""
        self._shares_ns = _NOBODY
        self._contexts = _NOBODY
        """Their sum: the FLOPs of a slice are linear in its context."""

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self._compute_ns[slot] = 0
        self._flops[slot] = 0

    def end(self, slot: int) -> None:
        """Give the slot back: what its owner's team computed must not hit the next one."""
        if self._is_untold(slot):
            self._tell()
            self._team = _NOBODY

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        none = np.zeros((num_slots - len(self._flops), 2), dtype=np.int64)
        self._compute_ns = np.concatenate([self._compute_ns, none])
        self._flops = np.concatenate([self._flops, none])

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
        if slots is not self._team or rates is not self._rates:
            self._tell()
            self._team, self._rates = slots, rates
        if self._num_steps:
            self._shares_ns += shares_ns[0]
            self._contexts += contexts
        else:
            self._shares_ns = shares_ns[0].copy()
            self._contexts = contexts.copy()
        for of_rank_ns in shares_ns[1:]:
            self._shares_ns += of_rank_ns
        self._num_steps += 1

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

    def _tell(self) -> None:
        """Add the sums to the members' decode cells."""
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        self._compute_ns[:, 1][self._team] += self._shares_ns
        if self._rates is not None:
            flops = self._rates.of_singles(num_steps, self._contexts)
            self._flops[:, 1][self._team] += flops

    def _is_untold(self, slot: int) -> bool:
        """Tell whether the sums are a request's, too. Who leaves is mostly gone from the team."""
        return self._num_steps > 0 and slot in self._team.tolist()

    def of(self, slot: int) -> tuple[list[int], list[int]]:
        """Return a request's attributed time and modelled FLOPs, each by phase."""
        if self._is_untold(slot):
            self._tell()
        return self._compute_ns[slot].tolist(), self._flops[slot].tolist()

    @property
    def compute_ns(self) -> Ints:
        """Return the attributed time: [slots, 2]."""
        self._tell()
        return self._compute_ns

    @property
    def flops(self) -> Ints:
        """Return the modelled FLOPs: [slots, 2]."""
        self._tell()
        return self._flops
