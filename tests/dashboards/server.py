"""A Prometheus of Debian's, running."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import debian

_CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: inferscope
    static_configs: [{targets: ["%s"]}]
"""


class Prometheus:
    """A server that scrapes one target every second."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expr: str, *, is_instant: bool, window_s: float = 60.0) -> list[float]:
        """Return all numbers that a query gives, now or over the last minute.

        Raises:
            AssertionError: the query is no PromQL.
        """
        now_s = time.time()
        over = {"time": now_s} if is_instant else {"start": now_s - window_s, "end": now_s}
        step = {} if is_instant else {"step": 5}
        path = "query" if is_instant else "query_range"
        result = self._get(path, query=expr, **over, **step)["result"]
        key = "value" if is_instant else "values"
        pairs = [pair for each in result for pair in ([each[key]] if is_instant else each[key])]
        return [number for _, text in pairs if math.isfinite(number := float(text))]

    def metrics(self) -> set[str]:
        """Return the names of all metrics that it has seen."""
        return set(self._get("label/__name__/values"))

    def _get(self, path: str, **asked: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode()
            raise AssertionError(f"{asked.get('query')}: {detail}") from None


@contextmanager
def prometheus(program: str, folder: Path, target: str) -> Iterator[Prometheus]:
    """Run a Prometheus for as long as the context lasts."""
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG % target, encoding="utf-8")
    with debian.serving(
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--enable-feature=exemplar-storage",
        log=folder / "prometheus.log",
    ) as url:
        yield Prometheus(url)
