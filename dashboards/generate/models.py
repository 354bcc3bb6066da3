"""Second: rate, errors and duration of each model's requests, and what they cost."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import MODELS, PHASES, SCHEDULER, SLOW, DashboardRow, dashboard
from dashboards.generate.panels import PanelLink, PanelQuery, bad_above, bars, graph, table_panel
from dashboards.generate.queries import growth, now, quantile, rate

FAILURES = "timeout|server_abort|rejected|error|engine_lost|shed"
"""Ends that are nobody's wish; a client that leaves has its reasons."""
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
                        "Requests that ended, a second.",
                        "reqps",
                        PanelQuery(rate(_REQUESTS, by="model_name"), "{{model_name}}"),
                        width=8,
                        links=[_SLOW_OF, _PHASES_OF, _QUEUES_OF],
                    ),
                    graph(
                        "How requests end",
                        "Ends a second, by reason; `engine_lost` ended with its engine.",
                        "reqps",
                        PanelQuery(rate(_REQUESTS, by="finish_reason"), "{{finish_reason}}"),
                        width=8,
                        stacked=True,
                    ),
                    graph(
                        "Requests that failed",
                        "Share of the ends that were a time-out, a rejection, an abort by the "
                        "server, an error or the loss of the engine.",
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
                        "From a request's arrival to the end of its delivery, however it ended.",
                        "inferscope_request_duration_seconds",
                    ),
                ],
            ),
            DashboardRow("Where the time goes", [*_ledger()]),
            DashboardRow("Use and cost", [*_costs()]),
            DashboardRow(
                "Deploys",
                [
                    table_panel(
                        "Engines",
                        "What runs, and how it was started: compare two deploys by `config_hash`.",
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
            "The mean request's time, divided by what it was spent on: the ledgers of all that "
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
            "Tokens a second: prompts computed, prompts found in the prefix cache, answers.",
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
            "Device seconds of the time shown; what few use is `other`.",
            "s",
            PanelQuery(growth("inferscope_tenant_gpu_seconds_total", by="tenant"), "{{tenant}}"),
        ),
        graph(
            "Dollars an hour",
            "At the configured price of an hour of a device: tenants, idle time and waste sum to "
            "what the devices cost.",
            "currencyUSD",
            PanelQuery(f"3600 * {rate(DOLLARS, by='tenant')}", "{{tenant}}"),
            stacked=True,
        ),
        table_panel(
            "What a model's tokens cost",
            "Dollars, and dollars per million tokens, of the time shown. Used: the device time of "
            f"requests that was not in vain. Allocated: {_ALLOCATED}",
            _prices("model_name"),
        ),
        table_panel(
            "What a tenant's tokens cost",
            f"The same by who asked. Allocated: {_ALLOCATED} All tenants' sum is what the devices "
            "of the models cost that were used.",
            _prices("tenant"),
        ),
    ]


DOLLARS = "inferscope_cost_dollars_total"
_TOKENS = "inferscope_tenant_tokens_total"
_USED = 'tenant!~"waste|idle"'
_ALLOCATED = (
    "with a model's idle time and waste, shared out in proportion. Cached tokens take no device "
    "time: they make the prompt's cheaper."
)
_KINDS = {
    "input": ("prefill", "input"),
    "input or cached": ("prefill", "input|cached"),
    "output": ("decode", "output"),
}
"""What is priced: by the dollars of which phase, over which kinds of tokens."""


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
    """Return the same times what a model costs in all over what of it was used."""
    whole, used = growth(DOLLARS, by="model_name"), _used("model_name")
    labels = by if by == "model_name" else f"{by}, model_name"
    part = _used(labels, phase)
    return f"sum by ({by}) ({part} * on (model_name) group_left () ({whole} / ({used} > 0)))"
