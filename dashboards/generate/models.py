"""Dashboard 2: rate, errors and duration of each model's requests, and their cost."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import MODELS, PHASES, SCHEDULER, SLOW, DashboardRow, dashboard
from dashboards.generate.panels import PanelLink, PanelQuery, bad_above, bars, graph, table_panel
from dashboards.generate.queries import growth, now, quantile, rate

FAILURES = "timeout|server_abort|rejected|error|engine_lost|shed"
"""Finish reasons that count as failures; a client's cancellation does not."""
_REQUESTS = "inferscope_requests_total"
_SLOW_OF = PanelLink("Slow requests of this model", SLOW, {"model": "model_name"})
_PHASES_OF = PanelLink("Phases of this model", PHASES, {"model": "model_name"})
_QUEUES_OF = PanelLink("Scheduler of this model", SCHEDULER, {"model": "model_name"})


def models() -> model.Dashboard:
    """Return the dashboard."""
    failed = rate(_REQUESTS, f'finish_reason=~"{FAILURES}"', by="model_name")
    return dashboard(
        MODELS,
        "InferScope 2: Models",
        "How many requests does each model serve, how many fail, how long do they take?",
        [
            DashboardRow(
                "Rate and errors",
                [
                    graph(
                        "Requests",
                        "Ended requests per second.",
                        "reqps",
                        PanelQuery(rate(_REQUESTS, by="model_name"), "{{model_name}}"),
                        width=8,
                        links=[_SLOW_OF, _PHASES_OF, _QUEUES_OF],
                    ),
                    graph(
                        "Finish reasons",
                        "Ended requests per second; `engine_lost`: with their engine.",
                        "reqps",
                        PanelQuery(rate(_REQUESTS, by="finish_reason"), "{{finish_reason}}"),
                        width=8,
                        stacked=True,
                    ),
                    graph(
                        "Failed requests",
                        "Share of ended requests with a time-out, a rejection, an abort by the "
                        "server, an error or a lost engine.",
                        "percentunit",
                        PanelQuery(
                            f"{failed} / {rate(_REQUESTS, by='model_name')}", "{{model_name}}"
                        ),
                        width=8,
                        limits=bad_above(0.001, 0.01),
                        links=[_SLOW_OF],
                    ),
                ],
            ),
            DashboardRow(
                "Duration",
                [
                    _durations(
                        "Time to first token",
                        "From a request's arrival to its first token. "
                        "Dots are requests; each leads to its trace.",
                        "inferscope_time_to_first_token_seconds",
                    ),
                    _durations(
                        "Time between tokens",
                        "Gaps between two deliveries of one request.",
                        "inferscope_time_between_tokens_seconds",
                    ),
                    _durations(
                        "Time per output token",
                        "Mean time per token of a request after its first.",
                        "inferscope_time_per_output_token_seconds",
                    ),
                    _durations(
                        "Duration",
                        "From a request's arrival to the end of its delivery, failures included.",
                        "inferscope_request_duration_seconds",
                    ),
                ],
            ),
            DashboardRow("Time by cause", [*_ledger()]),
            DashboardRow("Use and cost", [*_costs()]),
            DashboardRow(
                "Deploys",
                [
                    table_panel(
                        "Engines",
                        "Engines and their configuration: compare deployments by `config_hash`.",
                        {"engines": (now("inferscope_engine_info", by=_HOW), "short")},
                    )
                ],
            ),
        ],
    )


_HOW = (
    "model_name, engine, engine_version, model_revision, quantization, "
    "tp, pp, dp, ep, gpu, role, config_hash, synthetic"
)


def _durations(title: str, description: str, histogram: str) -> timeseries.Panel:
    return graph(
        title,
        description,
        "s",
        PanelQuery(
            quantile(0.99, histogram, by="model_name"), "{{model_name}} p99", exemplars=True
        ),
        PanelQuery(quantile(0.5, histogram, by="model_name"), "{{model_name}} p50"),
        links=[_SLOW_OF, _PHASES_OF],
    )


def _ledger() -> list[timeseries.Panel]:
    seconds = "inferscope_latency_seconds_total"
    return [
        graph(
            "Seconds per request, by cause",
            "The mean request's time by cause: the ledgers of all requests that "
            "ended. The stack is the mean duration.",
            "s",
            PanelQuery(
                f"({rate(seconds, by='cause')} > 0) / on () group_left () {rate(_REQUESTS)}",
                "{{cause}}",
            ),
            stacked=True,
            links=[PanelLink("Phases and interference", PHASES), PanelLink("Slow requests", SLOW)],
        ),
        graph(
            "Tokens",
            "Tokens per second: prompts computed, prompts from the prefix cache, output.",
            "short",
            PanelQuery(rate("inferscope_tokens_total", by="phase, source"), "{{phase}} {{source}}"),
            stacked=True,
            links=[PanelLink("Scheduler and KV", SCHEDULER)],
        ),
    ]


def _costs() -> list[Builder[model.Panel]]:
    return [
        bars(
            "Device time by tenant",
            "Device seconds of the time shown; small tenants are `other`.",
            "s",
            PanelQuery(growth("inferscope_tenant_gpu_seconds_total", by="tenant"), "{{tenant}}"),
        ),
        graph(
            "Dollars per hour",
            "At the configured price per device hour: tenants, idle time and waste sum to "
            "the cost of the devices.",
            "currencyUSD",
            PanelQuery(f"3600 * {rate(DOLLARS, by='tenant')}", "{{tenant}}"),
            stacked=True,
        ),
        table_panel(
            "Token cost by model",
            "Dollars, and dollars per million tokens, of the time shown. Used: the device time of "
            f"useful requests. Allocated: {_ALLOCATED}",
            _prices("model_name"),
        ),
        table_panel(
            "Token cost by tenant",
            f"The same by tenant. Allocated: {_ALLOCATED} All tenants sum to the cost of the "
            "used models' devices.",
            _prices("tenant"),
        ),
    ]


DOLLARS = "inferscope_cost_dollars_total"
_TOKENS = "inferscope_tenant_tokens_total"
_USED = 'tenant!~"waste|idle"'
_ALLOCATED = (
    "with a model's idle time and waste, distributed in proportion. Cached tokens take no device "
    "time: they lower the cost of prompts."
)
_KINDS = {
    "input": ("prefill", "input"),
    "input or cached": ("prefill", "input|cached"),
    "output": ("decode", "output"),
}
"""Priced token kinds: phase of the dollars, and kinds of tokens."""


def _prices(by: str) -> dict[str, tuple[str, str]]:
    """Return columns of dollars, used and allocated, by a label."""
    columns = {"used": _used(by), "allocated": _allocated(by)}
    for kind, (phase, kinds) in _KINDS.items():
        tokens = growth(_TOKENS, f'kind=~"{kinds}"', by=by)
        for heading, dollars in (
            ("used", _used(by, phase)),
            ("allocated", _allocated(by, phase)),
        ):
            columns[f"{kind}, {heading}"] = f"1e6 * {dollars} / ({tokens} > 0)"
    return {heading: (expr, "currencyUSD") for heading, expr in columns.items()}


def _used(by: str, phase: str = "prefill|decode") -> str:
    return growth(DOLLARS, _USED, f'phase=~"{phase}"', by=by)


def _allocated(by: str, phase: str = "prefill|decode") -> str:
    """Return used times scaled by a model's total cost over its used cost."""
    whole, used = growth(DOLLARS, by="model_name"), _used("model_name")
    labels = by if by == "model_name" else f"{by}, model_name"
    part = _used(labels, phase)
    return f"sum by ({by}) ({part} * on (model_name) group_left () ({whole} / ({used} > 0)))"
