"""From a fault in a real engine to the one page that names it, and back to the request.

    engine ──rings──> collect ──scrape──> Prometheus, our rules ──> Alertmanager, our routes
       │                 └──OTLP──> traces <── exemplar <── dashboard <── page <───┘
       └────────── why <── request <───┘

A second engine has the same load, the same objective and the same rules, and no fault: of that one
no notification is sent. Windows are divided by SCALE; the times of engine and collector are not.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from inferscope_otlp import names

from inferscope.slo.rule_templates import HOUR_S
from tests import debian
from tests.children import child
from tests.cli.running import ROOT, inferscope
from tests.daemon.running import Collector, collecting, engine_by_hand, eventually
from tests.exporters.otlp.sink import Sink, receiving
from tests.telemetry.stack import Prometheus, Webhook, alertmanager, prometheus
from tests.telemetry.way import request_of

pytestmark = pytest.mark.thorough

ENGINE = ("-m", "inferscope.engine.start", "tests.telemetry.engine")
SCALE, SCRAPE_S, RATE_S = 75, 1.0, 3.0
LONG_S = HOUR_S / SCALE
"""The long window of the alert that pages first."""
FAULTY, CALM = "under-test", "beside-it"
MODELS = {FAULTY: "builtin", CALM: "calm"}
"""As they are served, by engine; it is the same model."""
THRESHOLD_S = 2.0
"""TTFT threshold: a hundred times the usual value here, for busy machines."""
OBJECTIVES = f"""
slos:
  - {{metric: ttft, threshold: {THRESHOLD_S:g}s, objective: 99%, window: 30d, model: builtin}}
  - {{metric: ttft, threshold: {THRESHOLD_S:g}s, objective: 99%, window: 30d, model: calm}}
  - {{metric: availability, objective: 99.9%, window: 30d}}
"""
FAST = "InferScopeBudgetBurnsFast"
GRAFANA = "https://grafana.example.org"
_CONFIG = """\
  otlp: {{endpoint: "{traces}", keep_share: 0}}
pins: off
slo: {slos}
"""
"""Configuration that keeps only traces of missed objectives."""
NUM_LOST = 7
"""Fewer than the floor of a page."""
TWO_SCRAPES_S = 30.0
"""As they are by default."""
BUSY_S = 120.0
"""For a hundred requests at once, on a machine that runs other tests meanwhile."""


class Engine:
    """The engine of engine.py, running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def wait(self) -> None:
        """Wait until its load has begun."""
        self._await_word("READY")

    def do(self, word: str) -> None:
        """Make it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        self._await_word("DONE")

    def _await_word(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word


@contextmanager
def running(rings: Path, name: str) -> Iterator[Engine]:
    """Run an engine for as long as the context lasts."""
    with child(
        [sys.executable, *ENGINE, str(RATE_S), MODELS[name]],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": name},
    ) as process:
        yield Engine(process)


@dataclass(frozen=True)
class Stack:
    """All of it, running."""

    rings: Path
    engine: Engine
    collector: Collector
    prometheus: Prometheus
    webhook: Webhook
    traces: Sink

    def requests(self, result: str, engine_id: str, slo: str = "ttft") -> float:
        """Return how many requests of an engine Prometheus knows as good or bad."""
        of = {"slo": slo, "result": result, "engine_id": engine_id}
        inner = ", ".join(f'{name}="{value}"' for name, value in of.items())
        return self.prometheus.number(f"sum(inferscope_slo_requests_total{{{inner}}})")


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """Run all of it for as long as the context lasts."""
    debian.program("prometheus")
    debian.alertmanager()
    rings, out, slos = folder / "rings", folder / "out", folder / "slo.yaml"
    slos.write_text(OBJECTIVES, encoding="utf-8")
    written = inferscope(
        *("slo", "rules", str(slos), "--out", str(out)),
        *("--scale", str(SCALE), "--scrape", str(SCRAPE_S), "--dashboards", GRAFANA),
        rings=rings,
    )
    assert written.returncode == 0, written.stderr
    with (
        receiving() as traces,
        Webhook() as webhook,
        alertmanager(folder, (out / "alertmanager.yaml").read_text(), webhook) as manager,
        collecting(rings, folder, _CONFIG.format(traces=traces.url, slos=slos)) as collector,
        prometheus(
            folder,
            out / "inferscope-rules.yaml",
            target=collector.url,
            manager=manager,
            scrape_s=SCRAPE_S,
        ) as scraping,
        running(rings, FAULTY) as faulty,
        running(rings, CALM) as calm,
    ):
        faulty.wait()
        calm.wait()
        yield Stack(rings, faulty, collector, scraping, webhook, traces)


@pytest.mark.timeout(300)
def test_a_breach_is_one_page_that_names_its_cause_and_leads_to_the_request(
    tmp_path: Path,
) -> None:
    with stack(tmp_path) as all_of_it, engine_by_hand(all_of_it.rings, "victim") as victim:
        # Without a fault: silence. No alert so much as waits for its time.
        began_s = time.monotonic()
        eventually(lambda: all(all_of_it.requests("good", it) >= 8 * RATE_S for it in MODELS))
        assert [all_of_it.requests("bad", it) for it in MODELS] == [0, 0]
        assert all_of_it.prometheus.ask("count_over_time(ALERTS[10m])") == []
        assert all_of_it.traces.spans() == []
        names_that_rules_ask_for(all_of_it, tmp_path / "out" / "inferscope-rules.yaml")

        victim.do(*(f"begin v{number}" for number in range(NUM_LOST)))
        running = 'sum(inferscope_requests_running{engine_id="victim"})'
        eventually(lambda: all_of_it.prometheus.number(running) == NUM_LOST)
        all_of_it.engine.do("hog")
        victim.process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()

        def lost() -> float:
            return all_of_it.requests("bad", "victim", "availability")

        eventually(lambda: lost() > 0)
        assert lost() == NUM_LOST
        assert time.monotonic() - killed_s < TWO_SCRAPES_S
        eventually(lambda: all_of_it.webhook.of("/page") != [])
        (page,) = all_of_it.webhook.of("/page")
        (alert,) = page.alerts
        assert alert["labels"] == {
            "alertname": FAST,
            "model": "builtin",
            "slo": "ttft",
            "severity": "page",
        }
        assert alert["annotations"]["cause"] == "queue"
        assert alert["annotations"]["worst_instance"].startswith(f"{FAULTY} at ")
        assert alert["annotations"]["command"] == f"inferscope findings {FAULTY}"

        # From the page to its dashboard, to a request that is drawn there, and to the fault.
        all_of_it.engine.do("free")
        shown = alert["annotations"]["dashboard_url"]
        assert shown.startswith(f"{GRAFANA}/d/")
        root = request_of(shown, all_of_it.prometheus, all_of_it.traces, scrape_s=SCRAPE_S)
        attributes = root.attributes
        assert attributes[f"{names.SLO}ttft"] == "bad"
        assert attributes[names.SLO_CAUSE] == "queue"
        engine_id = root.resource[names.SERVICE_INSTANCE_ID]
        asked = ("why", attributes[names.REQUEST_ID], engine_id, "--ttft", f"{THRESHOLD_S:g}s")
        done = inferscope(*asked, rings=all_of_it.rings)
        assert done.returncode == 0, done.stderr
        assert "Main cause: queue" in done.stdout, done.stdout

        # Another fault, from which more are late. It is the same page, now with the new cause.
        all_of_it.engine.do("late")
        all_of_it.engine.do("burst 120")
        eventually(
            lambda: [a["annotations"]["cause"] for a in alerts(all_of_it)] == ["output"],
            latest_s=BUSY_S,
        )
        assert len(all_of_it.webhook.of("/page")) == 1
        assert all_of_it.webhook.of("/page", "resolved") == []

        # The killed engine lost its requests in flight, which does not page.
        assert lost() == NUM_LOST
        assert all_of_it.requests("bad", FAULTY, "availability") == 0
        no_notification_of_the_other(all_of_it, since_s=began_s)


def no_notification_of_the_other(running: Stack, *, since_s: float) -> None:
    """Hold that the engine without a fault was silent, for longer than the long window."""
    eventually(lambda: time.monotonic() > since_s + LONG_S)
    time_s = time.monotonic() - since_s
    assert running.requests("good", CALM) > 0.7 * RATE_S * time_s
    assert running.requests("bad", CALM) == 0
    of = f'model="{MODELS[CALM]}"'
    silence = running.prometheus
    assert silence.ask(f'count_over_time(ALERTS{{{of}, alertstate="firing"}}[10m])') == []
    assert silence.ask(f'count_over_time(ALERTS{{{of}, slo!=""}}[10m])') == []
    assert MODELS[CALM] not in {
        at.get("model") for note in running.webhook.notes for at in note.labels
    }
    assert CALM not in {s.resource[names.SERVICE_INSTANCE_ID] for s in running.traces.spans()}


def alerts(running: Stack) -> list[dict[str, Any]]:
    return running.prometheus.alerts(FAST)


def names_that_rules_ask_for(running: Stack, rules: Path) -> None:
    """Hold that what the rules ask for is what the collector tells."""
    content = yaml.safe_load(rules.read_text(encoding="utf-8"))
    text = " ".join(rule["expr"] for group in content["groups"] for rule in group["rules"])
    asked = set(re.findall(r"(?<![:\w])inferscope_\w+(?![:\w])", text))
    assert len(asked) > 8
    names_found = {labels["__name__"] for labels, _ in running.prometheus.ask('{job="inferscope"}')}
    # There where engines count their own requests, and where they have several ranks.
    elsewhere = {"inferscope_attribution_coverage_ratio", "inferscope_rank_overdue_seconds"}
    assert asked - names_found <= elsewhere
