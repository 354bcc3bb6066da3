"""Dashboard 1: SLO compliance, remaining error budget, and causes of breaches."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import (
    FEWEST_SEEN,
    HEALTH,
    MODELS,
    PHASES,
    SLO,
    SLOW,
    DashboardRow,
    dashboard,
    of_label,
)
from dashboards.generate.panels import (
    PanelLink,
    PanelQuery,
    bad_above,
    bad_below,
    bars,
    graph,
    number,
    table_panel,
)
from dashboards.generate.queries import growth, now, of_model, quantile, rate

PAGES_FAST, PAGES_SLOW = 14.4, 6.0
"""Burn rates over 1 h and 6 h at which the rules page (docs of `inferscope slo rules`)."""
OBJECTIVE = "model_name, slo"
_REQUESTS = "inferscope_slo_requests_total"
_IN_WINDOW = "inferscope_slo_window_requests"
_MATCH = 'slo=~"$slo"'
_BAD, _GOOD = (f'result="{result}"' for result in ("bad", "good"))
_ALLOWED = f"(1 - {now('inferscope_slo_objective_ratio', _MATCH, by=OBJECTIVE, how='max')})"

_OF_MODEL = (
    PanelLink("Requests of this model", MODELS, {"model": "model_name"}),
    PanelLink("Slow requests of this model", SLOW, {"model": "model_name"}),
)


def burn(over: str) -> str:
    """Return the burn rate over a window."""
    bad = growth(_REQUESTS, _MATCH, _BAD, by=OBJECTIVE, over=over)
    every = growth(_REQUESTS, _MATCH, by=OBJECTIVE, over=over)
    return f"{bad} / {every} / {_ALLOWED}"


def left() -> str:
    """Return the remaining budget over each objective's own window.

    Collectors maintain that window, since a range in PromQL cannot come from a label; requests of
    several collectors add up where their ratios would not.
    """
    bad = of_model(_IN_WINDOW, _MATCH, _BAD, by=OBJECTIVE)
    every = of_model(_IN_WINDOW, _MATCH, by=OBJECTIVE)
    return f"1 - {bad} / clamp_min({every}, 1) / {_ALLOWED}"


def verdict() -> model.Dashboard:
    """Return the dashboard."""
    window = build.CustomVariable("window").label("Burn over").values("1h,6h,1d,7d,28d,30d")
    window = window.current(model.VariableOption(selected=True, text="30d", value="30d"))
    slo = of_label("slo", "Objective", "inferscope_slo_objective_ratio", "Objectives.")
    return dashboard(
        SLO,
        "InferScope 1: Verdict",
        "Are SLOs met, how long will the budget last, what consumes it?",
        [
            DashboardRow("Now", [*_now()]),
            DashboardRow("Budget", [*_budget()]),
            DashboardRow("Breaches", [*_breaches()]),
            DashboardRow("Promises", [_promises()]),
        ],
        variables=[slo, window],
    )


def _now() -> list[stat.Panel]:
    fast = f"({burn('1h')} > bool {PAGES_FAST}) * ({burn('5m')} > bool {PAGES_FAST})"
    slow = f"({burn('6h')} > bool {PAGES_SLOW}) * ({burn('30m')} > bool {PAGES_SLOW})"
    goodput = 'slo=~".*goodput.*"'
    breaches = growth("inferscope_slo_breaches_total", _MATCH, by="cause")
    return [
        number(
            "Burning fast",
            "Objectives whose budget burns at a paging rate: 14.4 times over 1h and "
            "5m, or 6 times over 6h and 30m. The alert also needs several bad requests.",
            "short",
            # 0 is a claim: without objectives or observations there is no data.
            f"sum(clamp_max({fast} + {slow}, 1))",
            limits=bad_above(1, 1),
        ),
        number(
            "Fastest burn",
            "The highest burn rate of the last hour: 1 spends the budget exactly.",
            "short",
            f"max({burn('1h')})",
            limits=bad_above(1, PAGES_SLOW),
        ),
        number(
            "Lowest remaining budget",
            "Unused share of the bad requests allowed over an objective's window, for the "
            "objective with the least. Negative: the objective is missed.",
            "percentunit",
            f"min({left()})",
            limits=bad_below(0.5, 0.1),
        ),
        number(
            "Goodput",
            "Requests that met all their objectives, over the time shown.",
            "percentunit",
            f"{growth(_REQUESTS, goodput, _GOOD)} / {growth(_REQUESTS, goodput)}",
            limits=bad_below(0.99, 0.95),
        ),
        number(
            "Top cause",
            "Main cause of the breaches in the time shown.",
            "short",
            f"topk(1, {breaches} > 0)",
            legend="{{cause}}",
            absent="none",
            links=[PanelLink("Phases and interference", PHASES)],
        ),
        number(
            "Requests observed",
            "Observed finished requests over those that the engine counts. Below 95 % this "
            "dashboard is unreliable.",
            "percentunit",
            now("inferscope_attribution_coverage_ratio", how="min"),
            limits=bad_below(FEWEST_SEEN, FEWEST_SEEN),
            links=[PanelLink("InferScope's own health", HEALTH)],
        ),
    ]


def _budget() -> list[Builder[model.Panel]]:
    return [
        bars(
            "Remaining budget",
            "Unused share of the bad requests allowed over each objective's own window, "
            "for all engines of its model. Collectors maintain the window: "
            "a sidecar's begins with its pod.",
            "percentunit",
            PanelQuery(left(), "{{model_name}} {{slo}}"),
            most=1,
            limits=bad_below(0.5, 0.1),
            links=_OF_MODEL,
        ),
        graph(
            "Burn rate",
            "Burn rate as a multiple of the allowed one. The dashed lines are the rates "
            "that page: 14.4 over an hour, 6 over six.",
            "short",
            PanelQuery(burn("1h"), "{{model_name}} {{slo}} 1h"),
            PanelQuery(burn("5m"), "{{model_name}} {{slo}} 5m"),
            limits=bad_above(PAGES_SLOW, PAGES_FAST),
            links=_OF_MODEL,
        ),
    ]


def _breaches() -> list[timeseries.Panel]:
    threshold = now("inferscope_slo_threshold_seconds", 'slo=~".*ttft.*"', by=OBJECTIVE, how="max")
    return [
        graph(
            "Breaches by cause",
            "Bad requests per second by main cause: the largest part of the excess.",
            "reqps",
            PanelQuery(rate("inferscope_slo_breaches_total", _MATCH, by="cause"), "{{cause}}"),
            stacked=True,
            links=[PanelLink("Phases and interference", PHASES), PanelLink("Slow requests", SLOW)],
        ),
        graph(
            "First token versus its threshold",
            "The 99th percentile of the time to first token. Dots are single requests; "
            "each leads to its trace.",
            "s",
            PanelQuery(
                quantile(0.99, "inferscope_time_to_first_token_seconds", by="model_name"),
                "{{model_name}} p99",
                exemplars=True,
            ),
            PanelQuery(threshold, "{{model_name}} {{slo}} threshold"),
            links=_OF_MODEL,
        ),
    ]


def _promises() -> table.Panel:
    def highest(name: str) -> str:
        return now(name, _MATCH, by=OBJECTIVE, how="max")

    good = growth(_REQUESTS, _MATCH, _GOOD, by=OBJECTIVE)
    return table_panel(
        "Objectives",
        "Objectives and their results in the time shown. The budget counts "
        "the objective's own window; `burn` is from Prometheus' counters over $window, "
        "including removed pods: over the objective's window 1 spends the budget exactly.",
        {
            "promised": (highest("inferscope_slo_objective_ratio"), "percentunit"),
            "within": (highest("inferscope_slo_threshold_seconds"), "s"),
            "kept": (f"{good} / {growth(_REQUESTS, _MATCH, by=OBJECTIVE)}", "percentunit"),
            "bad": (growth(_REQUESTS, _MATCH, _BAD, by=OBJECTIVE), "short"),
            "in the budget's window": (of_model(_IN_WINDOW, _MATCH, by=OBJECTIVE), "short"),
            "budget left": (left(), "percentunit"),
            "burn": (burn("$window"), "short"),
        },
        links=_OF_MODEL,
    )
