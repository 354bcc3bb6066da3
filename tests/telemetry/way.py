"""The way from a page to a request, followed as the engineer on call would.

    alert ──dashboard_url──> dashboard ──its graphs──> dots ──trace_id──> trace ──> request, engine

Each step takes only what the one before it shows: the link of the alert, the files that Grafana
imports and is provisioned with, what Prometheus answers, what a receiver of traces was sent.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import yaml
from inferscope_otlp import names

from tests.daemon.running import eventually
from tests.dashboards.reading import Json, dashboards, is_prometheus, panels, variables
from tests.exporters.otlp.sink import Received, Sink
from tests.telemetry.stack import Dot, Prometheus

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "dashboards" / "provisioning" / "datasources" / "inferscope.yaml"


def request_of(url: str, prometheus: Prometheus, traces: Sink, *, scrape_s: float) -> Received:
    """Walk from an alert's link to the slowest request shown there; return its trace's root.

    Args:
        url: of the dashboard, as the alert has it.
        prometheus: what Grafana asks.
        traces: what took the traces, in place of a Tempo.
        scrape_s: between two scrapes.
    """
    queries = drawn_with_dots(url, scrape_s=scrape_s)
    found: list[Dot] = []

    def is_drawn() -> bool:
        found[:] = [dot for query in queries for dot in prometheus.dots(query)]
        return bool(found)

    eventually(is_drawn)
    slowest = max(found, key=lambda dot: dot.value)
    trace_id = slowest.labels[trace_label()]

    def roots() -> list[Received]:
        return [root for root in traces.roots() if root.span.trace_id.hex() == trace_id]

    # A dot may be seen a moment before the batch of traces that it is in has arrived.
    eventually(lambda: roots() != [])
    (root,) = roots()
    children = {child.name for child in traces.children(root)}
    assert {names.SPAN_QUEUE, names.SPAN_PREFILL} <= children
    return root


def drawn_with_dots(url: str, *, scrape_s: float) -> list[str]:
    """Return the queries of a dashboard's graphs that show exemplars, its variables filled in."""
    address = urlsplit(url)
    shown = dashboards()[address.path.removeprefix("/d/")]
    chosen = {name: _unchosen(each) for name, each in variables(shown).items()}
    for name, value in parse_qsl(address.query, strict_parsing=True):
        assert name.removeprefix("var-") in chosen
        chosen[name.removeprefix("var-")] = value
    chosen["__rate_interval"] = f"{round(4 * scrape_s * 1000)}ms"
    return [
        re.sub(r"\$\{?(\w+)\}?", lambda found: chosen[found[1]], target["expr"])
        for panel in panels(shown)
        for target in panel.get("targets", ())
        if is_prometheus(target) and target.get("exemplar")
    ]


def _unchosen(variable: Json) -> str:
    """Return a variable's default value."""
    return str(variable["allValue"] if variable.get("includeAll") else variable.get("query"))


def trace_label() -> str:
    """Return the label of an exemplar that leads to its trace, as Grafana is provisioned."""
    sources = yaml.safe_load(SOURCES.read_text(encoding="utf-8"))["datasources"]
    (metrics,) = [source for source in sources if source["type"] == "prometheus"]
    (way,) = metrics["jsonData"]["exemplarTraceIdDestinations"]
    assert way["datasourceUid"] in {s["uid"] for s in sources if s["type"] == "tempo"}
    return str(way["name"])
