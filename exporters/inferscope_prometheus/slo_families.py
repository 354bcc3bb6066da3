"""Prometheus families of objectives: good and bad requests, causes, error budgets.

There are none if the collector has no objectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from inferscope.fold import BudgetView, SloState
from inferscope.slo import ObjectiveCount
from inferscope_prometheus.metric import Rows, family_of
from inferscope_prometheus.metric_table import OF_ALL

ObjectiveRows = Iterable[tuple[tuple[str, ...], ObjectiveCount]]


def slo_families(counts: ObjectiveRows, promised: SloState) -> Iterator[Metric]:
    """Return the families at one time.

    Args:
        counts: each engine's counts, with the values of LABELS.
        promised: the budgets, over all engines of a host, by model label.
    """
    by_objective = [((*labels, count.objective.name), count) for labels, count in counts]
    yield family_of("slo_requests_total", _results(by_objective))
    yield family_of(
        "slo_breaches_total",
        (((*at, cause), num) for at, count in by_objective for cause, num in count.causes.items()),
    )
    yield family_of(
        "slo_warmup_requests_total", ((at, count.num_warm_up) for at, count in by_objective)
    )
    objectives = [(at, count.objective) for at, count in by_objective]
    yield family_of(
        "slo_threshold_seconds",
        ((at, one.threshold_ns / 1e9) for at, one in objectives if one.threshold_ns is not None),
    )
    yield family_of("slo_objective_ratio", ((at, one.objective) for at, one in objectives))
    # Budgets outlive engines.
    budgets = [
        ((budget.model, *OF_ALL[1:], budget.objective.name), budget) for budget in promised.budgets
    ]
    yield family_of("slo_window_requests", _results(budgets))
    yield family_of(
        "slo_budget_remaining_ratio", ((at, budget.remaining) for at, budget in budgets)
    )
    yield family_of("slo_uncounted_seconds", [(OF_ALL, promised.uncounted_ns / 1e9)])


def _results(judged: Iterable[tuple[tuple[str, ...], ObjectiveCount | BudgetView]]) -> Rows:
    for at, nums in judged:
        yield (*at, "good"), nums.num_good
        yield (*at, "bad"), nums.num_bad
