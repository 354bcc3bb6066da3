"""Every query of every panel, asked of a real Prometheus while real engines are under load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests import debian
from tests.children import child
from tests.daemon.running import LATEST_S, collecting, eventually
from tests.dashboards import synthetic_gpu as made_up
from tests.dashboards.reading import Query, dashboards, panels, queries
from tests.dashboards.server import Prometheus, prometheus

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
ASKED = [query for dashboard in dashboards().values() for query in queries(dashboard)]
_SETTINGS = (
    "port: 0, price_per_gpu_hour: 2.5, tenants: [one, two], "
    'engine_metrics: {reference: "http://127.0.0.1:1", "*": "%s"}'  # whatever the other is called
)
_OBJECTIVES = """
slos:
  - {metric: ttft, threshold: 20ms, objective: 99%, window: 30d}
  - {metric: tbt, threshold: 15ms, objective: 90%, window: 30d}
  - {metric: goodput, objective: 90%, window: 30d}
  - {metric: availability, objective: 99%, window: 30d}
"""
"""Objectives: all but the last are unattainable."""
_DECODE_BYTES_PER_S = made_up.BYTES_PER_S["decode"]
_VALUES = {
    "__rate_interval": "10s",
    "__range": "1m",
    "window": "30d",
    "engine": ".*",
    "model": ".*",
}


def filled(expr: str, **chosen: str) -> str:
    """Return a query with all of everything chosen, unless something is."""
    values = {**_VALUES, **chosen}
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], ".+"), expr)


@contextmanager
def load(rings: Path) -> Iterator[str]:
    """Run the reference engine under load, and one on a GPU that is made up, which has a page."""
    settings = {
        "model": "builtin",
        "seed": 3,
        "duration_s": 300.0,
        "load": 0.3,
        "rate_s": 4.0,
        "client_times": None,
        "options": {"token_budget": 40, "max_running": 16, "num_blocks": 144},
    }
    commands = {
        "reference": ["inferscope.cli.demo.start", json.dumps({"type": "Settings", **settings})],
        "made-up": [made_up.__name__, "made-up"],
    }
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(
                child(
                    [sys.executable, "-m", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": name},
                )
            )
            for name, command in commands.items()
        }
        output = running["made-up"].stdout
        assert output is not None
        yield output.readline().strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Collect, scrape, and wait until all queries have an answer, or for as long as one may."""
    program = debian.program("prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    rings = folder / "rings"
    promised = folder / "slo.yaml"
    promised.write_text(_OBJECTIVES, encoding="utf-8")
    config = f"slo: {promised}\n"
    with (
        load(rings) as page,
        collecting(rings, folder, config, prometheus=_SETTINGS % page) as collector,
    ):
        target = collector.url.removeprefix("http://").removesuffix("/metrics")
        with prometheus(program, folder, target) as found:
            end_s = time.monotonic() + LATEST_S
            left = ASKED
            while time.monotonic() < end_s and (left := empty(found, left)):
                time.sleep(1.0)
            yield found


def answer(server: Prometheus, query: Query) -> list[float]:
    return server.ask(filled(query.expr), is_instant=query.is_instant)


def empty(server: Prometheus, asked: list[Query]) -> list[Query]:
    """Return the queries without an answer."""
    return [query for query in asked if not answer(server, query)]


def test_no_panel_is_empty(server: Prometheus) -> None:
    assert [str(query) for query in empty(server, ASKED)] == []


def test_the_budget_shown_is_the_one_that_is_promised(server: Prometheus) -> None:
    """The ratio of the only collector is equal: over each objective's window."""
    (query,) = [query for query in ASKED if query.panel == "Remaining budget"]
    shown, by = filled(query.expr), "model_name, slo"
    budget = f"max by ({by}) (inferscope_slo_budget_remaining_ratio)"

    def is_so() -> bool:
        # Where engines of a model are there and have requests, three objectives of each.
        apart = server.ask(f"abs(({shown}) - on ({by}) ({budget}))", is_instant=True)
        return len(apart) >= 3 and max(apart) < 1e-9

    eventually(is_so)
    assert min(server.ask(shown, is_instant=True)) < 1.0


def test_budgets_that_burn_are_counted_and_those_that_do_not_are_zero(server: Prometheus) -> None:
    (query,) = [query for query in ASKED if query.panel == "Burning fast"]

    def of(slo: str) -> list[float]:
        return server.ask(filled(query.expr, slo=slo), is_instant=True)

    eventually(lambda: sum(of("ttft")) >= 1)
    assert of("availability") == [0]
    assert of("nothing like it") == []


@pytest.mark.parametrize("uid", dashboards())
def test_marks_on_graphs_are_promql(server: Prometheus, uid: str) -> None:
    for mark in dashboards()[uid]["annotations"]["list"]:
        server.ask(filled(mark["expr"]), is_instant=False)


@pytest.mark.parametrize(
    ("panel", "phase", "figure"),
    [
        ("SMs active while in a phase", "prefill", made_up.SM_SHARE["prefill"]),
        ("SMs active while in a phase", "decode", made_up.SM_SHARE["decode"]),
        ("Share of the memory roofline", "decode", _DECODE_BYTES_PER_S / made_up.PEAK_BYTES_PER_S),
        ("Memory traffic while in a phase", "decode", _DECODE_BYTES_PER_S),
    ],
)
def test_an_engine_that_is_not_counted_dilutes_no_figure_of_one_that_is(
    server: Prometheus, panel: str, phase: str, figure: float
) -> None:
    (query,) = [query for query in ASKED if query.panel == panel]
    of_phase = f"sum by (phase) ({filled(query.expr)})"
    this_one = f'label_replace(vector(1), "phase", "{phase}", "", "")'

    def is_so() -> bool:
        numbers = server.ask(f"{of_phase} and on (phase) {this_one}", is_instant=True)
        return numbers == [pytest.approx(figure, rel=0.25)]

    eventually(is_so)


def columns(panel: str) -> dict[str, str]:
    """Return a table's queries by their headings."""
    (table,) = [
        each
        for dashboard in dashboards().values()
        for each in panels(dashboard)
        if each["title"] == panel
    ]
    headings = table["transformations"][1]["options"]["renameByName"]
    asked = {f"Value #{target['refId']}": target["expr"] for target in table["targets"]}
    return {heading: filled(asked[value]) for value, heading in headings.items()}


def test_what_is_allocated_to_tenants_is_what_the_devices_cost(server: Prometheus) -> None:
    by_tenant, by_model = (columns(f"Token cost by {what}") for what in ("tenant", "model"))
    dollars = filled('inferscope_cost_dollars_total{job=~"$job"}')
    whole = f"sum (increase({dollars}[{_VALUES['__range']}]))"
    used = f"sum ({by_tenant['used']})"

    def ratio(one: str, other: str) -> list[float]:
        return server.ask(f"{one} / {other}", is_instant=True)

    def are_all() -> bool:
        return all(
            ratio(f"sum ({table[heading]})", of) == [pytest.approx(1.0)]
            for table in (by_tenant, by_model)
            for heading, of in (("allocated", whole), ("used", used))
        )

    eventually(are_all)
    (part,) = ratio(used, whole)
    assert 0.1 < part < 0.99


def test_prices_times_tokens_are_the_dollars(server: Prometheus) -> None:
    asked = columns("Token cost by tenant")
    of_tenant = 'sum by (tenant) (increase(inferscope_tenant_tokens_total{kind=~"%s"}[1m]))'
    for heading in ("used", "allocated"):
        paid = " + ".join(
            f"({asked[f'{kind}, {heading}']}) * {of_tenant % kinds} / 1e6"
            for kind, kinds in (("input or cached", "input|cached"), ("output", "output"))
        )
        one = 'label_replace(vector(1), "tenant", "two", "", "")'
        ratio = f"(({paid}) / {asked[heading]}) and on (tenant) {one}"
        eventually(partial(is_one, server, ratio))


def is_one(server: Prometheus, expr: str) -> bool:
    return server.ask(expr, is_instant=True) == [pytest.approx(1.0)]


def test_cached_tokens_make_a_prompt_s_tokens_cheaper(server: Prometheus) -> None:
    asked = columns("Token cost by tenant")
    ratio = f"({asked['input or cached, used']}) / ({asked['input, used']})"
    one = 'label_replace(vector(1), "tenant", "two", "", "")'

    def is_cheaper() -> bool:
        (found,) = server.ask(f"({ratio}) and on (tenant) {one}", is_instant=True)
        # Who was preempted found nothing in the cache when coming back.
        return 1 - made_up.CACHED / made_up.PROMPT - 1e-6 < found < 0.95

    eventually(is_cheaper)
