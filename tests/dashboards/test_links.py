"""The ways from an alert to a request: each link leads to what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl

import pytest
from inferscope_otlp import names

from inferscope.records import CAUSES, FINISHES
from tests.dashboards.reading import (
    Json,
    dashboards,
    is_prometheus,
    panels,
    queries,
    selectors,
    variables,
)

ALL = dashboards()
_LABEL = {
    False: r"\$\{__field\.labels\.(\w+)\}",
    True: r"\$\{__data\.fields\.(\w+)\}",
}
"""Where Grafana has labels: those of a series, and columns of a table."""
ORDER = ("slo", "models", "phases", "gpus", "scheduler", "slow", "health")


def links(panel: Json) -> Iterator[str]:
    for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ()):
        yield link["url"]


def test_there_are_seven_and_their_titles_state_in_which_order_to_read_them() -> None:
    assert set(ALL) == {f"inferscope-{name}" for name in ORDER}
    titles = [ALL[f"inferscope-{name}"]["title"] for name in ORDER]
    assert titles == sorted(titles)


@pytest.mark.parametrize("uid", ALL)
def test_every_dashboard_leads_to_all_others_and_takes_time_and_variables_along(uid: str) -> None:
    (link,) = ALL[uid]["links"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
    assert all(set(link["tags"]) <= set(each["tags"]) for each in ALL.values())


@pytest.mark.parametrize("uid", ALL)
def test_links_of_series_lead_to_dashboards_with_their_variables_set(uid: str) -> None:
    for panel in panels(ALL[uid]):
        for url in links(panel):
            path, _, asked = url.partition("?")
            target = ALL[path.removeprefix("/d/")]
            assert "${__url_time_range}" in asked
            for name in re.findall(r"\$\{(\w+):queryparam\}", asked):
                assert name in variables(ALL[uid])
                assert name in variables(target)
            for variable, value in parse_qsl(asked):
                assert variable.removeprefix("var-") in variables(target)
                (label,) = re.fullmatch(_LABEL[panel["type"] == "table"], value).groups()
                for each in panel["targets"]:
                    kept = re.findall(r"by \(([\w, ]+)\)", each["expr"])
                    assert any(label in by.split(", ") for by in kept), each["expr"]


def test_from_the_first_dashboard_one_comes_to_every_other_by_series() -> None:
    reached, ways = {"inferscope-slo"}, ["inferscope-slo"]
    while ways:
        for panel in panels(ALL[ways.pop()]):
            for url in links(panel):
                uid = url.partition("?")[0].removeprefix("/d/")
                if uid not in reached:
                    reached.add(uid)
                    ways.append(uid)
    assert reached == set(ALL)


@pytest.mark.parametrize("uid", ALL)
def test_alerts_that_fire_and_blindness_are_marked_on_every_dashboard(uid: str) -> None:
    expressions = [each["expr"] for each in ALL[uid]["annotations"]["list"]]
    assert any('alertname=~"InferScope.+"' in expr for expr in expressions)
    assert any("attribution_coverage_ratio" in expr and "< 0.95" in expr for expr in expressions)


def test_slow_percentiles_show_requests_and_their_traces() -> None:
    shown = {
        selector.name
        for dashboard in ALL.values()
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
        if target.get("exemplar")
        for selector in selectors(target["expr"])
    }
    for what in ("time_to_first_token", "time_between_tokens", "request_duration", "request_queue"):
        assert f"inferscope_{what}_seconds_bucket" in shown


def test_searches_for_traces_ask_for_attributes_that_we_write() -> None:
    written = {value for value in vars(names).values() if isinstance(value, str)}
    written |= {f"{names.SLO}{what}" for what in ("ttft", "tbt")}
    asked = [
        target["query"]
        for dashboard in ALL.values()
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
        if not is_prometheus(target)
    ]
    assert len(asked) >= 3
    for query in asked:
        attributes = re.findall(r"\b(?:span|resource)\.([\w.]+)", query)
        assert attributes
        assert set(attributes) <= written
        assert query.count("{") == query.count("}") == 1


def test_words_in_matchers_are_words_of_the_records() -> None:
    known = {"cause": CAUSES, "finish_reason": FINISHES}
    for dashboard in ALL.values():
        for query in queries(dashboard):
            for selector in query.selectors:
                for label in known.keys() & selector.matchers.keys():
                    _, value = selector.matchers[label]
                    for word in re.split(r"\|(?![^(]*\))", value):
                        assert any(re.fullmatch(word, each) for each in known[label]), word
