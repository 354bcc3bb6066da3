"""Common parts of all dashboards: names, variables, mutual links, annotations.

UIDs and variable names are a contract: alerts and bookmarks link to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.queries import series

SLO, MODELS, PHASES, GPUS, SCHEDULER, SLOW, HEALTH = (
    f"inferscope-{what}"
    for what in ("slo", "models", "phases", "gpus", "scheduler", "slow", "health")
)
"""UIDs in the order of an investigation, from an alert to its cause."""

METRICS = model.DataSourceRef("prometheus", "${prometheus_datasource}")
TRACES = model.DataSourceRef("tempo", "${tempo_datasource}")
FEWEST_SEEN = 0.95
"""Minimum observed share of the requests that the engine counts; below it, figures are unreliable.
"""

Panels = Sequence[Builder[model.Panel]]


@dataclass(frozen=True)
class DashboardRow:
    """A heading and the panels under it, left to right, 24 columns wide."""

    title: str
    panels: Panels


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[DashboardRow],
    *,
    variables: Sequence[Builder[model.VariableModel]] = (),
    has_traces: bool = False,
) -> model.Dashboard:
    """Return a dashboard.

    Args:
        uid: its UID.
        title: its name.
        description: the question it answers.
        rows: its rows.
        variables: variables besides the common ones.
        has_traces: whether it queries Tempo as well.
    """
    frame = (
        build.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["inferscope"])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(_the_others())
        .annotation(_alerts())
        .annotation(_blind())
    )
    for variable in (*_sources(has_traces), *_scope(), *variables):
        frame = frame.with_variable(variable)
    for row in rows:
        frame = frame.with_row(build.Row(row.title))
        for panel in row.panels:
            frame = frame.with_panel(panel)
    whole = frame.build()
    for number, made in enumerate(whole.panels or (), 1):
        made.id_val = number
    return whole


def of_label(name: str, label: str, metric: str, description: str) -> build.QueryVariable:
    """Return a variable with the values of a label: several, or all."""
    return (
        build.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(METRICS)
        .query(f"label_values({metric}, {name_of_label(name)})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+" if name in ("job", "instance") else ".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def name_of_label(variable: str) -> str:
    """Return the label of a variable."""
    return {"model": "model_name", "engine": "engine_id"}.get(variable, variable)


def _sources(has_traces: bool) -> list[build.DatasourceVariable]:
    found = [
        build.DatasourceVariable("prometheus_datasource")
        .label("Prometheus data source")
        .type("prometheus")
    ]
    if has_traces:
        traces = build.DatasourceVariable("tempo_datasource").label("Tempo data source")
        found.append(traces.type("tempo"))
    return found


def _scope() -> list[build.QueryVariable]:
    info = "inferscope_engine_info"
    in_job = f'{info}{{job=~"$job"}}'
    in_target = f'{info}{{job=~"$job", instance=~"$instance"}}'
    of_model = f'{info}{{job=~"$job", instance=~"$instance", model_name=~"$model"}}'
    return [
        of_label("job", "Job", info, "Prometheus' name for the collectors."),
        of_label("instance", "Instance", in_job, "Collectors, one per host."),
        of_label("model", "Model", in_target, "Served model names."),
        of_label("engine", "Engine", of_model, "Engine IDs."),
    ]


def _the_others() -> build.DashboardLink:
    return (
        build.DashboardLink("InferScope")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags(["inferscope"])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )


def _alerts() -> build.AnnotationQuery:
    """Return an annotation for the times at which one of our alerts fires."""
    return (
        build.AnnotationQuery()
        .name("Alerts")
        .datasource(METRICS)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"InferScope.+", alertstate="firing"}')
    )


def _blind() -> build.AnnotationQuery:
    """Return an annotation for the times at which part of an engine's requests is not observed."""
    seen = series("inferscope_attribution_coverage_ratio")
    return (
        build.AnnotationQuery()
        .name("Less than 95 % of the requests observed")
        .datasource(METRICS)
        .enable(True)
        .icon_color("purple")
        .expr(f"{seen} < {FEWEST_SEEN}")
    )
