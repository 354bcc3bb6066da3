"""A real Prometheus over pages of metrics, and what it answers."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import debian

_CONFIG = """global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: inferscope
    static_configs: [{{targets: {targets}}}]
"""


@dataclass(frozen=True)
class Exemplar:
    """One of a series' samples, and what it leads to; its time is s since 1970."""

    series: dict[str, str]
    labels: dict[str, str]
    value: float
    at_s: float

    @property
    def name(self) -> str:
        """Return the name of its series."""
        return self.series["__name__"]


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> dict[Mapping[str, str], float]:
        """Return the samples of an instant query, by their labels."""
        found = self._asked("query", query=expression)
        return {
            tuple(sorted(each["metric"].items())): float(each["value"][1])  # type: ignore[misc]
            for each in found["result"]
        }

    def one(self, expression: str) -> float | None:
        """Return the only sample of an instant query, None where there is none."""
        found = list(self.query(expression).values())
        assert len(found) <= 1
        return found[0] if found else None

    def by(self, label: str, expression: str) -> dict[str, float]:
        """Return the samples of an instant query by one of their labels."""
        return {dict(labels)[label]: value for labels, value in self.query(expression).items()}

    def exemplars(self, expression: str) -> list[Exemplar]:
        """Return all exemplars that it has of an expression's series."""
        now_s = time.time()
        found = self._asked(
            "query_exemplars", query=expression, start=now_s - 3600, end=now_s + 3600
        )
        return [
            Exemplar(
                each["seriesLabels"], one["labels"], float(one["value"]), float(one["timestamp"])
            )
            for each in found
            for one in each["exemplars"]
        ]

    def own(self, name: str) -> float:
        """Return a metric of its own, one without labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
        return float(value)

    def _asked(self, what: str, **how: object) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(how)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            answered = json.load(answer)
        assert answered["status"] == "success", answered
        return answered["data"]


@contextmanager
def prometheus(folder: Path, urls: list[str]) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these pages every second; skip the test where there is none."""
    program = debian.program("prometheus")
    targets = [urllib.parse.urlsplit(url).netloc for url in urls]
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(targets=json.dumps(targets)), encoding="utf-8")
    with debian.serving(
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        "--enable-feature=exemplar-storage",
        log=folder / "prometheus.log",
    ) as url:
        yield Prometheus(url)
