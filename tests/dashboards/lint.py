"""The rules of Grafana's public dashboard-linter, and a few of ours: complaints, one line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.dashboards.reading import Json, is_prometheus, panels, queries, variables

UNITS = frozenset(
    {
        *("short", "percentunit", "s", "reqps", "ops", "bytes", "Bps", "flops"),
        *("watt", "joule", "currencyUSD"),
    }
)
"""Those of Grafana's that we have a use for."""
SOURCES = {
    "prometheus": ("prometheus_datasource", "Prometheus data source"),
    "tempo": ("tempo_datasource", "Tempo data source"),
}
_METRIC_UNITS = {
    "seconds": "s",
    "ratio": "percentunit",
    "ratio_at_size": "percentunit",
    "bytes": "bytes",
    "bytes_per_second": "Bps",
    "flops_per_second": "flops",
}
"""Units of panels by the end of a metric's name; other metrics are counts."""
_PLAIN = re.compile(
    r"(?:histogram_quantile\([\d.]+, )?(?:\w+(?: by \([^()]*\))? )?"
    r"\(*(?:rate\()?inferscope_(\w+?)(?:_bucket)?\{[^{}]*\}(?:\[[^\]]*\])?\)*"
)
"""A gauge, or a quantile of a histogram, neither scaled nor divided."""
_COUNTERS = ("_total", "_count", "_sum", "_bucket")
_RATES = ("rate", "irate", "increase")
_WITHOUT_QUERY = ("text",)


def complaints(dashboard: Json) -> list[str]:
    """Return what is wrong with a dashboard."""
    return [
        f"{dashboard['uid']}: {rule.__name__}: {complaint}"
        for rule in RULES
        for complaint in rule(dashboard)
    ]


def datasource_variables(dashboard: Json) -> Iterator[str]:
    """Data sources are variables, and called what everybody calls them."""
    sources = [each for each in variables(dashboard).values() if each["type"] == "datasource"]
    if not sources or sources[0]["query"] != "prometheus":
        yield "the first variable is no Prometheus data source"
    for each in sources:
        if (each["name"], each["label"]) != SOURCES[each["query"]]:
            yield f"{each['name']} ({each['label']}) is no name for {each['query']}"


def job_and_instance(dashboard: Json) -> Iterator[str]:
    """Both can be chosen: several, or all."""
    for name in ("job", "instance"):
        found = variables(dashboard).get(name)
        if found is None:
            yield f"no variable {name}"
            continue
        if found["type"] != "query" or found["label"] != name.title():
            yield f"{name} is no query labelled {name.title()}"
        if not found["multi"] or found["allValue"] != ".+":
            yield f"{name} does not take several, or all"
        if found["datasource"]["uid"] != "${prometheus_datasource}":
            yield f"{name} asks a data source of its own"


def label_queries(dashboard: Json) -> Iterator[str]:
    """Variables ask for a label's values, again when the time changes."""
    for name, each in variables(dashboard).items():
        if each["type"] != "query":
            continue
        if not re.fullmatch(r"label_values\([a-z_]+(\{[^{}]*\})?, \w+\)", each["query"]):
            yield f"{name} asks {each['query']}"
        if not each["includeAll"] or each["current"].get("value") != "$__all":
            yield f"{name} does not begin with all"
        if each["refresh"] != 2:
            yield f"{name} is not asked again when the time changes"


def panel_words(dashboard: Json) -> Iterator[str]:
    """Panels have a title and a description, which differ."""
    for panel in panels(dashboard):
        if not panel.get("title") or not panel.get("description"):
            yield f"panel {panel['id']} has no title or no description"


def panel_units(dashboard: Json) -> Iterator[str]:
    """Panels with figures have a unit, one that is used here for a reason."""
    for panel in panels(dashboard):
        if panel["type"] in _WITHOUT_QUERY:
            continue
        config = panel["fieldConfig"]
        units = [config["defaults"].get("unit", "")]
        units += [
            each["value"]
            for override in config["overrides"]
            for each in override["properties"]
            if each["id"] == "unit"
        ]
        for unit in units:
            if unit not in UNITS:
                yield f"{panel['title']} has the unit {unit!r}"


def metric_units(dashboard: Json) -> Iterator[str]:
    """A panel of plain metrics has their unit; a table has one for each column."""
    for panel in panels(dashboard):
        if panel["type"] == "table":
            continue
        for target in panel.get("targets", ()):
            plain = _PLAIN.fullmatch(target.get("expr", ""))
            if plain is None or plain[1].endswith(("_total", "_count")):
                continue
            ends = [end for end in _METRIC_UNITS if plain[1].endswith(f"_{end}")]
            unit = _METRIC_UNITS[max(ends, key=len)] if ends else "short"
            if panel["fieldConfig"]["defaults"]["unit"] != unit:
                yield f"{panel['title']} is not in {unit}, as {plain[1]} is"


def panel_sources(dashboard: Json) -> Iterator[str]:
    """Panels and their queries use a data source that can be chosen, and ask something."""
    known = {f"${{{each}}}" for each in variables(dashboard) if each.endswith("_datasource")}
    for panel in panels(dashboard):
        if panel["type"] in _WITHOUT_QUERY:
            continue
        if not panel.get("targets"):
            yield f"{panel['title']} asks nothing"
        for each in (panel, *panel.get("targets", ())):
            if each.get("datasource", {}).get("uid") not in known:
                yield f"{panel['title']} has a data source that cannot be chosen"
        for target in panel.get("targets", ()):
            if not target.get("expr" if is_prometheus(target) else "query"):
                yield f"{panel['title']} has an empty query"


def rate_interval(dashboard: Json) -> Iterator[str]:
    """Rates are over what Grafana knows to hold four scrapes; growth may be over any window."""
    for query in queries(dashboard):
        for each in query.selectors:
            if each.function in ("rate", "irate") and each.range != "$__rate_interval":
                yield f"a rate over {each.range}: {query}"
            if each.range and each.function not in _RATES:
                yield f"a range without a rate: {query}"


def counters_are_rates(dashboard: Json) -> Iterator[str]:
    """What only grows means nothing as it stands."""
    for query in queries(dashboard):
        for each in query.selectors:
            if each.name.endswith(_COUNTERS) and each.function not in _RATES:
                yield f"{each.name} as it stands: {query}"


def answers_come_from_series(dashboard: Json) -> Iterator[str]:
    """One that ends in `or vector(0)` claims a zero where nothing is known, and is never empty."""
    for query in queries(dashboard):
        if re.search(r"\b(vector|absent|absent_over_time)\s*\(", query.expr):
            yield f"an answer without data: {query}"


def every_selector_obeys(dashboard: Json) -> Iterator[str]:
    """Job and instance hold everywhere; our own series have braces, so none escapes this rule."""
    for query in queries(dashboard):
        for each in query.selectors:
            for label in ("job", "instance"):
                if each.matchers.get(label) != ("=~", f"${label}"):
                    yield f"{each.name} without {label}: {query}"
        for bare in re.findall(r"\b(?:inferscope_\w+|up|scrape_\w+)\b(?!\{)", query.expr):
            yield f"{bare} without matchers: {query}"


def is_read_only(dashboard: Json) -> Iterator[str]:
    """They are generated: an edit would be lost."""
    if dashboard["editable"]:
        yield "is editable"


def known_variables(dashboard: Json) -> Iterator[str]:
    """Queries use variables that there are."""
    known = set(variables(dashboard)) | {"__rate_interval", "__range"}
    for query in queries(dashboard):
        for name in re.findall(r"\$\{?(\w+)", query.expr):
            if name not in known:
                yield f"${name} is no variable: {query}"


def whole_grid(dashboard: Json) -> Iterator[str]:
    """Panels have ids of their own, do not lie on each other, and fill their rows."""
    seen: dict[tuple[int, int], str] = {}
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        yield "two panels have one id"
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        if at["x"] + at["w"] > 24:
            yield f"{panel['title']} is beyond the edge"
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if (x, y) in seen:
                    yield f"{panel['title']} lies on {seen[x, y]}"
                    break
                seen[x, y] = panel["title"]
    height = max(y for _, y in seen) + 1
    if len(seen) != 24 * height:
        yield "there are holes"


RULES: tuple[Callable[[Json], Iterator[str]], ...] = (
    datasource_variables,
    job_and_instance,
    label_queries,
    panel_words,
    panel_units,
    metric_units,
    panel_sources,
    rate_interval,
    counters_are_rates,
    answers_come_from_series,
    every_selector_obeys,
    is_read_only,
    known_variables,
    whole_grid,
)
