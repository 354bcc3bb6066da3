"""What was computed for each request, by phase: time, tokens, FLOPs, bytes, and what was wasted.

A team that decodes one token each in step after step is kept as sums, keyed by its array of slots:
a team that stays keeps its array. The sums are told when another team comes, or somebody asks.
FLOPs and a slice's own bytes are linear in its context, so the contexts' sum is all they need; of
the weights all members with one token read alike.
"""

from __future__ import annotations

from operator import add

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.weights import PlainShares
from inferscope.collector.journal import Journal, PerSingle
from inferscope.cost.counts import Rates

Ints = NDArray[np.int64]

COMPUTE_NS, TOKENS, FLOPS, READ_BYTES, WRITE_BYTES = range(5)
WASTED_TOKENS, WASTED_NS = 5, 6
"""Of a prefill, computed before and lost to a preemption; of a decode, drafts not accepted."""
DRAFT_TOKENS, DRAFT_NS = 7, 8
"""Of the drafting, in a decode: not among the target model's tokens, FLOPs and bytes."""
NUM_COLUMNS = 9
TOTALLED = (COMPUTE_NS, READ_BYTES, WRITE_BYTES)
"""What the journal tells, for counters to be given out by."""
_SINGLES, _CONTEXTS, _SEEN, _SHARES_NS, _WEIGHTS = range(5)
"""Of decodes of one token: how many, the sum of their contexts, and as far as windows reach, their
time, and what they read of the weights. Their FLOPs and bytes follow, when somebody asks."""
_NUM_SUMS = 5

_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Work:
    """Amounts by phase (prefill, decode), slot and column.

    Attributes:
        journal: takes all that is booked, None while nobody reads it.
    """

    def __init__(self, num_slots: int) -> None:
        self._cells = np.zeros((2, num_slots, NUM_COLUMNS), dtype=np.int64)
        self._singles = np.zeros((_NUM_SUMS, num_slots), dtype=np.int64)
        """What is to be added to the decodes: teams come and go by columns."""
        self._instead: dict[int, list[int]] = {}
        """By slot, what is to be added to its prefill, and behind that to its singles."""
        self._team = _NOBODY
        self._rates: Rates | None = None
        self._per_single = _per_single(None)
        self._reach: int | None = None
        """How much of a context a windowed layer sees; None where there is no such layer."""
        self._num_steps = 0
        """Of the team, not told yet."""
        self._shares_ns = self._contexts = self._seen = _NOBODY
        """Sums of the team: [members]."""
        self._weights_each = self._weights_rest = 0
        """Bytes of the weights that each member reads, and the first besides."""
        self.journal: Journal | None = None

    def begin(self, slot: int) -> None:
        """Start a request in a free slot."""
        self._cells[:, slot] = 0
        self._singles[:, slot] = 0
        self._instead.pop(slot, None)

    def end(self, slot: int) -> None:
        """Give the slot back: what its owner's team computed must not hit the next one."""
        if self._is_untold(slot):
            self.tell()
            self._team = _NOBODY
        self._instead.pop(slot, None)

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        num_more = num_slots - self._singles.shape[1]
        none = np.zeros((2, num_more, NUM_COLUMNS), dtype=np.int64)
        self._cells = np.concatenate([self._cells, none], axis=1)
        no_sums = np.zeros((_NUM_SUMS, num_more), dtype=np.int64)
        self._singles = np.concatenate([self._singles, no_sums], axis=1)

    def decoded_together(
        self,
        slots: Ints,
        shares_ns: list[Ints],
        contexts: Ints,
        rates: Rates | None,
        weights: PlainShares | None,
    ) -> None:
        """Book a step in which each of these requests decodes one token.

        Args:
            slots: [requests]; the same array says that it is the same requests.
            shares_ns: for each rank, [requests].
            contexts: [requests].
            rates: of the model's shape, None where it is not counted.
            weights: what they read of the weights, None without rates.
        """
        if slots is not self._team or rates is not self._rates:
            self.tell()
            self._team = slots
            if rates is not self._rates:
                self._count_singles()
                self._instead.clear()
                self._rates = rates
                self._per_single = _per_single(rates)
                self._reach = rates.window - 1 if rates is not None and rates.window else None
        if self._num_steps:
            self._contexts += contexts
            for of_rank_ns in shares_ns:
                self._shares_ns += of_rank_ns
        else:
            self._contexts = contexts.copy()
            self._shares_ns = shares_ns[0].copy()
            for of_rank_ns in shares_ns[1:]:
                self._shares_ns += of_rank_ns
        if self._reach is not None:
            seen = np.minimum(contexts, self._reach)
            self._seen = self._seen + seen if self._num_steps else seen
        self._num_steps += 1
        if weights is not None:
            self._weights_each += weights.each
            self._weights_rest += weights.rest

    def prefilled_instead(
        self, slot: int, amounts: list[int], *, context: int, weight_bytes: int
    ) -> None:
        """Book a prefill whose step is booked as if it had been a decode.

        Args:
            slot: the request's.
            amounts: of it, by column.
            context: of it.
            weight_bytes: that the decode was booked.
        """
        seen = min(context, self._reach) if self._reach is not None else 0
        if self.journal is not None:
            read, per_context, per_seen, written = self._per_single
            read += per_context * context + per_seen * seen + weight_bytes
            totals = (amounts[COMPUTE_NS], amounts[READ_BYTES], amounts[WRITE_BYTES])
            self.journal.prefills.append((slot, *totals, read, written))
        more = [*amounts, -1, -context, -seen, -amounts[COMPUTE_NS], -weight_bytes]
        before = self._instead.get(slot)
        self._instead[slot] = more if before is None else list(map(add, before, more))

    def computed(self, slots: Ints, phases: Ints, amounts: Ints, *, is_once: bool) -> None:
        """Book rows of a step.

        Args:
            slots: [rows].
            phases: [rows], 0 for prefill and 1 for decode.
            amounts: [rows, columns].
            is_once: no slot is named twice.
        """
        self.tell()
        if self.journal is not None:
            self.journal.rows.append((slots, phases, amounts[:, TOTALLED]))
        if is_once:
            self._cells[phases, slots] += amounts
        else:
            np.add.at(self._cells, (phases, slots), amounts)

    def tell(self) -> None:
        """Add the sums to the members' decode cells."""
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        team = self._team
        if self.journal is not None:
            of_weights = (self._weights_each, self._weights_rest)
            seen = _NOBODY if self._reach is None else self._seen
            self.journal.teams.append(
                (
                    team,
                    self._shares_ns,
                    self._contexts,
                    seen,
                    num_steps,
                    *of_weights,
                    self._per_single,
                )
            )
        singles, contexts, seen, shares_ns, weights = self._singles
        singles[team] += num_steps
        contexts[team] += self._contexts
        shares_ns[team] += self._shares_ns
        if self._reach is not None:
            seen[team] += self._seen
        if self._rates is not None:
            weights[team] += self._weights_each
            weights[team[0]] += self._weights_rest
            self._weights_each = self._weights_rest = 0

    def _count_singles(self) -> None:
        """Count the decodes of all slots by the rates they were computed at: others come."""
        for slot in self._singles[_SINGLES].nonzero()[0].tolist():
            self._cells[:, slot] = self.of(slot)
        self._singles[:] = 0

    def _is_untold(self, slot: int) -> bool:
        """Tell whether the sums are a request's, too. Who leaves is mostly gone from the team."""
        return self._num_steps > 0 and slot in self._team.tolist()

    def of(self, slot: int) -> tuple[list[int], list[int]]:
        """Return a request's amounts by column, of prefill and of decode."""
        if self._is_untold(slot):
            self.tell()
        prefill, decode = self._cells[:, slot].tolist()
        singles = self._singles[:, slot].tolist()
        instead = self._instead.get(slot)
        if instead is not None:
            prefill = list(map(add, prefill, instead))
            singles = list(map(add, singles, instead[NUM_COLUMNS:]))
        num, contexts, seen, shares_ns, weights = singles
        decode[COMPUTE_NS] += shares_ns
        decode[TOKENS] += num
        if self._rates is not None:
            flops, hbm = self._rates
            decode[FLOPS] += flops.of_singles(num, contexts, seen)
            decode[READ_BYTES] += weights + hbm.reads_of_singles(num, contexts, seen)
            decode[WRITE_BYTES] += hbm.writes(num, num)
        return prefill, decode

    @property
    def compute_ns(self) -> Ints:
        """Return the attributed time: [slots, 2]."""
        self.tell()
        compute_ns: Ints = self._cells[:, :, COMPUTE_NS].T.copy()
        compute_ns[:, 1] += self._singles[_SHARES_NS]
        for slot, amounts in self._instead.items():
            compute_ns[slot] += amounts[COMPUTE_NS], amounts[NUM_COLUMNS + _SHARES_NS]
        return compute_ns


def _per_single(rates: Rates | None) -> PerSingle:
    """Return what decodes of one token move; nothing where that is not counted."""
    if rates is None:
        return PerSingle(0, 0, 0, 0)
    hbm = rates.hbm
    return PerSingle(
        hbm.reads_of_singles(1, 0, 0), hbm.kv_per_token, hbm.window_kv_per_token, hbm.writes(1, 1)
    )
