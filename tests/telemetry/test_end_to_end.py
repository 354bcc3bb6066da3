"""From a fault in a real engine to the one page that names it, and back to the request.

    engine ──rings──> collect ──scrape──> Prometheus, our rules ──> Alertmanager, our routes
       └───────────────────── why <── the engine that it names <── page <───┘

Windows are a sixtieth of what they are in production; what an engine and a collector need is not.
"""

from __future__ import annotations

import json
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

from tests import debian
from tests.cli.running import inferscope
from tests.collecting.running import Collector, collecting, engine_by_hand, eventually
from tests.telemetry.stack import Prometheus, Webhook, alertmanager, prometheus

ENGINE = Path(__file__).with_name("engine.py")
SCALE, SCRAPE_S, RATE_S = 60, 1.0, 3.0
THRESHOLD_S = 2.0
"""Of a first token: a hundred times of what it takes here, for machines that are busy."""
OBJECTIVES = f"""
slos:
  - {{metric: ttft, threshold: {THRESHOLD_S:g}s, objective: 99%, window: 30d, model: builtin}}
  - {{metric: availability, objective: 99.9%, window: 30d}}
"""
FAST = "InferScopeBudgetBurnsFast"
NUM_LOST = 7
"""Fewer than the floor of a page."""
TWO_SCRAPES_S = 30.0
"""As they are by default."""
BUSY_S = 120.0
"""For a hundred requests at once, on a machine that runs other tests meanwhile."""


class Engine:
    """The engine of engine.py, running."""

    def __init__(self, rings: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ENGINE), str(RATE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": "under-test"},
        )
        self._hear("READY")

    def do(self, word: str) -> None:
        """Make it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        self._hear("DONE")

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Stack:
    """All of it, running."""

    rings: Path
    engine: Engine
    collector: Collector
    prometheus: Prometheus
    webhook: Webhook

    def requests(self, result: str, slo: str = "ttft", **labels: str) -> float:
        """Return how many requests Prometheus knows as good or bad."""
        of = {"slo": slo, "result": result, **labels}
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
        *("--scale", str(SCALE), "--scrape", str(SCRAPE_S)),
        rings=rings,
    )
    assert written.returncode == 0, written.stderr
    config = f"pins: off\nslo: {slos}\n"
    with (
        Webhook() as webhook,
        alertmanager(folder, (out / "alertmanager.yaml").read_text(), webhook) as manager,
        collecting(rings, folder, config) as collector,
        prometheus(
            folder,
            out / "inferscope-rules.yaml",
            target=collector.url,
            manager=manager,
            scrape_s=SCRAPE_S,
        ) as scraping,
    ):
        engine = Engine(rings)
        try:
            yield Stack(rings, engine, collector, scraping, webhook)
        finally:
            engine.close()


@pytest.mark.timeout(300)
def test_a_breach_is_one_page_that_names_its_cause_and_leads_to_the_request(
    tmp_path: Path,
) -> None:
    with stack(tmp_path) as all_of_it, engine_by_hand(all_of_it.rings, "victim") as victim:
        # Without a fault: silence. No alert so much as waits for its time.
        eventually(lambda: all_of_it.requests("good") >= 8 * RATE_S)
        assert all_of_it.requests("bad") == 0
        assert all_of_it.prometheus.ask("count_over_time(ALERTS[10m])") == []
        names_that_rules_ask_for(all_of_it, tmp_path / "out" / "inferscope-rules.yaml")

        victim.do(*(f"begin v{number}" for number in range(NUM_LOST)))
        running = 'sum(inferscope_requests_running{engine_id="victim"})'
        eventually(lambda: all_of_it.prometheus.number(running) == NUM_LOST)
        all_of_it.engine.do("hog")
        victim.process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()

        def lost() -> float:
            return all_of_it.requests("bad", "availability", engine_id="victim")

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
        assert alert["annotations"]["worst_instance"].startswith("under-test at ")
        assert alert["annotations"]["command"] == "inferscope findings under-test"

        # From the engine that the page names to a request, and from that to the fault.
        all_of_it.engine.do("free")
        request = a_late_request(all_of_it)
        asked = ("why", request, "under-test", "--ttft", f"{THRESHOLD_S:g}s")
        done = inferscope(*asked, rings=all_of_it.rings)
        assert done.returncode == 0, done.stderr
        assert re.search(r"blame\W+queue", done.stdout), done.stdout

        # Another fault, from which more are late. It is the same page, which now says so.
        all_of_it.engine.do("late")
        all_of_it.engine.do("burst 120")
        eventually(
            lambda: [a["annotations"]["cause"] for a in alerts(all_of_it)] == ["output"],
            latest_s=BUSY_S,
        )
        assert len(all_of_it.webhook.of("/page")) == 1
        assert all_of_it.webhook.of("/page", "resolved") == []

        # The engine that was killed meanwhile lost what it had in flight, and that is no page.
        assert lost() == NUM_LOST
        assert all_of_it.requests("bad", "availability", engine_id="under-test") == 0


def alerts(running: Stack) -> list[dict[str, Any]]:
    return running.prometheus.alerts(FAST)


def a_late_request(running: Stack) -> str:
    """Return the request that waited longest for its first token, of those that have it."""
    found: list[tuple[int, str]] = []

    def is_there() -> bool:
        looked = inferscope("attach", "under-test", "--once", "--json", rings=running.rings)
        assert looked.returncode == 0, looked.stderr
        (engine,) = json.loads(looked.stdout)["engines"]
        late = [
            (row["ttft_ns"], row["request_id"])
            for row in engine["requests"]
            if row["state"] == "done" and (row["ttft_ns"] or 0) > THRESHOLD_S * 1e9
        ]
        found.extend(late)
        return bool(late)

    eventually(is_there)
    return max(found)[1]


def names_that_rules_ask_for(running: Stack, rules: Path) -> None:
    """Hold that what the rules ask for is what the collector tells."""
    content = yaml.safe_load(rules.read_text(encoding="utf-8"))
    text = " ".join(rule["expr"] for group in content["groups"] for rule in group["rules"])
    asked = set(re.findall(r"(?<![:\w])inferscope_\w+(?![:\w])", text))
    assert len(asked) > 8
    told = {labels["__name__"] for labels, _ in running.prometheus.ask('{job="inferscope"}')}
    # There where the engine counts its own requests: not on this one.
    assert asked - told <= {"inferscope_attribution_coverage_ratio"}
