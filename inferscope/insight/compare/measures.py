"""Measures of requests: latencies, goodput, workload, phase times and ledger rows.

A measure is a percentile of the values of all requests, or a sum over another sum, such as the
prefill time of all requests over their number. So a measure of any part of the requests, in which
each counts with a weight of its own, needs no other definition (`estimates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from inferscope.attribution import Metric
from inferscope.insight.compare.columns import COMPARED, PHASES, Columns, Floats
from inferscope.insight.compare.longest_gaps import GAP_CAUSES
from inferscope.records import CAUSES

_LIMIT_FACTOR = 2.0
"""Limits of goodput are this many medians of both sides."""
Group = Literal[
    "latency", "load", "workload", "phase", "ledger", "ttft_ledger", "tbt_ledger", "longest_gap"
]
PERCENTS = (50, 90, 95, 99)
"""Percentiles of every latency that can be asked for."""
_OF_RUNS = ("ttft_p50", "ttft_p90", "tbt_p50", "tbt_p99", "e2e_p50", "e2e_p90")
_OF_RECORDINGS = ("ttft_mean", *_OF_RUNS[:4], "tpot_mean", "e2e_mean", *_OF_RUNS[4:])
_SPLIT = (
    *("prefill_own", "prefill_co_batched", "prefill_interference"),
    *("decode_own", "decode_co_batched", "decode_interference", "slowdown"),
)
"""Causes into which a cost model divides the time in steps."""
_CAUSE_IDX = {cause: idx for idx, cause in enumerate(CAUSES)}


class Limits(msgspec.Struct, frozen=True):
    """Latencies that a request of the goodput meets."""

    ttft_ns: int
    """Maximum time to the first token."""
    tpot_ns: int | None
    """Maximum time per token after the first; null if no request had several tokens."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Quantity that is compared.

    Attributes:
        name: name of the quantity.
        unit: ns, requests/s, tok/s, tokens or share.
        group: part of the page that shows it.
        metric: latency of a percentile.
        percent: percentile, 0 to 100.
        total: [requests] of the numerator of any other measure.
        per: [requests] of its denominator; None for seconds.
        is_matched: whether the requests of a side are weighted to a common workload first.
        split: [requests], time that a cost model divided into the numerator and other causes; None
            if it is measured as it is.
    """

    name: str
    unit: str
    group: Group
    metric: Metric | None = None
    percent: int = 0
    total: Callable[[Columns], Floats] | None = None
    per: Callable[[Columns], Floats] | None = None
    is_matched: bool = True
    split: Callable[[Columns], Floats] | None = None


def common_limits(*sides: Columns) -> Limits:
    """Return twice the medians of TTFT and TPOT over all requests of both sides.

    They depend on neither side more than on the other, and fit any machine.
    """
    medians_ns = []
    for metric in ("ttft", "tpot"):
        values = np.concatenate([each.latencies[metric].ns for each in sides])
        medians_ns.append(round(_LIMIT_FACTOR * float(np.median(values))) if len(values) else None)
    ttft_ns, tpot_ns = medians_ns
    return Limits(ttft_ns or 0, tpot_ns)


def latencies() -> list[Measure]:
    """Return the mean and every percentile of every latency."""
    return [
        measure
        for metric in COMPARED
        for measure in (
            Measure(
                name=f"{metric}_mean",
                unit="ns",
                group="latency",
                total=_total_ns(metric),
                per=_num_values(metric),
            ),
            *(
                Measure(
                    name=f"{metric}_p{percent}",
                    unit="ns",
                    group="latency",
                    metric=metric,
                    percent=percent,
                )
                for percent in PERCENTS
            ),
        )
    ]


def of_runs(limits: Limits) -> list[Measure]:
    """Return the measures of pairs of runs that served the same load, in the order of a page."""
    return [*_named(_OF_RUNS), *_work(limits)]


def of_recordings(limits: Limits) -> list[Measure]:
    """Return the measures of two recordings, in the order of a page."""
    parts = [*_ledger("ttft", "ttft_ledger"), *_ledger("tbt", "tbt_ledger"), *_longest_gaps()]
    return [*_workload(), *_named(_OF_RECORDINGS), *_work(limits), *parts]


def _named(names: Sequence[str]) -> list[Measure]:
    by_name = {measure.name: measure for measure in latencies()}
    return [by_name[name] for name in names]


def _work(limits: Limits) -> list[Measure]:
    """Return the measures of goodput, phases and the whole ledger."""
    return [
        Measure(
            name="goodput",
            unit="requests/s",
            group="load",
            total=lambda of: _good(of, limits),
            is_matched=False,
        ),
        Measure(
            name="throughput",
            unit="tok/s",
            group="load",
            total=lambda of: of.facts["output_tokens"] * of.is_complete,
            is_matched=False,
        ),
        Measure(
            name="cached_prompt",
            unit="share",
            group="load",
            total=lambda of: of.facts["cached_tokens"] * of.is_complete,
            per=lambda of: of.facts["prompt_tokens"] * of.is_complete,
        ),
        *(_per_request(name, "phase", _phase(name)) for name in PHASES),
        *_ledger("delivered", "ledger"),
    ]


def _workload() -> list[Measure]:
    """Return the measures of what the clients asked for, and of what the server refused."""
    return [
        Measure(
            name="requests",
            unit="requests/s",
            group="workload",
            total=lambda of: np.ones_like(of.is_complete),
            is_matched=False,
        ),
        Measure(
            name="failed",
            unit="share",
            group="workload",
            total=lambda of: of.is_failed,
            per=lambda of: np.ones_like(of.is_complete),
            is_matched=False,
        ),
        *(
            Measure(
                name=name,
                unit="tokens",
                group="workload",
                total=_fact(name),
                per=lambda of: of.is_complete,
            )
            for name in ("prompt_tokens", "output_tokens")
        ),
    ]


def _ledger(metric: Metric, group: Group) -> list[Measure]:
    prefix = "" if metric == "delivered" else f"{metric}."
    per = (lambda of: of.is_complete) if metric == "delivered" else _num_values(metric)
    return [
        Measure(name=prefix + cause, unit="ns", group=group, total=_booked(metric, cause), per=per)
        for cause in CAUSES
    ]


def _longest_gaps() -> list[Measure]:
    return [
        Measure(
            name=f"longest_gap.{cause}",
            unit="ns",
            group="longest_gap",
            total=_of_longest_gap(idx),
            per=lambda of: (of.longest_gaps_ns.sum(axis=1) > 0).astype(np.float64),
            split=_in_steps,
        )
        for idx, cause in enumerate(GAP_CAUSES)
    ]


def _per_request(name: str, group: Group, total: Callable[[Columns], Floats]) -> Measure:
    return Measure(name=name, unit="ns", group=group, total=total, per=lambda of: of.is_complete)


def _split(metric: Metric) -> Callable[[Columns], Floats]:
    return lambda of: of.ledgers_ns[metric][:, [_CAUSE_IDX[cause] for cause in _SPLIT]].sum(axis=1)


def _booked(metric: Metric, cause: str) -> Callable[[Columns], Floats]:
    return lambda of: of.ledgers_ns[metric][:, _CAUSE_IDX[cause]]


def _in_steps(of: Columns) -> Floats:
    in_steps_ns: Floats = of.longest_gaps_ns[:, :-1].sum(axis=1)
    return in_steps_ns


def _of_longest_gap(idx: int) -> Callable[[Columns], Floats]:
    return lambda of: of.longest_gaps_ns[:, idx]


def _total_ns(metric: Metric) -> Callable[[Columns], Floats]:
    def total(of: Columns) -> Floats:
        ns, owner = of.latencies[metric]
        return np.bincount(owner, weights=ns, minlength=len(of.is_complete)).astype(np.float64)

    return total


def _num_values(metric: Metric) -> Callable[[Columns], Floats]:
    def num(of: Columns) -> Floats:
        counts = np.bincount(of.latencies[metric].owner, minlength=len(of.is_complete))
        return counts.astype(np.float64)

    return num


def _phase(name: str) -> Callable[[Columns], Floats]:
    return lambda of: of.phases_ns[name]


def _fact(name: str) -> Callable[[Columns], Floats]:
    return lambda of: of.facts[name] * of.is_complete


def _good(of: Columns, limits: Limits) -> Floats:
    """Return 1 for each request whose TTFT and TPOT are known and within the limits."""
    ttft, tpot = of.latencies["ttft"], of.latencies["tpot"]
    is_good = np.zeros_like(of.is_complete)
    is_good[ttft.owner[ttft.ns <= limits.ttft_ns]] = 1.0
    if limits.tpot_ns is not None:
        is_good[tpot.owner[tpot.ns > limits.tpot_ns]] = 0.0
    return is_good
