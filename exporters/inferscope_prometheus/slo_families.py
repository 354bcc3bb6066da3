"""Prometheus families of objectives: good and bad requests, causes, error budgets.

There are none if the collector has no objectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inferscope.fold import SloState
from inferscope.slo import ObjectiveCount
from inferscope_prometheus import names

ObjectiveRows = Iterable[tuple[tuple[str, ...], ObjectiveCount]]
_LABELS = (*names.LABELS, "slo")


def slo_families(counts: ObjectiveRows, promised: SloState) -> Iterator[Metric]:
    """Return the families at one time.

    Args:
        counts: each engine's counts, with the values of LABELS.
        promised: the budgets, over all engines of a host, by model label.
    """
    counts = list(counts)
    requests = CounterMetricFamily(
        "inferscope_slo_requests",
        "Judged requests, good or bad; an unfinished one is bad once it is late.",
        labels=(*_LABELS, "result"),
    )
    breaches = CounterMetricFamily(
        "inferscope_slo_breaches",
        "Bad requests by main cause; counted when they finish, or ten seconds late.",
        labels=(*_LABELS, "cause"),
    )
    warm_up = CounterMetricFamily(
        "inferscope_slo_warmup_requests",
        "Warm-up requests, before an engine's first response: neither good nor bad.",
        labels=_LABELS,
    )
    threshold = GaugeMetricFamily(
        "inferscope_slo_threshold_seconds", "Latency limit of a good request.", labels=_LABELS
    )
    objective = GaugeMetricFamily(
        "inferscope_slo_objective_ratio", "Target share of good requests.", labels=_LABELS
    )
    for labels, count in counts:
        one = count.objective
        at = (*labels, one.name)
        requests.add_metric([*at, "good"], count.num_good)
        requests.add_metric([*at, "bad"], count.num_bad)
        for cause, num in count.causes.items():
            breaches.add_metric([*at, cause], num)
        warm_up.add_metric(at, count.num_warm_up)
        if one.threshold_ns is not None:
            threshold.add_metric(at, one.threshold_ns / 1e9)
        objective.add_metric(at, one.objective)
    yield from (requests, breaches, warm_up, threshold, objective)
    yield from _budgets(promised)


def _budgets(promised: SloState) -> Iterator[Metric]:
    """Return the families of budgets, which outlive engines."""
    window = GaugeMetricFamily(
        "inferscope_slo_window_requests",
        "Requests judged on this host within the objective's window, earlier collectors included.",
        labels=(*_LABELS, "result"),
    )
    remaining = GaugeMetricFamily(
        "inferscope_slo_budget_remaining_ratio",
        "Remaining share of this host's error budget; below 0 it is overspent.",
        labels=_LABELS,
    )
    for budget in promised.budgets:
        at = (budget.model, *names.OF_ALL[1:], budget.objective.name)
        window.add_metric([*at, "good"], budget.num_good)
        window.add_metric([*at, "bad"], budget.num_bad)
        remaining.add_metric(at, budget.remaining)
    gap = GaugeMetricFamily(
        "inferscope_slo_uncounted_seconds",
        "Time before this collector's start in which no collector judged.",
        labels=names.LABELS,
    )
    gap.add_metric(names.OF_ALL, promised.uncounted_ns / 1e9)
    yield from (window, remaining, gap)
