"""Parts of rules besides their expressions: durations, links and templates with queries."""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]
"""One rule as in Prometheus' file."""

FIVE_MINUTES_S, HOUR_S, DAY_S = 300.0, 3600.0, 86400.0
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000}


class TimeScale:
    """Durations in Prometheus' notation, divided by a factor."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def span(self, span_s: float) -> str:
        """Return a duration, such as 5m, 90s or 83ms."""
        span_ms = max(1, round(self.seconds(span_s) * 1000))
        for unit, unit_ms in _UNITS_MS.items():
            if span_ms % unit_ms == 0:
                return f"{span_ms // unit_ms}{unit}"
        return f"{span_ms}ms"

    def rescaled(self, span: str) -> str:
        """Return a duration in Prometheus' notation, such as 10m, divided by the factor."""
        return self.span(int(span[:-1]) * _UNITS_MS[span[-1]] / 1000)

    def seconds(self, span_s: float) -> float:
        """Return a duration in seconds."""
        return span_s / self._scale


def of_model(vector: str) -> str:
    """Return a vector with its label `model_name` as the label `model` too."""
    return f'label_replace({vector}, "model", "$1", "model_name", "(.*)")'


class Annotations:
    """Annotations of alerts: links, and templates whose queries run when the alert fires."""

    def __init__(
        self, *, runbooks: str, dashboards: str | None, time: TimeScale, scrape_s: float
    ) -> None:
        """Keep the addresses of runbooks and dashboards, and the time scale of the rules."""
        self.runbooks = runbooks.rstrip("/")
        self.dashboards = None if dashboards is None else dashboards.rstrip("/")
        self.time = time
        self.scrape_s = scrape_s

    def links(self, runbook: str, dashboard: str) -> dict[str, str]:
        """Return links to a runbook, by its page, and a dashboard, by its UID."""
        links = {"runbook_url": f"{self.runbooks}/{runbook}.md"}
        if self.dashboards is not None:
            links["dashboard_url"] = (
                f"{self.dashboards}/d/{dashboard}?var-model={{{{ $labels.model | urlquery }}}}"
            )
        return links


def query_template(query: str, *names: str, shows: str, otherwise: str) -> str:
    """Return a template that shows the first result of a query.

    Args:
        query: with %q for each name.
        names: labels of the alert.
        shows: template for the sample found.
        otherwise: text without a result.
    """
    of = "".join(f" $labels.{name}" for name in names)
    # The query is in a raw string of the template language: it may hold any quotes.
    found = (
        f"{{{{ with printf `{query}`{of} | query }}}}{{{{ with . | first }}}}{shows}{{{{ end }}}}"
    )
    return f"{found}{{{{ else }}}}{otherwise}{{{{ end }}}}"
