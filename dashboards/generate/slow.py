"""Dashboard 6: from a slow percentile to single requests, their traces, and `inferscope why`."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import SLOW, DashboardRow, dashboard
from dashboards.generate.panels import PanelQuery, graph, heatmap_panel, number, text_panel, traces
from dashboards.generate.queries import buckets, growth, quantile, rate

_TTFT, _E2E = "inferscope_time_to_first_token_seconds", "inferscope_request_duration_seconds"
_OURS = (
    'span.inferscope.finish != nil && span.gen_ai.request.model =~ "$model"'
    ' && resource.service.instance.id =~ "$engine"'
)
"""Root spans of all our exporters."""
_SHOWN = (
    "span.inferscope.request.id, span.gen_ai.request.model, span.inferscope.finish,"
    " span.gen_ai.latency.time_to_first_token, span.gen_ai.latency.e2e,"
    " span.inferscope.slo.cause, span.inferscope.slo.ttft, span.inferscope.slo.tbt"
)

NEXT = """
1. Click a dot above, or a trace below: its spans are the request's queue, prefill and decode, its
   attributes `inferscope.ledger.*` its time by cause, and `inferscope.request.id` its ID.
2. On the engine's host: `inferscope why REQUEST` names the requests it waited for, and what would
   have met the objective; for past requests, in the pins: `inferscope why REQUEST pin-….isr`.
3. The rate of such requests by cause is on *Verdict*; advice on a cause is in the runbook
   that the alert links to.
"""


def slow() -> model.Dashboard:
    """Return the dashboard."""
    beyond = build.TextBoxVariable("beyond").label("Slower than").default_value("2s")
    return dashboard(
        SLOW,
        "InferScope 6: Slow requests",
        "Which requests were slow, and why was each?",
        [
            DashboardRow("How slow", [*_how_slow()]),
            DashboardRow("Single requests", [text_panel("Next steps", NEXT), *_single()]),
        ],
        variables=[beyond],
        has_traces=True,
    )


def _how_slow() -> list[Builder[model.Panel]]:
    return [
        number(
            "Slowest 1 %",
            "Current 99th percentile of the duration.",
            "s",
            quantile(0.99, _E2E),
            width=6,
        ),
        number(
            "Slowest 0.1 %",
            "Current 99.9th percentile of the duration.",
            "s",
            quantile(0.999, _E2E),
            width=6,
        ),
        number(
            "First token after 2 s",
            "Share of the requests of the time shown.",
            "percentunit",
            _share_beyond(_TTFT, "2.0"),
            width=6,
        ),
        number(
            "Longer than 10 s",
            "Share of the requests of the time shown.",
            "percentunit",
            _share_beyond(_E2E, "10.0"),
            width=6,
        ),
        heatmap_panel(
            "Time to first token",
            "All ended requests; dots are single ones and link to their traces.",
            "s",
            PanelQuery(buckets(_TTFT), "{{le}}", exemplars=True),
        ),
        heatmap_panel(
            "Duration",
            "All ended requests; dots are single ones and link to their traces.",
            "s",
            PanelQuery(buckets(_E2E), "{{le}}", exemplars=True),
        ),
        graph(
            "Seconds by cause",
            "Requests' time per second by cause: the cause that grows when requests become slow "
            "is the reason.",
            "s",
            PanelQuery(f"{rate('inferscope_latency_seconds_total', by='cause')} > 0", "{{cause}}"),
            width=24,
            stacked=True,
        ),
    ]


def _single() -> list[table.Panel]:
    missed = (
        '(span.inferscope.slo.cause != nil || span.inferscope.slo.ttft = "bad"'
        ' || span.inferscope.slo.tbt = "bad")'
    )
    return [
        traces(
            "Missed an objective",
            "Traces of requests that missed an objective, with the main cause.",
            _query(missed),
        ),
        traces(
            "Slower than $beyond",
            "Traces of slower requests, among the traces kept.",
            _query("duration > $beyond"),
        ),
        traces(
            "Failed",
            "Traces of requests that ended with an error, a time-out, an abort or a lost engine.",
            _query("status = error"),
        ),
        traces(
            "Preempted",
            "Traces of preempted requests.",
            _query("span.inferscope.preemptions > 0"),
        ),
    ]


def _share_beyond(histogram: str, bound_s: str) -> str:
    """Return the share of durations beyond a bound, in the histogram's notation."""
    within = growth(f"{histogram}_bucket", f'le="{bound_s}"')
    return f"1 - {within} / {growth(f'{histogram}_count')}"


def _query(condition: str) -> str:
    return f"{{ {_OURS} && {condition} }} | select({_SHOWN})"
