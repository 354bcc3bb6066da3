"""Every query of every panel, asked of a real Prometheus while real engines are under load."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.collecting.running import LATEST_S, collecting, eventually
from tests.dashboards import synthetic_gpu as made_up
from tests.dashboards.reading import Query, dashboards, queries
from tests.dashboards.server import Prometheus, prometheus

ASKED = [query for dashboard in dashboards().values() for query in queries(dashboard)]
NOT_EXPORTED = frozenset(
    f"inferscope_{name}"
    for name in (
        "attribution_coverage_ratio",
        "cost_dollars_total",
        "headroom_ratio",
        "predicted_queue_seconds",
        "queued_prompt_tokens",
        "spec_tokens_total",
        "tenant_gpu_seconds_total",
        "throttle_seconds_total",
        "xid_errors_total",
    )
)
"""Families that panels ask for and no exporter has yet: a name leaves this list as it appears."""
_OBJECTIVES = """
slos:
  - {metric: ttft, threshold: 20ms, objective: 90%, window: 30d}
  - {metric: tbt, threshold: 15ms, objective: 90%, window: 30d}
  - {metric: goodput, objective: 90%, window: 30d}
"""
"""That cannot be kept."""
_DECODE_BYTES_PER_S = made_up.BYTES_PER_S["decode"]
_VALUES = {"__rate_interval": "10s", "__range": "1m", "window": "7d", "engine": ".*", "model": ".*"}


def filled(expr: str) -> str:
    """Return a query with all of everything chosen."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: _VALUES.get(found[1], ".+"), expr)


@contextmanager
def load(rings: Path) -> Iterator[None]:
    """Run the reference engine under load, and one on a GPU that is made up."""
    settings = {
        "model": "builtin",
        "seed": 3,
        "duration_s": 300.0,
        "load": 0.3,
        "rate_s": 8.0,
        "client_times": None,
    }
    commands = (
        [sys.executable, "-m", "inferscope.cli.demo_start", json.dumps(settings)],
        [sys.executable, made_up.__file__, "made-up"],
    )
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "INFERSCOPE_DIR": str(rings),
                "INFERSCOPE_ENGINE_ID": f"engine-{at}",
            },
        )
        for at, command in enumerate(commands)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Collect, scrape, and wait until all queries have an answer, or for as long as one may."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not on PATH; Debian has it in the package prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    rings = folder / "rings"
    promised = folder / "slo.yaml"
    promised.write_text(_OBJECTIVES, encoding="utf-8")
    with load(rings), collecting(rings, folder, f"slo: {promised}\n") as collector:
        target = collector.url.removeprefix("http://").removesuffix("/metrics")
        with prometheus(program, folder, target) as found:
            end_s = time.monotonic() + LATEST_S
            while empty(found) and time.monotonic() < end_s:
                time.sleep(0.5)
            yield found


def answer(server: Prometheus, query: Query) -> list[float]:
    return server.ask(filled(query.expr), is_instant=query.is_instant)


def empty(server: Prometheus) -> list[str]:
    """Return the queries without an answer, of those that ask for what is exported."""
    return [
        str(query)
        for query in ASKED
        if not {each.name for each in query.selectors} & NOT_EXPORTED and not answer(server, query)
    ]


def test_no_panel_is_empty(server: Prometheus) -> None:
    assert empty(server) == []


def test_queries_for_what_is_not_exported_yet_are_promql_all_the_same(server: Prometheus) -> None:
    for query in ASKED:
        answer(server, query)


def test_what_is_said_not_to_be_exported_is_not(server: Prometheus) -> None:
    asked = {each.name for query in ASKED for each in query.selectors}
    assert asked >= NOT_EXPORTED
    assert not server.metrics() & NOT_EXPORTED


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
