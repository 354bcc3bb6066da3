"""Measures of one run: latencies, goodput, phase times and ledger rows of its final requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np

from inferscope.attribution import Metric, breakdown
from inferscope.fold import FinalRequest
from inferscope.records import CAUSES

_LIMIT_FACTOR = 2.0
"""Limits of goodput are this many medians of both sides."""
_COMPLETE = ("stop", "length")
HEADLINES = ("ttft_p50", "tbt_p50", "tbt_p99", "e2e_p50", "goodput")
"""Measures that the verdict is about."""
_PERCENTILES: tuple[tuple[Metric, int], ...] = (
    ("ttft", 50),
    ("ttft", 90),
    ("tbt", 50),
    ("tbt", 99),
    ("e2e", 50),
    ("e2e", 90),
)


class Limits(msgspec.Struct, frozen=True):
    """Latencies that a request of the goodput meets."""

    ttft_ns: int
    """Maximum time to the first token."""
    tpot_ns: int | None
    """Maximum time per token after the first; null if no request had several tokens."""


class Measure(msgspec.Struct, frozen=True):
    """Quantity that is compared.

    Attributes:
        name: name of the quantity.
        unit: ns, requests/s, tok/s or share.
        group: latency, load, phase or ledger.
        of: function from the requests of a run to the quantity; None where it is unknown.
    """

    name: str
    unit: str
    group: str
    of: Callable[[Sequence[FinalRequest]], float | None]


def complete(request: FinalRequest) -> bool:
    """Return whether a request has finished and its whole life was observed."""
    return request.finish in _COMPLETE and not request.joined_late and not request.ledger_missing


def common_limits(requests: Iterable[FinalRequest]) -> Limits:
    """Return twice the medians of TTFT and TPOT over all requests of both sides.

    They depend on neither side more than on the other, and fit any machine.
    """
    ttft_ns, tpot_ns = [], []
    for request in requests:
        ttft_ns += _latency(request, "ttft")
        tpot_ns += _latency(request, "tpot")
    return Limits(
        round(_LIMIT_FACTOR * median(ttft_ns)),
        round(_LIMIT_FACTOR * median(tpot_ns)) if tpot_ns else None,
    )


def measures(limits: Limits) -> list[Measure]:
    """Return all measures, in the order of the page."""
    latencies = [
        Measure(f"{metric}_p{percent}", "ns", "latency", _percentile(metric, percent))
        for metric, percent in _PERCENTILES
    ]
    return [
        *latencies,
        Measure("goodput", "requests/s", "load", lambda run: _rate(run, _is_good(limits))),
        Measure(
            "throughput", "tok/s", "load", lambda run: _rate(run, lambda one: one.output_tokens)
        ),
        Measure("cached_prompt", "share", "load", _cached_share),
        *(
            Measure(name, "ns", "phase", _mean(of))
            for name, of in (
                ("prefill", lambda one: one.prefill_ns),
                ("recomputed", lambda one: one.recomputed.ns),
                ("decode", lambda one: one.decode_ns),
                ("drafted", lambda one: one.drafted.ns),
                ("rejected", lambda one: one.rejected.ns),
            )
        ),
        *(Measure(cause, "ns", "ledger", _mean(_ledger_row(cause))) for cause in CAUSES),
    ]


def _latency(request: FinalRequest, metric: Metric) -> list[float]:
    if metric == "tbt":
        return [float(gap_ns) for gap_ns in request.tbt_ns]
    found = breakdown(request, metric)
    return [] if found is None else [found.whole_ns / found.num_gaps]


def _percentile(metric: Metric, percent: int) -> Callable[[Sequence[FinalRequest]], float | None]:
    def of(run: Sequence[FinalRequest]) -> float | None:
        values = [value for request in run for value in _latency(request, metric)]
        return float(np.percentile(values, percent)) if values else None

    return of


def _mean(of: Callable[[FinalRequest], int]) -> Callable[[Sequence[FinalRequest]], float | None]:
    return lambda run: fmean(map(of, run)) if run else None


def _rate(run: Sequence[FinalRequest], of: Callable[[FinalRequest], int]) -> float | None:
    """Return a sum over a run's requests per second, from first arrival to last delivery."""
    if not run:
        return None
    span_ns = max(one.delivered_ns for one in run) - min(one.arrived_ns for one in run)
    return sum(map(of, run)) * 1e9 / span_ns if span_ns else None


def _is_good(limits: Limits) -> Callable[[FinalRequest], int]:
    def is_good(request: FinalRequest) -> int:
        (ttft_ns,) = _latency(request, "ttft") or (None,)
        (tpot_ns,) = _latency(request, "tpot") or (None,)
        return (
            ttft_ns is not None
            and ttft_ns <= limits.ttft_ns
            and (tpot_ns is None or limits.tpot_ns is None or tpot_ns <= limits.tpot_ns)
        )

    return is_good


def _cached_share(run: Sequence[FinalRequest]) -> float | None:
    prompt = sum(one.prompt_tokens or 0 for one in run)
    return sum(one.cached_tokens for one in run) / prompt if prompt else None


def _ledger_row(cause: str) -> Callable[[FinalRequest], int]:
    return lambda request: request.ledger_ns.get(cause, 0)
