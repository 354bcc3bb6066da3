"""A Prometheus of Debian's, running."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.collecting.running import eventually

_CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: inferscope
    static_configs: [{targets: ["%s"]}]
"""


class Prometheus:
    """A server that scrapes one target every second."""

    def __init__(self, program: str, folder: Path, target: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG % target, encoding="utf-8")
        self._log = folder / "prometheus.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                    "--enable-feature=exemplar-storage",
                ],
                stderr=log,
                stdout=log,
            )
        eventually(self._is_ready)

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
                said = error.read().decode()
            raise AssertionError(f"{asked.get('query')}: {said}") from None

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(encoding="utf-8")
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def prometheus(program: str, folder: Path, target: str) -> Iterator[Prometheus]:
    """Run a Prometheus for as long as the context lasts."""
    server = Prometheus(program, folder, target)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
