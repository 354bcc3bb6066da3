"""Dashboard 7: reliability of the other dashboards' figures, and InferScope's overhead."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import FEWEST_SEEN, HEALTH, DashboardRow, dashboard
from dashboards.generate.panels import (
    PanelQuery,
    bad_above,
    bad_below,
    graph,
    number,
    state_timeline,
)
from dashboards.generate.queries import RATE, now, of_target

_DROPPED = of_target("inferscope_records_dropped_total")
"""Drops of exporters belong to no engine."""


def health() -> model.Dashboard:
    """Return the dashboard."""
    return dashboard(
        HEALTH,
        "InferScope 7: Own health",
        "Are the figures of the other dashboards reliable, and what is InferScope's overhead?",
        [
            DashboardRow("Verdict", [*_verdict()]),
            DashboardRow("Coverage", [*_seen()]),
            DashboardRow("Accuracy", [*_quality()]),
            DashboardRow("Overhead", [*_cost()]),
        ],
    )


def _lag(by: str) -> str:
    return f"time() - {now('inferscope_folded_timestamp_seconds', by=by, how='max')}"


def _verdict() -> list[Builder[model.Panel]]:
    coverage = now("inferscope_attribution_coverage_ratio", how="min")
    return [
        number(
            "Requests observed",
            "Observed finished requests over those that the engine counts, lowest engine. "
            "Below 95 % these dashboards are unreliable.",
            "percentunit",
            coverage,
            width=6,
            limits=bad_below(FEWEST_SEEN, FEWEST_SEEN),
        ),
        number(
            "Behind",
            "Age of the oldest view of any engine; it grows for an engine "
            "that has exited, until it expires.",
            "s",
            f"max({_lag('engine_id')})",
            width=6,
            limits=bad_above(5, 15),
        ),
        number(
            "Records missing",
            "In the time shown: overwritten or damaged before they were read, unknown, not "
            "joined, or not delivered.",
            "short",
            f"sum (increase({_DROPPED}[$__range]))",
            width=6,
            limits=bad_above(1, 100),
        ),
        number(
            "Probe's share of the time",
            "Time inside the probe over wall time, highest engine.",
            "percentunit",
            now("inferscope_overhead_ratio", how="max"),
            width=6,
            limits=bad_above(0.01, 0.02),
        ),
    ]


def _seen() -> list[Builder[model.Panel]]:
    up = now("inferscope_source_up", by="engine_id, source", how="max")
    return [
        state_timeline(
            "Sources",
            "Data sources of each engine: the probe, a device clock, samplers. A missing source "
            "has no figures, rather than zeros.",
            PanelQuery(up, "{{engine_id}} {{source}}"),
            {"0": ("absent", "#6e7080"), "1": ("there", "green")},
        ),
        graph(
            "Requests observed",
            "Observed finished requests over those that the engine counts.",
            "percentunit",
            PanelQuery(
                now("inferscope_attribution_coverage_ratio", by="engine_id", how="min"),
                "{{engine_id}}",
            ),
            most=1,
            limits=bad_below(FEWEST_SEEN, FEWEST_SEEN),
        ),
        graph(
            "Behind",
            "Age of the view in the newest scrape.",
            "s",
            PanelQuery(_lag("engine_id"), "{{engine_id}}"),
        ),
        graph(
            "Records missing",
            "Records per second, by stage and reason.",
            "ops",
            PanelQuery(
                f"sum by (stage, reason) (rate({_DROPPED}[{RATE}]))", "{{stage}} {{reason}}"
            ),
            stacked=True,
        ),
    ]


def _quality() -> list[timeseries.Panel]:
    residual = now("inferscope_attribution_residual_ratio", by="engine_id, gpu", how="max")
    by_mode = now("inferscope_cost_model_residual_ratio", by="engine_id, mode, source", how="max")
    fitted = now("inferscope_apportioned_error_ratio", by="engine_id, counted", how="max")
    return [
        graph(
            "Residual of the cost model",
            "Measured over modelled step time, less one, over ten seconds. The model divides a "
            "step among its requests; the measured time is unaffected.",
            "percentunit",
            PanelQuery(residual, "{{engine_id}} {{gpu}}"),
            width=8,
            least=None,
        ),
        graph(
            "Residual by execution mode",
            "Median of a mode's recent steps; `source` is the source of the model.",
            "percentunit",
            PanelQuery(by_mode, "{{engine_id}} {{mode}} ({{source}})"),
            width=8,
            least=None,
        ),
        graph(
            "Error of apportioned counters",
            "Relative error of the regression that divides a device counter over the phases. "
            "By counters: absent without one, and while phases differ too little.",
            "percentunit",
            PanelQuery(fitted, "{{engine_id}} {{counted}}"),
            width=8,
            limits=bad_above(0.1, 0.2),
        ),
    ]


def _cost() -> list[timeseries.Panel]:
    return [
        graph(
            "Probe's share of the time",
            "Time inside the probe over wall time.",
            "percentunit",
            PanelQuery(
                now("inferscope_overhead_ratio", by="engine_id", how="max"), "{{engine_id}}"
            ),
            width=8,
            limits=bad_above(0.01, 0.02),
        ),
        graph(
            "Scrapes",
            "Duration of a scrape of a collector.",
            "s",
            PanelQuery(of_target("scrape_duration_seconds"), "{{instance}}"),
            width=8,
        ),
        graph(
            "Series",
            "Samples per scrape: bounded for any client input.",
            "short",
            PanelQuery(of_target("scrape_samples_scraped"), "{{instance}}"),
            width=8,
        ),
    ]
