"""What exporters make of a real engine's rings: requests, roots of traces, a page of metrics."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferscope_otlp import OtlpExporter
from inferscope_prometheus import PrometheusExporter

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.readers.source import catch_up, open_source
from tests.daemon.running import Scrape
from tests.exporters.otlp.sink import receiving


@dataclass
class Folded:
    """A sink that keeps the requests, and what exporters made of the same.

    Attributes:
        requests: in the order in which they became final.
        roots: their spans' attributes, by the engine's own id.
        page: the metrics.
    """

    requests: list[FinalRequest] = field(default_factory=list)
    roots: dict[str, dict[str, Any]] = field(default_factory=dict)
    page: Scrape = field(default_factory=lambda: Scrape(""))

    def on_step(self, step: FinalStep) -> None:
        """Steps are looked at elsewhere."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.requests.append(request)

    def root(self, external_id: str) -> dict[str, Any]:
        """Return the attributes of the one request that a client named so."""
        (found,) = (each for each in self.requests if each.external_id == external_id)
        return self.roots[found.request_id]

    def asked(self, external_id: str) -> dict[str, Any]:
        """Return the request's parameters, without the model and the engine's id."""
        start = "gen_ai.request."
        values = {k.removeprefix(start): v for k, v in self.root(external_id).items() if start in k}
        return {name: value for name, value in values.items() if name not in ("model", "id")}


def fold(rings: Path) -> Folded:
    """Fold the rings of one engine."""
    folded = Folded()
    with receiving() as sink:
        traces = OtlpExporter({"endpoint": sink.url})
        metrics = PrometheusExporter({"port": 0})
        traces.open()
        metrics.open()
        source = open_source(rings, sinks=(folded, traces, metrics))
        try:
            catch_up(source)
            view = source.snapshot(10**10)
            traces.on_snapshot(view)
            metrics.on_snapshot(view)
            with urllib.request.urlopen(metrics.describe().split()[1], timeout=30) as answer:
                folded.page = Scrape(answer.read().decode())
        finally:
            source.close()
            traces.close()
            metrics.close()
        roots = [each.attributes for each in sink.roots()]
    folded.roots = {each["inferscope.request.id"]: each for each in roots}
    return folded


def is_paused(rings: Path) -> bool:
    """Fold the rings of a running engine."""
    source = open_source(rings)
    catch_up(source, patience_s=60)
    (view,) = source.snapshot(10**10).engines
    source.close()
    return view.is_paused
