"""Counters: plain numbers, updated per step and per request and copied once a second.

A client-library metric object takes 0.9 µs per observation; here the gaps of one request are one
array. All values are integer nanoseconds, so sums are exact.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.fold import FinalRequest, FinalStep
from inferscope.records import CACHE_CLASSES, CAUSES, FINISHES, PREFILL, VERIFY
from inferscope_prometheus import names
from inferscope_prometheus.cost_allocation import CostAllocation
from inferscope_prometheus.metric_table import (
    BOUNDS_A,
    BOUNDS_B,
    BOUNDS_S,
    METRICS,
    REQUEST_HISTOGRAMS,
)

_MOST_REMEMBERED = 65_536


class Exemplar(NamedTuple):
    """A duration with a trace to look up."""

    trace_id: str
    duration_ns: int
    at_ns: int
    """Monotonic end time of its request in ns."""


class DurationHistogram:
    """Histogram of durations with fixed bounds.

    Attributes:
        counts: one per bound (inclusive), and one above the last.
        sum_ns: sum of all durations.
        exemplars: newest exemplar of each bound, by its index.
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
        """Keep an exemplar; Prometheus accepts none older than its last."""
        at = bisect_left(self._bounds_ns, exemplar.duration_ns)
        known = self.exemplars.get(at)
        if known is None or exemplar.at_ns >= known.at_ns:
            self.exemplars[at] = exemplar

    def add_all(self, durations_ns: NDArray[np.int64]) -> None:
        """Count an array of durations."""
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
    """Counters of one replica of an engine; all exist from the start, at 0."""

    def __init__(self) -> None:
        self.histograms = {
            name: DurationHistogram(BOUNDS_S[METRICS[name].kind]) for name in REQUEST_HISTOGRAMS
        }
        self.step_ns = {phase: DurationHistogram(BOUNDS_B) for phase in names.STEP_PHASES}
        self.gpu_ns = {phase: DurationHistogram(BOUNDS_A) for phase in names.PHASES}
        self.finishes = dict.fromkeys(FINISHES, 0)
        self.cause_ns = dict.fromkeys(CAUSES, 0)
        self.waste_ns = dict.fromkeys(names.WASTES, 0)
        self.tokens = dict.fromkeys(names.TOKENS, 0)
        self.flops = dict.fromkeys(names.PHASES, 0)
        self.spec_tokens = dict.fromkeys(names.SPEC_RESULTS, 0)
        self.rank_ns: dict[int, int] = {}
        """Time in steps by rank, as measured by each."""
        self.num_joined_late = 0
        self.cache_tokens = dict.fromkeys(CACHE_CLASSES, 0)
        self.cache_miss_ns = dict.fromkeys(CACHE_CLASSES[1:], 0)

    def copy(self) -> ReplicaCounters:
        """Return a copy of the current values."""
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
        """Count a request that was observed from start to end.

        Args:
            request: the final request.
            trace_id: ID of its trace, if one is kept.
        """
        ledger_ns = request.ledger_ns
        spent = {
            "request_duration_seconds": request.delivered_ns - request.arrived_ns,
        }
        if not request.ledger_missing:
            spent["request_queue_seconds"] = sum(ledger_ns.get(c, 0) for c in names.QUEUES)
            spent["request_stall_seconds"] = sum(ledger_ns.get(c, 0) for c in names.STALLS)
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
        if request.cache is not None:
            for name, num in request.cache.tokens.items():
                self.cache_tokens[name] += num
            for name, ns in (request.cache.gpu_ns or {}).items():
                if name in self.cache_miss_ns and not request.ledger_missing:
                    self.cache_miss_ns[name] += ns
        self.flops["prefill"] += request.prefill_flops or 0
        self.flops["decode"] += request.decode_flops or 0

    def _add_gaps(self, request: FinalRequest, trace_id: str | None) -> None:
        times_ns = np.frombuffer(request.token_times_ns, dtype=np.int64)
        if len(times_ns) < 2:
            return
        gaps_ns, histogram = np.diff(times_ns), self.histograms["time_between_tokens_seconds"]
        histogram.add_all(gaps_ns)
        if trace_id is not None:
            histogram.show(Exemplar(trace_id, int(gaps_ns.max()), request.delivered_ns))


def _of_tokens(request: FinalRequest) -> dict[str, int]:
    """Return the number of tokens by token time; a non-streamed response has one time."""
    arrived_ns, first_ns = request.arrived_ns, request.first_token_ns
    if first_ns is None:
        return {}
    spent = {"time_to_first_token_seconds": first_ns - arrived_ns}
    if request.admitted_ns is not None:
        spent["request_prefill_seconds"] = max(0, first_ns - request.admitted_ns)
    if request.last_token_ns is not None:
        spent["request_decode_seconds"] = decode_ns = request.last_token_ns - first_ns
        if request.output_tokens > 1:
            spent["time_per_output_token_seconds"] = round(decode_ns / (request.output_tokens - 1))
    return spent


class ResidualMedian:
    """Median residual of the cost model over the last snapshots: measured/modelled - 1."""

    def __init__(self) -> None:
        self._measured_ns = 0
        self._modelled_ns = 0.0
        self._windows: list[tuple[int, float]] = []

    def add(self, step: FinalStep) -> None:
        """Add a step."""
        if not step.is_cold and step.model_residual > -1.0:
            self._measured_ns += step.measured_ns
            self._modelled_ns += step.measured_ns / (1.0 + step.model_residual)

    def next_window(self) -> float | None:
        """Begin a window, and return the residual of the last ten; None without a step in them."""
        self._windows = [*self._windows[-9:], (self._measured_ns, self._modelled_ns)]
        self._measured_ns, self._modelled_ns = 0, 0.0
        modelled_ns = sum(window[1] for window in self._windows)
        return (
            sum(window[0] for window in self._windows) / modelled_ns - 1.0 if modelled_ns else None
        )


class EngineCounters:
    """Counters of one engine.

    Attributes:
        by_replica: counters by data-parallel rank.
        residual: residual of its cost model.
        allocations: cost allocations of its devices' time, by tenant and by adapter.
    """

    def __init__(self, *allocations: CostAllocation) -> None:
        self.by_replica = {0: ReplicaCounters()}
        self.residual = ResidualMedian()
        self.allocations = allocations
        self._last_step = (-1, -1)
        self._replica_of: dict[str, int] = {}
        """Replica by request ID, for requests not in the first replica."""
        self._proposed: dict[str, int] = {}
        """Verified draft tokens by request ID."""

    def replica(self, dp_rank: int) -> ReplicaCounters:
        """Return the counters of a replica; an invalid rank gets those of the last."""
        dp_rank = min(max(dp_rank, 0), names.MOST_REPLICAS - 1)
        counts = self.by_replica.get(dp_rank)
        if counts is None:
            counts = self.by_replica[dp_rank] = ReplicaCounters()
        return counts

    def on_step(self, step: FinalStep) -> None:
        """Count a step; each of its ranks reports it in turn (5 µs)."""
        counts = self.replica(step.dp_rank)
        if step.padding_ns:
            counts.waste_ns["padding"] += step.padding_ns
        num_rows, unnamed = len(step.request_ids), step.unnamed
        if not num_rows and unnamed is None:
            return
        if step.rank < names.MOST_REPLICAS:
            counts.rank_ns[step.rank] = counts.rank_ns.get(step.rank, 0) + step.measured_ns
        if unnamed is not None:  # the core's host counts the step, its tokens and requests
            for allocation in self.allocations:
                allocation.unnamed(unnamed.prefill_ns, unnamed.decode_ns)
            return
        phases = step.phases.tobytes()
        num_prefills, prefill_ns, prefill_tokens = phases.count(PREFILL), 0, 0
        if num_prefills:
            is_prefill = step.phases == PREFILL
            prefill_ns = int(step.shares_ns[is_prefill].sum())
            prefill_tokens = int(step.tokens[is_prefill].sum())
        for allocation in self.allocations:
            allocation.attributed(prefill_ns, step.busy_ns - prefill_ns)
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

    def on_request(self, request: FinalRequest, *, trace_id: str | None = None) -> None:
        """Count a request; if only part of it was observed, count the cost of that part."""
        counts = self.replica(self._replica_of.pop(request.request_id, 0))
        proposed = self._proposed.pop(request.request_id, 0)
        wasted: dict[str, int] = {}
        for allocation in self.allocations:
            wasted = allocation.ended(request)  # the waste is the same in each allocation
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
        """Record each request's draft tokens: all verified tokens of a slice but the first."""
        for at in np.flatnonzero(step.phases == VERIFY).tolist():
            request_id = step.request_ids[at]
            num = int(step.tokens[at]) - 1 + self._proposed.get(request_id, 0)
            _remember(self._proposed, request_id, num)


def _remember(known: dict[str, int], request_id: str, value: int) -> None:
    """Record a value of a request until it is final, which not every request becomes here."""
    known[request_id] = value
    if len(known) > _MOST_REMEMBERED:
        del known[next(iter(known))]
