"""Traces in Arize Phoenix, a real back end, over HTTP and over gRPC.

It runs from an environment of its own: `python -m venv PEERS/venvs/phoenix` and, in that one,
`pip install arize-phoenix`. Over gRPC the tests' own environment needs the extra `grpc` too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from inferscope_otlp import OtlpExporter

from inferscope.readers.source import catch_up, open_source
from tests.children import child
from tests.exporters.otlp.conftest import DEMO, Finals

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("INFERSCOPE_PEERS", ROOT / ".engines"))
PHOENIX = PEERS / "venvs" / "phoenix" / "bin" / "phoenix"
_LATEST_S = 180.0


@dataclass(frozen=True)
class Phoenix:
    """One that runs."""

    url: str
    grpc_url: str

    def ask(self, path: str) -> Any:
        """Ask its API."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans of the project that takes what names none."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            try:
                page = self.ask(f"/v1/projects/default/spans?limit=1000{cursor}")
            except urllib.error.HTTPError:  # no span has come yet: there is no project
                return found
            found += page["data"]
            if not page["next_cursor"]:
                return found
            cursor = f"&cursor={page['next_cursor']}"


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[Phoenix]:
    """Run it with an empty database."""
    if not PHOENIX.exists():
        pytest.skip(f"no Phoenix under {PEERS}: python -m venv, pip install arize-phoenix")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports.append(taken.getsockname()[1])
    running = Phoenix(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    with (
        (tmp_path / "log").open("wb") as log,
        child(
            [PHOENIX, "serve"],
            env={
                **os.environ,
                "PHOENIX_HOST": "127.0.0.1",
                "PHOENIX_PORT": str(ports[0]),
                "PHOENIX_GRPC_PORT": str(ports[1]),
                "PHOENIX_WORKING_DIR": str(tmp_path),
                "PHOENIX_TELEMETRY_ENABLED": "false",
            },
            stdout=log,
            stderr=log,
        ) as process,
    ):
        end_s = time.monotonic() + _LATEST_S
        while True:
            assert process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
            assert time.monotonic() < end_s, "it never came up"
            try:
                running.ask("/v1/projects")
                break
            except OSError:
                time.sleep(0.2)
        yield running


@pytest.fixture(scope="module")
def finals() -> Finals:
    """Fold the recording of the demo."""
    kept = Finals()
    source = open_source(DEMO, sinks=(kept,))
    catch_up(source)
    kept.view = source.snapshot(10**10)
    source.close()
    return kept


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_every_trace_arrives_whole(phoenix: Phoenix, finals: Finals, protocol: str) -> None:
    if protocol == "grpc" and importlib.util.find_spec("grpc") is None:
        pytest.skip('gRPC is not installed here: pip install "inferscope-llm[grpc]"')
    endpoint = phoenix.grpc_url if protocol == "grpc" else f"{phoenix.url}/v1/traces"
    exporter = OtlpExporter({"protocol": protocol, "endpoint": endpoint})
    exporter.open()
    finals.export_to(exporter)
    end_s = time.monotonic() + _LATEST_S
    while exporter.num_waiting:
        assert time.monotonic() < end_s, "it does not take them"
        time.sleep(0.1)
    exporter.close()
    assert exporter.num_sent == len(finals.requests)
    roots: list[dict[str, Any]] = []
    while len(roots) < len(finals.requests):
        assert time.monotonic() < end_s, f"it has {len(roots)} traces"
        time.sleep(0.5)
        spans = phoenix.spans()
        roots = [span for span in spans if span["parent_id"] is None]
    ids = {span["context"]["span_id"] for span in spans}
    assert all(span["parent_id"] in ids for span in spans if span["parent_id"] is not None)
    exported_ids = {span["attributes"]["inferscope.request.id"] for span in roots}
    assert exported_ids == {request.request_id for request in finals.requests}
    for name in ("inferscope.queue", "inferscope.prefill", "inferscope.decode"):
        assert sum(span["name"] == name for span in spans) == len(roots)
