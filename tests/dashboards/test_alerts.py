"""An alert leads to a dashboard that there is, which is marked while the alert fires."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from inferscope.slo.objectives import Objective, Objectives
from inferscope.slo.rules import RuleOptions, rule_file
from tests.dashboards.reading import dashboards, variables

GRAFANA = "https://grafana.example.org"


def test_every_alert_leads_to_a_dashboard_and_sets_its_variables() -> None:
    promised = Objectives(
        (
            Objective("ttft", "ttft", 500_000_000, 0.99, 30 * 86400 * 10**9),
            Objective("goodput", "goodput", None, 0.95, 30 * 86400 * 10**9),
        )
    )
    file = rule_file(promised, RuleOptions(dashboards=GRAFANA))
    alerts = [rule for group in file["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        url = urlsplit(re.sub(r"\{\{.*?\}\}", "chosen", alert["annotations"]["dashboard_url"]))
        shown = dashboards()[url.path.removeprefix("/d/")]
        assert f"{url.scheme}://{url.netloc}" == GRAFANA
        for name, value in parse_qsl(url.query):
            assert name.removeprefix("var-") in variables(shown)
            assert value == "chosen"
        marks = [each["expr"] for each in shown["annotations"]["list"]]
        (pattern,) = re.findall(r'alertname=~"([^"]+)"', " ".join(marks))
        assert re.fullmatch(pattern, alert["alert"])
