"""What is counted: plain numbers, added to per step and per request, copied once a second.

A metric object per series, told of every observation, takes 0.9 µs each; a gap between two tokens
here is one of many in an array. Everything is integer nanoseconds, so sums are exact.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.records import PREFILL, VERIFY
from inferscope_prometheus import names
from inferscope_prometheus.cost_allocation import CostAllocation

_MOST_REMEMBERED = 65_536


class Exemplar(NamedTuple):
    """A duration that somebody can look up."""

    trace_id: str
    duration_ns: int
    at_ns: int
    """When its request ended."""


class DurationHistogram:
    """Durations by bounds.

    Attributes:
        counts: one per bound, up to and with it, and one for what is beyond the last.
        sum_ns: of all durations.
        exemplars: the newest one of each bound, by its place.
    """

    __slots__ = ("_bounds_ns", "_edges_ns", "counts", "exemplars", "sum_ns")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_ns = [round(bound_s * 1e9) for bound_s in bounds_s]
        self._edges_ns = np.array(self._bounds_ns, dtype=np.int64)
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_ns = 0
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    def show(self, exemplar: Exemplar) -> None:
        """Keep one of the durations to look up; Prometheus takes none older than it has."""
        at = bisect_left(self._bounds_ns, exemplar.duration_ns)
        known = self.exemplars.get(at)
        if known is None or exemplar.at_ns >= known.at_ns:
            self.exemplars[at] = exemplar

    def add_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count many."""
        bins = np.searchsorted(self._edges_ns, durations_ns)
        for at, num in enumerate(np.bincount(bins, minlength=len(self.counts)).tolist()):
            self.counts[at] += num
        self.sum_ns += int(durations_ns.sum())

    def __copy__(self) -> DurationHistogram:
        other: DurationHistogram = DurationHistogram.__new__(DurationHistogram)
        other._bounds_ns, other._edges_ns = self._bounds_ns, self._edges_ns
        other.counts, other.sum_ns = self.counts.copy(), self.sum_ns
        other.exemplars = self.exemplars.copy()
        return other


class ReplicaCounters:
    """The counters of one replica of an engine; all of them are there, at 0, from the start."""

    def __init__(self) -> None:
        self.histograms = {
            name: DurationHistogram(bounds) for name, (bounds, _) in names.HISTOGRAMS.items()
        }
        self.step_ns = {phase: DurationHistogram(names.BOUNDS_B) for phase in names.STEP_PHASES}
        self.gpu_ns = {phase: DurationHistogram(names.BOUNDS_A) for phase in names.PHASES}
        self.finishes = dict.fromkeys(names.FINISHES, 0)
        self.cause_ns = dict.fromkeys(names.CAUSES, 0)
        self.waste_ns = dict.fromkeys(names.WASTES, 0)
        self.tokens = dict.fromkeys(names.TOKENS, 0)
        self.flops = dict.fromkeys(names.PHASES, 0)
        self.spec_tokens = dict.fromkeys(names.SPEC_RESULTS, 0)
        self.rank_ns: dict[int, int] = {}
        """In steps, by rank, as each measured it."""
        self.num_joined_late = 0

    def copy(self) -> ReplicaCounters:
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

    def add_request(self, request: FinalRequest, *, trace_id: str | None) -> None:
        """Count a request that was seen from its beginning to its end.

        Args:
            request: what it was.
            trace_id: of its trace, where one is kept.
        """
        ledger_ns = request.ledger_ns
        spent = {
            "request_duration": request.delivered_ns - request.arrived_ns,
        }
        if not request.ledger_missing:
            spent["request_queue"] = sum(ledger_ns.get(c, 0) for c in names.QUEUES)
            spent["request_stall"] = sum(ledger_ns.get(c, 0) for c in names.STALLS)
            self.gpu_ns["prefill"].add(request.prefill_ns)
            self.gpu_ns["decode"].add(request.decode_ns)
        if not request.is_in_one_piece:
            spent |= _of_tokens(request)
            self._add_gaps(request, trace_id)
        for name, duration_ns in spent.items():
            self.histograms[name].add(duration_ns)
            if trace_id is not None:
                exemplar = Exemplar(trace_id, duration_ns, request.delivered_ns)
                self.histograms[name].show(exemplar)
        self.finishes[request.finish] += 1
        for cause, spent_ns in ledger_ns.items():
            self.cause_ns[cause] += spent_ns
        self.tokens["prefill", "cached"] += request.cached_tokens
        self.flops["prefill"] += request.prefill_flops or 0
        self.flops["decode"] += request.decode_flops or 0

    def _add_gaps(self, request: FinalRequest, trace_id: str | None) -> None:
        times_ns = np.frombuffer(request.token_times_ns, dtype=np.int64)
        if len(times_ns) < 2:
            return
        gaps_ns, histogram = np.diff(times_ns), self.histograms["time_between_tokens"]
        histogram.add_all(gaps_ns)
        if trace_id is not None:
            histogram.show(Exemplar(trace_id, int(gaps_ns.max()), request.delivered_ns))


def _of_tokens(request: FinalRequest) -> dict[str, int]:
    """Return when its tokens came; those of an answer in one piece came with it."""
    arrived_ns, first_ns = request.arrived_ns, request.first_token_ns
    if first_ns is None:
        return {}
    spent = {"time_to_first_token": first_ns - arrived_ns}
    if request.admitted_ns is not None:
        spent["request_prefill"] = max(0, first_ns - request.admitted_ns)
    if request.last_token_ns is not None:
        spent["request_decode"] = decode_ns = request.last_token_ns - first_ns
        if request.output_tokens > 1:
            spent["time_per_output_token"] = round(decode_ns / (request.output_tokens - 1))
    return spent


class ResidualMedian:
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


class EngineCounters:
    """The numbers of one engine.

    Attributes:
        by_replica: counters, by data-parallel rank.
        residual: of its cost model.
        bills: for whom its devices' time was, by tenant and by adapter.
    """

    def __init__(self, *bills: CostAllocation) -> None:
        self.by_replica = {0: ReplicaCounters()}
        self.residual = ResidualMedian()
        self.bills = bills
        self._last_step = (-1, -1)
        self._replica_of: dict[str, int] = {}
        """Of requests that are not in the first replica."""
        self._proposed: dict[str, int] = {}
        """Draft tokens that were verified, by request."""

    def replica(self, dp_rank: int) -> ReplicaCounters:
        """Return the counters of a replica; a number that none can have is the last one's."""
        dp_rank = min(max(dp_rank, 0), names.MOST_REPLICAS - 1)
        counts = self.by_replica.get(dp_rank)
        if counts is None:
            counts = self.by_replica[dp_rank] = ReplicaCounters()
        return counts

    def step(self, step: FinalStep) -> None:
        """Count a step; each of its ranks tells of it, one after another (5 µs)."""
        counts = self.replica(step.dp_rank)
        if step.padding_ns:
            counts.waste_ns["padding"] += step.padding_ns
        num_rows, unnamed = len(step.request_ids), step.unnamed
        if not num_rows and unnamed is None:
            return
        if step.rank < names.MOST_REPLICAS:
            counts.rank_ns[step.rank] = counts.rank_ns.get(step.rank, 0) + step.measured_ns
        if unnamed is not None:  # the host of the core counts the step, its tokens and requests
            for bill in self.bills:
                bill.unnamed(unnamed.prefill_ns, unnamed.decode_ns)
            return
        phases = step.phases.tobytes()
        num_prefills, prefill_ns, prefill_tokens = phases.count(PREFILL), 0, 0
        if num_prefills:
            is_prefill = step.phases == PREFILL
            prefill_ns = int(step.shares_ns[is_prefill].sum())
            prefill_tokens = int(step.tokens[is_prefill].sum())
        for bill in self.bills:
            bill.attributed(prefill_ns, step.busy_ns - prefill_ns)
        if num_prefills and step.dp_rank:
            for at in np.flatnonzero(is_prefill).tolist():
                _remember(self._replica_of, step.request_ids[at], step.dp_rank)
        if (step.dp_rank, step.step) == self._last_step:
            return
        self._last_step = (step.dp_rank, step.step)
        self.residual.add(step)
        num_tokens = int(np.add.reduce(step.tokens))
        counts.tokens["prefill", "computed"] += prefill_tokens
        counts.tokens["decode", "computed"] += num_tokens - prefill_tokens
        phase = "decode" if not num_prefills else "mixed"
        counts.step_ns["prefill" if num_prefills == num_rows else phase].add(
            step.end_ns - step.start_ns
        )
        if VERIFY in phases:
            self._verified(step)

    def request(self, request: FinalRequest, *, trace_id: str | None = None) -> None:
        """Count a request; of one of which only a part was seen, what its part cost."""
        counts = self.replica(self._replica_of.pop(request.request_id, 0))
        proposed = self._proposed.pop(request.request_id, 0)
        wasted: dict[str, int] = {}
        for bill in self.bills:
            wasted = bill.ended(request)  # whoever pays, the waste is the same
        for reason, ns in wasted.items():
            counts.waste_ns[reason] += ns
        if request.joined_late:
            counts.num_joined_late += 1
            return
        counts.add_request(request, trace_id=trace_id)
        rejected = min(request.rejected.tokens, proposed)
        counts.spec_tokens["rejected"] += rejected
        counts.spec_tokens["accepted"] += proposed - rejected

    def _verified(self, step: FinalStep) -> None:
        """Note how many tokens were proposed to each: all that a slice verifies but the first."""
        for at in np.flatnonzero(step.phases == VERIFY).tolist():
            request_id = step.request_ids[at]
            num = int(step.tokens[at]) - 1 + self._proposed.get(request_id, 0)
            _remember(self._proposed, request_id, num)


def _remember(known: dict[str, int], request_id: str, value: int) -> None:
    """Note something of a request until it is final, which not every request is seen to be."""
    known[request_id] = value
    if len(known) > _MOST_REMEMBERED:
        del known[next(iter(known))]
