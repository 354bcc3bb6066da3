"""The dashboards keep the rules, and the rules notice when they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.dashboards.lint import RULES, complaints
from tests.dashboards.reading import Json, dashboards, panels, variables

ALL = dashboards()


@pytest.mark.parametrize("uid", ALL)
def test_nothing_is_wrong_with(uid: str) -> None:
    assert complaints(ALL[uid]) == []


def rename_source(dashboard: Json) -> None:
    variables(dashboard)["prometheus_datasource"]["name"] = "ds"


def drop_all(dashboard: Json) -> None:
    variables(dashboard)["instance"]["allValue"] = ""


def ask_once(dashboard: Json) -> None:
    variables(dashboard)["engine"]["refresh"] = 1


def drop_description(dashboard: Json) -> None:
    del panels(dashboard)[0]["description"]


def invent_unit(dashboard: Json) -> None:
    panels(dashboard)[0]["fieldConfig"]["defaults"]["unit"] = "bananas"


def mistake_unit(dashboard: Json) -> None:
    (panel,) = (each for each in panels(dashboard) if each["title"] == "Predicted wait")
    panel["fieldConfig"]["defaults"]["unit"] = "short"


def fix_source(dashboard: Json) -> None:
    panels(dashboard)[0]["targets"][0]["datasource"]["uid"] = "P1234"


def fix_interval(dashboard: Json) -> None:
    _change(dashboard, "rate(", lambda expr: expr.replace("$__rate_interval", "5m"))


def drop_rate(dashboard: Json) -> None:
    _change(dashboard, "rate(", lambda _: 'inferscope_tokens_total{job=~"$job"}')


def make_up_zero(dashboard: Json) -> None:
    _change(dashboard, "rate(", lambda expr: f"{expr} or vector(0)")


def drop_job(dashboard: Json) -> None:
    _change(dashboard, "$job", lambda expr: expr.replace('job=~"$job", ', ""))


def drop_braces(dashboard: Json) -> None:
    _change(dashboard, "{", lambda _: "sum (inferscope_requests_running)")


def unlock(dashboard: Json) -> None:
    dashboard["editable"] = True


def mistype_variable(dashboard: Json) -> None:
    _change(dashboard, "$model", lambda expr: expr.replace("$model", "$modle"))


def overlap(dashboard: Json) -> None:
    panels(dashboard)[1]["gridPos"]["x"] = 0


def leave_hole(dashboard: Json) -> None:
    dashboard["panels"].remove(panels(dashboard)[0])


def _change(dashboard: Json, holds: str, change: Callable[[str], str]) -> None:
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            if holds in target.get("expr", ""):
                target["expr"] = change(target["expr"])
                return
    raise AssertionError(f"no query holds {holds}")


FAULTS = {
    rename_source: "datasource_variables",
    drop_all: "job_and_instance",
    ask_once: "label_queries",
    drop_description: "panel_words",
    invent_unit: "panel_units",
    mistake_unit: "metric_units",
    fix_source: "panel_sources",
    fix_interval: "rate_interval",
    drop_rate: "counters_are_rates",
    make_up_zero: "answers_come_from_series",
    drop_job: "every_selector_obeys",
    drop_braces: "every_selector_obeys",
    unlock: "is_read_only",
    mistype_variable: "known_variables",
    overlap: "whole_grid",
    leave_hole: "whole_grid",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed_by_its_rule(fault: Callable[[Json], None]) -> None:
    broken = copy.deepcopy(ALL["inferscope-scheduler"])
    fault(broken)
    assert FAULTS[fault] in {complaint.split(": ")[1] for complaint in complaints(broken)}


def test_every_rule_has_a_fault_that_it_notices() -> None:
    assert {rule.__name__ for rule in RULES} == set(FAULTS.values())
