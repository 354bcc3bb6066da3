"""Dashboards as Grafana reads them: from the JSON that is checked in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dashboards" / "grafana"
Json = dict[str, Any]

_SELECTOR = re.compile(
    r"(?:(?P<function>\w+)\()?(?P<name>[a-zA-Z_:][\w:]*)\{(?P<matchers>[^{}]*)\}(?P<range>\[[^\]]*\])?"
)
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


@dataclass(frozen=True)
class Selector:
    """One selector of a query.

    Attributes:
        name: the metric's.
        matchers: operator and value by label.
        range: in brackets, as it stands there; empty for none.
        function: that is called on it alone; empty for none.
    """

    name: str
    matchers: dict[str, tuple[str, str]]
    range: str
    function: str


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    dashboard: str
    panel: str
    expr: str
    is_instant: bool

    def __str__(self) -> str:
        return f"{self.dashboard}, {self.panel}: {self.expr}"

    @property
    def selectors(self) -> list[Selector]:
        return selectors(self.expr)


def selectors(expr: str) -> list[Selector]:
    """Return a query's selectors; each has braces."""
    return [
        Selector(
            found["name"],
            {label: (how, value) for label, how, value in _MATCHER.findall(found["matchers"])},
            (found["range"] or "").strip("[]"),
            found["function"] or "",
        )
        for found in _SELECTOR.finditer(expr)
    ]


def dashboards() -> dict[str, Json]:
    """Return all, by unique id."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]
    return {each["uid"]: each for each in found}


def panels(dashboard: Json) -> list[Json]:
    """Return the panels without the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def variables(dashboard: Json) -> dict[str, Json]:
    """Return the variables, by name."""
    return {each["name"]: each for each in dashboard["templating"]["list"]}


def is_prometheus(target: Json) -> bool:
    """Return whether a query is for Prometheus."""
    return bool(target["datasource"]["type"] == "prometheus")


def queries(dashboard: Json) -> Iterator[Query]:
    """Return the queries for Prometheus."""
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            if is_prometheus(target):
                is_instant = bool(target.get("instant"))
                yield Query(dashboard["uid"], panel["title"], target["expr"], is_instant)
