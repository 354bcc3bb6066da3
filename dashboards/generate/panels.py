"""Panel constructors from texts and queries; every panel has a title, text and unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    tempo,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType
from grafana_foundation_sdk.models.text import TextMode

from dashboards.generate.frame import METRICS, TRACES

GREEN, YELLOW, RED = "green", "yellow", "red"
COLORS = {
    "prefill": "blue",
    "decode": "orange",
    "padding": "light-purple",
    "unattributed": "purple",
    "foreign": "red",
    "idle_no_work": "#6e7080",
    "idle_host_gap": "dark-yellow",
}
"""Colours of phases, the same on all dashboards."""


@dataclass(frozen=True)
class PanelQuery:
    """A query and the legend of its series.

    Attributes:
        exemplars: whether to draw single requests, with links to their traces.
    """

    expr: str
    legend: str
    exemplars: bool = False


@dataclass(frozen=True)
class PanelLink:
    """A link on every series of a panel.

    Attributes:
        title: text of the link.
        uid: UID of the target dashboard.
        variables: variables set there, by the series' label they are set from.
    """

    title: str
    uid: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def link(self, labels: str = "__field.labels") -> build.DashboardLink:
        """Return the Grafana link; other variables are passed on unchanged.

        Args:
            labels: Grafana's expression for a series' labels.
        """
        kept = ["prometheus_datasource", "job", "instance", "model", "engine"]
        parts = ["${__url_time_range}"]
        parts += [f"${{{name}:queryparam}}" for name in kept if name not in self.variables]
        parts += [f"var-{name}=${{{labels}.{label}}}" for name, label in self.variables.items()]
        return build.DashboardLink(self.title).url(f"/d/{self.uid}?{'&'.join(parts)}")


Limits = Sequence[model.Threshold]
"""Colours by the value from which they hold; the first has no lower limit."""


def bad_above(yellow: float, red: float) -> Limits:
    """Return limits for a value that should be small."""
    steps = ((None, GREEN), (yellow, YELLOW), (red, RED))
    return [model.Threshold(color=color, value=value) for value, color in steps]


def bad_below(yellow: float, red: float) -> Limits:
    """Return limits for a value that should be large."""
    steps = ((None, RED), (red, YELLOW), (yellow, GREEN))
    return [model.Threshold(color=color, value=value) for value, color in steps]


PLAIN: Limits = (model.Threshold(color="text", value=None),)
"""Limits of a neutral value."""


def graph(
    title: str,
    description: str,
    unit: str,
    *lines: PanelQuery,
    width: int = 12,
    stacked: bool = False,
    limits: Limits = PLAIN,
    links: Sequence[PanelLink] = (),
    least: float | None = 0,
    most: float | None = None,
) -> timeseries.Panel:
    """Return lines over time; with `stacked`, stacked areas."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(METRICS)
        .span(width)
        .height(8)
        .fill_opacity(60 if stacked else 0)
        .line_width(1)
        .show_points(shapes.VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions()
            .mode(shapes.TooltipDisplayMode.MULTI)
            .sort(shapes.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(shapes.LegendDisplayMode.LIST)
            .placement(shapes.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .data_links([link.link() for link in links])
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL))
        for name, color in COLORS.items():
            fixed = {"mode": "fixed", "fixedColor": color}
            panel = panel.override_by_name(name, [model.DynamicConfigValue("color", fixed)])
    if limits is not PLAIN:
        panel = panel.thresholds(_thresholds(limits)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(shapes.GraphThresholdsStyleMode.DASHED)
        )
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    for letter, line in zip(ascii_uppercase, lines, strict=False):
        panel = panel.with_target(_over_time(line).ref_id(letter))
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    width: int = 4,
    limits: Limits = PLAIN,
    legend: str = "",
    absent: str = "no data",
    links: Sequence[PanelLink] = (),
) -> stat.Panel:
    """Return a single figure; with a legend, its name next to it."""
    shown = shapes.BigValueTextMode.VALUE_AND_NAME if legend else shapes.BigValueTextMode.VALUE
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(METRICS)
        .span(width)
        .height(4)
        .text_mode(shown)
        .color_mode(shapes.BigValueColorMode.VALUE)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(limits))
        .no_value(absent)
        .data_links([link.link() for link in links])
        .with_target(_at_once(PanelQuery(expr, legend)).ref_id("A"))
    )


def bars(
    title: str,
    description: str,
    unit: str,
    *lines: PanelQuery,
    width: int = 12,
    limits: Limits = PLAIN,
    most: float | None = None,
    links: Sequence[PanelLink] = (),
) -> bargauge.Panel:
    """Return a bar for the current value of each series."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(METRICS)
        .span(width)
        .height(8)
        .min(0)
        .orientation(shapes.VizOrientation.HORIZONTAL)
        .display_mode(shapes.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(limits))
        .data_links([link.link() for link in links])
    )
    if most is not None:
        panel = panel.max(most)
    for letter, line in zip(ascii_uppercase, lines, strict=False):
        panel = panel.with_target(_at_once(line).ref_id(letter))
    return panel


def table_panel(
    title: str,
    description: str,
    columns: Mapping[str, tuple[str, str]],
    *,
    links: Sequence[PanelLink] = (),
) -> table.Panel:
    """Return a table with a row per set of labels.

    Args:
        title: its heading.
        description: its content.
        columns: query and unit by heading.
        links: links on its cells.
    """
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .unit("short")
        .datasource(METRICS)
        .span(24)
        .height(8)
        .data_links([link.link("__data.fields") for link in links])
    )
    names: dict[str, str] = {}
    for letter, (heading, (expr, unit)) in zip(ascii_uppercase, columns.items(), strict=False):
        target = _at_once(PanelQuery(expr, "")).format(PromQueryFormat.TABLE).ref_id(letter)
        panel = panel.with_target(target)
        value = "Value" if len(columns) == 1 else f"Value #{letter}"
        names[value] = heading
        panel = panel.override_by_name(heading, [model.DynamicConfigValue("unit", unit)])
    together = model.DataTransformerConfig(id_val="merge", options={})
    tidy = {"excludeByName": {"Time": True}, "renameByName": names}
    return panel.with_transformation(together).with_transformation(
        model.DataTransformerConfig(id_val="organize", options=tidy)
    )


def heatmap_panel(
    title: str,
    description: str,
    unit: str,
    line: PanelQuery,
    *,
    width: int = 12,
    links: Sequence[PanelLink] = (),
) -> heatmap.Panel:
    """Return a histogram over time with single requests drawn on it."""
    target = _over_time(line).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(METRICS)
        .span(width)
        .height(8)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heat_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
        )
        .exemplars_color("rgba(255,0,255,0.7)")
        .data_links([link.link() for link in links])
        .with_target(target.ref_id("A"))
    )


def state_timeline(
    title: str, description: str, line: PanelQuery, labels: Mapping[str, tuple[str, str]]
) -> statetimeline.Panel:
    """Return states over time as bands.

    Args:
        title: its heading.
        description: its content.
        line: query with few distinct values.
        labels: text and colour by value.
    """
    options = {
        value: model.ValueMappingResult(text=label, color=color)
        for value, (label, color) in labels.items()
    }
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .unit("short")
        .datasource(METRICS)
        .span(12)
        .height(8)
        .mappings([model.ValueMap(options=options)])
        .show_value(shapes.VisibilityMode.NEVER)
        .with_target(_over_time(line).ref_id("A"))
    )


def traces(title: str, description: str, query: str, *, width: int = 12) -> table.Panel:
    """Return the traces that a TraceQL query finds, each with a link."""
    return (
        table.Panel()
        .title(title)
        .description(description)
        .unit("short")
        .datasource(TRACES)
        .span(width)
        .height(9)
        .with_target(
            tempo.TempoQuery()
            .datasource(TRACES)
            .query_type("traceql")
            .query(query)
            .limit(20)
            .table_type(SearchTableType.SPANS)
            .ref_id("A")
        )
    )


def text_panel(title: str, content: str, *, width: int = 24, height: int = 5) -> text.Panel:
    """Return a text panel."""
    return (
        text.Panel()
        .title(title)
        .description("What to do next.")
        .mode(TextMode.MARKDOWN)
        .content(content)
        .span(width)
        .height(height)
    )


def _over_time(line: PanelQuery) -> prometheus.Dataquery:
    query = prometheus.Dataquery().datasource(METRICS).expr(line.expr).range()
    return query.legend_format(line.legend).exemplar(line.exemplars)


def _at_once(line: PanelQuery) -> prometheus.Dataquery:
    query = prometheus.Dataquery().datasource(METRICS).expr(line.expr).instant()
    return query.legend_format(line.legend)


def _thresholds(limits: Limits) -> build.ThresholdsConfig:
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(list(limits))
