"""Objectives as Prometheus' families: good and bad, why, and what is left of the budget.

There are none of them where the collector has no objectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inferscope.collector.snapshot import Promised
from inferscope.slo.tally import ObjectiveCount
from inferscope_prometheus import names

ObjectiveRows = Iterable[tuple[tuple[str, ...], ObjectiveCount]]
_LABELS = (*names.LABELS, "slo")


def slo_families(told: ObjectiveRows, promised: Promised) -> Iterator[Metric]:
    """Return the families of one moment.

    Args:
        told: each engine's counts, with the values of LABELS.
        promised: the budgets, of a host's engines together, by label of the model.
    """
    told = list(told)
    requests = CounterMetricFamily(
        "inferscope_slo_requests",
        "Requests that were judged, good or bad; one that is not over is bad when it is late.",
        labels=(*_LABELS, "result"),
    )
    breaches = CounterMetricFamily(
        "inferscope_slo_breaches",
        "Bad requests by the cause to blame; told when they are over, or ten seconds late.",
        labels=(*_LABELS, "cause"),
    )
    warm_up = CounterMetricFamily(
        "inferscope_slo_warmup_requests",
        "Requests from before an engine's first answer: neither good nor bad.",
        labels=_LABELS,
    )
    threshold = GaugeMetricFamily(
        "inferscope_slo_threshold_seconds", "What a good request keeps to.", labels=_LABELS
    )
    objective = GaugeMetricFamily(
        "inferscope_slo_objective_ratio", "Share that is to be good.", labels=_LABELS
    )
    for labels, count in told:
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


def _budgets(promised: Promised) -> Iterator[Metric]:
    """Return what no engine has for itself: budgets outlive them."""
    window = GaugeMetricFamily(
        "inferscope_slo_window_requests",
        "Requests judged on this host within the objective's window, also by collectors before.",
        labels=(*_LABELS, "result"),
    )
    remaining = GaugeMetricFamily(
        "inferscope_slo_budget_remaining_ratio",
        "Of the error budget of this host's requests; below 0 it is overspent.",
        labels=_LABELS,
    )
    for budget in promised.budgets:
        at = (budget.model, *names.OF_ALL[1:], budget.objective.name)
        window.add_metric([*at, "good"], budget.num_good)
        window.add_metric([*at, "bad"], budget.num_bad)
        remaining.add_metric(at, budget.remaining)
    gap = GaugeMetricFamily(
        "inferscope_slo_uncounted_seconds",
        "Before this collector began, time in which nobody judged.",
        labels=names.LABELS,
    )
    gap.add_metric(names.OF_ALL, promised.uncounted_ns / 1e9)
    yield from (window, remaining, gap)
