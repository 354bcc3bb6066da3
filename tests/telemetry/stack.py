"""A real Prometheus, a real Alertmanager and a webhook that stores its notifications."""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from inferscope.slo.rules_routing import PAGE_URL, TICKET_URL
from tests import debian


@dataclass(frozen=True)
class Note:
    """One notification: some alerts of one group that came at once."""

    path: str
    status: str
    group: dict[str, str]
    alerts: Sequence[dict[str, Any]]

    @property
    def labels(self) -> list[dict[str, str]]:
        """Return the labels of its alerts."""
        return [each["labels"] for each in self.alerts]


class Webhook:
    """Listens, and keeps all notifications in the order in which they came."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        notes = self.notes

        class Listener(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                note = Note(
                    self.path, document["status"], document["groupLabels"], document["alerts"]
                )
                notes.append(note)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Suppress the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Webhook:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def of(self, path: str, status: str = "firing") -> list[Note]:
        """Return the notifications of one receiver."""
        return [note for note in self.notes if (note.path, note.status) == (path, status)]


@contextmanager
def alertmanager(folder: Path, routes: str, webhook: Webhook) -> Iterator[str]:
    """Run one for as long as the context lasts; return its address.

    Args:
        folder: to write in.
        routes: the generated configuration; its two addresses become the webhook's.
        webhook: receiver of notifications.
    """
    program = debian.alertmanager()
    for example in (PAGE_URL, TICKET_URL):
        assert example in routes
        path = urllib.parse.urlsplit(example).path
        routes = routes.replace(example, webhook.url + path)
    (folder / "alertmanager.yaml").write_text(routes, encoding="utf-8")
    words = (
        f"--config.file={folder / 'alertmanager.yaml'}",
        f"--storage.path={folder / 'alertmanager'}",
        "--cluster.listen-address=",
    )
    with debian.serving(program, *words, log=folder / "alertmanager.log") as url:
        yield url


@dataclass(frozen=True)
class Dot:
    """An exemplar: a request among many, on a graph."""

    series: dict[str, str]
    labels: dict[str, str]
    value: float


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Return the samples that a query has now."""
        words = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return [(each["metric"], float(each["value"][1])) for each in result]

    def number(self, query: str) -> float:
        """Return the only sample of a query, 0 where there is none."""
        samples = self.ask(query)
        assert len(samples) <= 1, samples
        return samples[0][1] if samples else 0.0

    def dots(self, query: str) -> list[Dot]:
        """Return the exemplars of a query's series, as Grafana asks for them."""
        now_s = time.time()
        words = urllib.parse.urlencode({"query": query, "start": now_s - 3600, "end": now_s})
        asked = f"{self.url}/api/v1/query_exemplars?{words}"
        with urllib.request.urlopen(asked, timeout=30) as answer:
            series_found = json.load(answer)["data"]
        return [
            Dot(each["seriesLabels"], one["labels"], float(one["value"]))
            for each in series_found
            for one in each["exemplars"]
        ]

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """Return the alerts of a name that fire, with their annotations of now."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=30) as answer:
            alerts_found = json.load(answer)["data"]["alerts"]
        return [
            each
            for each in alerts_found
            if each["labels"]["alertname"] == name and each["state"] == "firing"
        ]


@contextmanager
def prometheus(
    folder: Path, rules: Path, *, target: str, manager: str, scrape_s: float
) -> Iterator[Prometheus]:
    """Run one for as long as the context lasts.

    Args:
        folder: to write in.
        rules: the generated file.
        target: URL of what it scrapes.
        manager: URL of the Alertmanager.
        scrape_s: between two scrapes.
    """
    program = debian.program("prometheus")
    address = urllib.parse.urlsplit(target).netloc
    scrape = f"{round(scrape_s * 1000)}ms"
    configuration = {
        "global": {"scrape_interval": scrape, "scrape_timeout": scrape},
        "rule_files": [str(rules)],
        "alerting": {
            "alertmanagers": [
                {"static_configs": [{"targets": [urllib.parse.urlsplit(manager).netloc]}]}
            ]
        },
        "scrape_configs": [
            {"job_name": "inferscope", "static_configs": [{"targets": [address]}]},
        ],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    words = (
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        "--rules.alert.resend-delay=1s",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    )
    with debian.serving(program, *words, log=folder / "prometheus.log") as url:
        yield Prometheus(url)
