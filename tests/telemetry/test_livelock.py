"""An engine whose scheduler admits nothing: one page while it lasts, silence before and after.

The window of the generated rule is cut from 50 s to WINDOW_S; its length is promtool's to test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import debian
from tests.cli.running import inferscope
from tests.daemon.running import collecting, eventually
from tests.engine.server.running import Server, Stream, serving
from tests.telemetry.stack import Prometheus, Webhook, alertmanager, prometheus

pytestmark = pytest.mark.thorough

BROKEN = Path(__file__).with_name("broken")
WINDOW_S, SCRAPE_S, SCALE = 6, 1.0, 75
NUM_STUCK = 6
_OBJECTIVES = "slos: [{metric: availability, objective: 99%, window: 1d}]\n"
_FIRED = 'count_over_time(ALERTS{alertstate="firing"}[10m])'
_ANSWER = {"prompt": "def f", "max_tokens": 3}


@dataclass
class Stack:
    """A server with a switch for the fault, and what watches it."""

    server: Server
    fault: Path
    prometheus: Prometheus
    webhook: Webhook

    def number(self, metric: str) -> float:
        """Return the value that Prometheus has of a metric with one series."""
        return self.prometheus.number(metric)

    def serve(self, num: int) -> None:
        """Send requests one after another, and check each answer."""
        for _ in range(num):
            assert self.server.post("/v1/completions", _ANSWER)[0] == 200


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """Run all of it for as long as the context lasts."""
    debian.program("prometheus")
    debian.alertmanager()
    fault, slos, out = folder / "fault", folder / "slo.yaml", folder / "out"
    slos.write_text(_OBJECTIVES, encoding="utf-8")
    asked = ("slo", "rules", str(slos), "--out", str(out), "--scale", str(SCALE))
    written = inferscope(*asked, "--scrape", str(SCRAPE_S), rings=folder / "rings")
    assert written.returncode == 0, written.stderr
    rules = out / "inferscope-rules.yaml"
    text = rules.read_text(encoding="utf-8")
    assert "[50s]" in text
    assert "offset 50s" in text
    rules.write_text(text.replace("50s", f"{WINDOW_S}s"), encoding="utf-8")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(BROKEN))
            patch.setenv("INFERSCOPE_TEST_ADMITS_NOTHING", str(fault))
            server = stack.enter_context(serving(folder, "builtin"))
        stack.callback(server.stop)
        webhook = stack.enter_context(Webhook())
        routes = (out / "alertmanager.yaml").read_text(encoding="utf-8")
        manager = stack.enter_context(alertmanager(folder, routes, webhook))
        collector = stack.enter_context(collecting(server.rings, folder, "pins: off\n"))
        scraping = stack.enter_context(
            prometheus(folder, rules, target=collector.url, manager=manager, scrape_s=SCRAPE_S)
        )
        server.wait()
        yield Stack(server, fault, scraping, webhook)


@pytest.mark.timeout(180)
def test_a_scheduler_that_admits_nothing_is_one_page_until_it_admits_again(tmp_path: Path) -> None:
    with stack(tmp_path) as all_of_it, ExitStack() as clients:
        # With admission working: silence, with a load and without one, for longer than the window.
        eventually(lambda: all_of_it.prometheus.ask("inferscope_admissions_total") != [])
        all_of_it.serve(20)
        eventually(lambda: all_of_it.number("inferscope_admissions_total") == 20)
        served_s = time.monotonic()
        p99 = "engine:inferscope_step_duration_seconds:p99_1h"
        eventually(lambda: all_of_it.prometheus.ask(p99) != [])
        eventually(lambda: time.monotonic() > served_s + WINDOW_S + 4 * SCRAPE_S)
        assert all_of_it.prometheus.ask(_FIRED) == []

        all_of_it.fault.touch()
        streams = [
            clients.enter_context(Stream(all_of_it.server.port, "/v1/completions", _ANSWER))
            for _ in range(NUM_STUCK)
        ]
        eventually(lambda: all_of_it.number("inferscope_requests_admissible") == NUM_STUCK)
        assert all_of_it.number("inferscope_requests_running") == 0
        eventually(lambda: all_of_it.webhook.of("/page") != [])
        (page,) = all_of_it.webhook.of("/page")
        (alert,) = page.alerts
        assert alert["labels"] == {
            "alertname": "InferScopeNotAdmitting",
            "model": "builtin",
            "severity": "page",
        }
        annotations = alert["annotations"]
        assert annotations["summary"] == "builtin: 1 engines admit none of the requests that wait"
        assert annotations["worst_instance"].startswith("served at ")
        assert annotations["worst_instance"].endswith(f", {NUM_STUCK} requests waiting")

        all_of_it.fault.unlink()
        assert [list(stream.events())[-1] for stream in streams] == ["[DONE]"] * NUM_STUCK
        eventually(lambda: all_of_it.webhook.of("/page", "resolved") != [])
        assert [len(all_of_it.webhook.of("/page", how)) for how in ("firing", "resolved")] == [1, 1]
        assert all_of_it.webhook.of("/ticket") == []
