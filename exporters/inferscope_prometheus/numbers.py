"""What is counted: plain numbers, added to per step and per request, copied once a second.

A metric object per series, told of every observation, takes 0.9 µs each; a gap between two tokens
here is one of many in an array. Everything is integer nanoseconds, so sums are exact.
"""

from __future__ import annotations

import copy
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.records import PREFILL, RECOMPUTED
from inferscope_prometheus import names

_MOST_REMEMBERED = 65_536


class Histogram:
    """Durations by bounds.

    Attributes:
        counts: one per bound, up to and with it, and one for what is beyond the last.
        sum_ns: of all durations.
    """

    __slots__ = ("_bounds_ns", "_edges_ns", "counts", "sum_ns")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_ns = [round(bound_s * 1e9) for bound_s in bounds_s]
        self._edges_ns = np.array(self._bounds_ns, dtype=np.int64)
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    def add_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count many."""
        bins = np.searchsorted(self._edges_ns, durations_ns)
        for at, num in enumerate(np.bincount(bins, minlength=len(self.counts)).tolist()):
            self.counts[at] += num
        self.sum_ns += int(durations_ns.sum())

    def __copy__(self) -> Histogram:
        other: Histogram = Histogram.__new__(Histogram)
        other._bounds_ns, other._edges_ns = self._bounds_ns, self._edges_ns
        other.counts, other.sum_ns = self.counts.copy(), self.sum_ns
        return other


class Counts:
    """The counters of one replica of an engine; all of them are there, at 0, from the start."""

    def __init__(self) -> None:
        self.histograms = {
            name: Histogram(bounds) for name, (bounds, _) in names.HISTOGRAMS.items()
        }
        self.step_ns = {phase: Histogram(names.BOUNDS_B) for phase in names.STEP_PHASES}
        self.gpu_ns = {phase: Histogram(names.BOUNDS_A) for phase in names.PHASES}
        self.finishes = dict.fromkeys(names.FINISHES, 0)
        self.cause_ns = dict.fromkeys(names.CAUSES, 0)
        self.waste_ns = dict.fromkeys(names.WASTES, 0)
        self.tokens = dict.fromkeys(names.TOKENS, 0)
        self.flops = dict.fromkeys(names.PHASES, 0)
        self.num_joined_late = 0

    def copy(self) -> Counts:
        """Return the numbers as they are now."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                is_plain = value and isinstance(next(iter(value.values())), int)
                setattr(
                    other,
                    name,
                    dict(value) if is_plain else {k: copy.copy(v) for k, v in value.items()},
                )
        return other

    def add_request(self, request: FinalRequest, *, recomputed_ns: int) -> None:
        """Count a request that was seen from its beginning to its end."""
        durations = self.histograms
        ledger_ns = request.ledger_ns
        durations["request_duration"].add(request.delivered_ns - request.arrived_ns)
        durations["request_queue"].add(sum(ledger_ns.get(c, 0) for c in names.QUEUES))
        durations["request_stall"].add(sum(ledger_ns.get(c, 0) for c in names.STALLS))
        if not request.is_in_one_piece:
            self._add_tokens(request)
        self.gpu_ns["prefill"].add(request.prefill_ns)
        self.gpu_ns["decode"].add(request.decode_ns)
        self.finishes[request.finish] += 1
        for cause, spent_ns in ledger_ns.items():
            self.cause_ns[cause] += spent_ns
        self.tokens["prefill", "cached"] += request.cached_tokens
        rejected_ns = request.rejected.ns
        self.waste_ns["rejected_draft"] += rejected_ns
        if request.finish in names.CANCELS:
            spent_ns = request.prefill_ns + request.decode_ns - recomputed_ns - rejected_ns
            self.waste_ns["cancel"] += max(0, spent_ns)
        self.flops["prefill"] += request.prefill_flops or 0
        self.flops["decode"] += request.decode_flops or 0

    def _add_tokens(self, request: FinalRequest) -> None:
        """Count when its tokens came; those of an answer in one piece came with it."""
        durations = self.histograms
        arrived_ns, first_ns = request.arrived_ns, request.first_token_ns
        if first_ns is not None:
            durations["time_to_first_token"].add(first_ns - arrived_ns)
            if request.admitted_ns is not None:
                durations["request_prefill"].add(max(0, first_ns - request.admitted_ns))
            if request.last_token_ns is not None:
                decode_ns = request.last_token_ns - first_ns
                durations["request_decode"].add(decode_ns)
                if request.output_tokens > 1:
                    per_token_ns = round(decode_ns / (request.output_tokens - 1))
                    durations["time_per_output_token"].add(per_token_ns)
        times_ns = np.frombuffer(request.token_times_ns, dtype=np.int64)
        if len(times_ns) > 1:
            durations["time_between_tokens"].add_all(np.diff(times_ns))


class Residual:
    """How far the cost model was off over the last looks: measured over modelled time, less one."""

    def __init__(self) -> None:
        self._measured_ns = 0
        self._modelled_ns = 0.0
        self._looks: list[tuple[int, float]] = []

    def add(self, step: FinalStep) -> None:
        """Take a step."""
        if not step.is_cold and step.model_residual > -1.0:
            self._measured_ns += step.measured_ns
            self._modelled_ns += step.measured_ns / (1.0 + step.model_residual)

    def look(self) -> float | None:
        """Return it over the last ten looks, None where no step was made in them."""
        self._looks = [*self._looks[-9:], (self._measured_ns, self._modelled_ns)]
        self._measured_ns, self._modelled_ns = 0, 0.0
        modelled_ns = sum(look[1] for look in self._looks)
        return sum(look[0] for look in self._looks) / modelled_ns - 1.0 if modelled_ns else None


class Numbers:
    """The numbers of one engine.

    Attributes:
        by_replica: counters, by data-parallel rank.
        residual: of its cost model.
    """

    def __init__(self) -> None:
        self.by_replica = {0: Counts()}
        self.residual = Residual()
        self._last_step = (-1, -1)
        self._replica_of: dict[str, int] = {}
        """Of requests that are not in the first replica."""
        self._recomputed_ns: dict[str, int] = {}

    def replica(self, dp_rank: int) -> Counts:
        """Return the counters of a replica."""
        counts = self.by_replica.get(dp_rank)
        if counts is None:
            counts = self.by_replica[dp_rank] = Counts()
        return counts

    def step(self, step: FinalStep) -> None:
        """Count a step; each of its ranks tells of it, one after another (5 µs)."""
        counts = self.replica(step.dp_rank)
        if step.padding_ns:
            counts.waste_ns["padding"] += step.padding_ns
        num_rows = len(step.request_ids)
        if not num_rows:
            return
        is_prefill = step.phases == PREFILL
        num_prefills = int(np.count_nonzero(is_prefill))
        if num_prefills:
            self._prefills(step, is_prefill, counts)
        if (step.dp_rank, step.step) == self._last_step:
            return
        self._last_step = (step.dp_rank, step.step)
        self.residual.add(step)
        num_tokens = int(step.tokens.sum())
        prefill_tokens = int(step.tokens[is_prefill].sum()) if num_prefills else 0
        counts.tokens["prefill", "computed"] += prefill_tokens
        counts.tokens["decode", "computed"] += num_tokens - prefill_tokens
        phase = "decode" if not num_prefills else "mixed"
        counts.step_ns["prefill" if num_prefills == num_rows else phase].add(
            step.end_ns - step.start_ns
        )

    def request(self, request: FinalRequest) -> None:
        """Count a request, unless only a part of it was seen."""
        counts = self.replica(self._replica_of.pop(request.request_id, 0))
        recomputed_ns = self._recomputed_ns.pop(request.request_id, 0)
        if request.joined_late:
            counts.num_joined_late += 1
        else:
            counts.add_request(request, recomputed_ns=recomputed_ns)

    def _prefills(self, step: FinalStep, is_prefill: NDArray[np.bool_], counts: Counts) -> None:
        """Note of each prefill's request where it runs, and what it computes a second time."""
        for at in np.flatnonzero(is_prefill).tolist():
            request_id = step.request_ids[at]
            if step.dp_rank:
                _remember(self._replica_of, request_id, step.dp_rank)
            if step.flags[at] & RECOMPUTED:
                share_ns = int(step.shares_ns[at])
                counts.waste_ns["recompute"] += share_ns
                share_ns += self._recomputed_ns.get(request_id, 0)
                _remember(self._recomputed_ns, request_id, share_ns)


def _remember(known: dict[str, int], request_id: str, value: int) -> None:
    """Note something of a request until it is final, which not every request is seen to be."""
    known[request_id] = value
    if len(known) > _MOST_REMEMBERED:
        del known[next(iter(known))]
