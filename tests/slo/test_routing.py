"""The example for Alertmanager, in a real one: receivers of each alert, and inhibitions."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from inferscope.slo.rules_notes import routing_text
from inferscope.slo.rules_routing import routing
from tests.daemon.running import eventually
from tests.telemetry.stack import Webhook, alertmanager

pytestmark = pytest.mark.process

SCALE = 300.0


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as hook:
        yield hook


def alert(name: str, severity: str, **labels: str) -> dict[str, Any]:
    return {"labels": {"alertname": name, "severity": severity, **labels}}


BURN = alert("InferScopeBudgetBurnsFast", "page", model="m", slo="ttft")
OTHER = alert("InferScopeBudgetBurnsFast", "page", model="other", slo="ttft")
BLIND = alert("InferScopeBlind", "page", model="m")
TICKETS = [
    alert("InferScopeBudgetBurnsSlowly", "ticket", model="m", slo="ttft"),
    alert("InferScopeInstanceBurns", "ticket", model="m", slo="ttft"),
    alert("InferScopeBudgetTrickles", "ticket", model="m", slo="availability"),
    alert("InferScopeKvSaturated", "ticket", model="m"),
]


def send(url: str, *alerts: dict[str, Any]) -> None:
    body = json.dumps(alerts).encode()
    asked = urllib.request.Request(
        f"{url}/api/v2/alerts", body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=10).close()


def held_back(url: str) -> set[tuple[str, str]]:
    """Return which alerts are held back, by name and model."""
    with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=10) as answer:
        alerts = json.load(answer)
    return {
        (each["labels"]["alertname"], each["labels"]["model"])
        for each in alerts
        if each["status"]["inhibitedBy"]
    }


def test_a_page_holds_back_its_tickets_and_blindness_the_pages(
    tmp_path: Path, webhook: Webhook
) -> None:
    text = routing_text(routing(SCALE))
    with alertmanager(tmp_path, text, webhook) as url:
        send(url, BURN, OTHER, *TICKETS)
        eventually(lambda: len(webhook.of("/page")) >= 2 and len(webhook.of("/ticket")) >= 2)
        sent = {
            (each["alertname"], each["model"])
            for path in ("/page", "/ticket")
            for note in webhook.of(path)
            for each in note.labels
        }
        assert sent == {
            ("InferScopeBudgetBurnsFast", "m"),
            ("InferScopeBudgetBurnsFast", "other"),
            ("InferScopeBudgetTrickles", "m"),
            ("InferScopeKvSaturated", "m"),
        }
        slow, single = (("InferScopeBudgetBurnsSlowly", "m"), ("InferScopeInstanceBurns", "m"))
        assert held_back(url) == {slow, single}
        # All of a model's objectives are one page.
        assert all(note.group.keys() == {"model"} for note in webhook.of("/page"))
        send(url, BLIND)
        eventually(
            lambda: (
                held_back(url)
                == {
                    slow,
                    single,
                    ("InferScopeBudgetBurnsFast", "m"),
                    ("InferScopeBudgetTrickles", "m"),
                }
            )
        )


@pytest.mark.thorough
def test_what_blindness_held_back_is_sent_when_it_ends(tmp_path: Path, webhook: Webhook) -> None:
    def sent(path: str = "/page", status: str = "firing") -> set[str]:
        notes = [note for note in webhook.notes if note.path == path]
        alerts = [each for note in notes for each in note.alerts if each["status"] == status]
        return {each["labels"]["alertname"] for each in alerts}

    stalled, trickles = alert("InferScopeStalled", "page", model="m"), TICKETS[2]
    with alertmanager(tmp_path, routing_text(routing(SCALE)), webhook) as url:
        send(url, BLIND)
        eventually(lambda: sent() == {"InferScopeBlind"})
        send(url, BURN, trickles)
        held = {("InferScopeBudgetBurnsFast", "m"), ("InferScopeBudgetTrickles", "m")}
        eventually(lambda: held_back(url) == held)
        send(url, stalled)  # a page of the same group: the others were due by the time it is sent
        eventually(lambda: sent() == {"InferScopeBlind", "InferScopeStalled"})
        assert sent("/ticket") == set()
        ended = datetime.now(timezone.utc).isoformat()
        send(url, BLIND | {"startsAt": "2026-01-01T00:00:00Z", "endsAt": ended})
        eventually(lambda: sent(status="resolved") == {"InferScopeBlind"})
        eventually(lambda: "InferScopeBudgetBurnsFast" in sent())
        eventually(lambda: sent("/ticket") == {"InferScopeBudgetTrickles"})
