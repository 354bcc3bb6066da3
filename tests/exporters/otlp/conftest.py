"""A real recording, folded once: what became final, in its order, and the view at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from inferscope_otlp import OtlpExporter
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.fold.snapshots import Snapshot
from inferscope.readers.source import catch_up, open_source

DEMO = Path(__file__).parents[3] / "samples" / "demo.isr"


@dataclass
class Finals:
    """A sink that records its input for replay."""

    in_order: list[FinalStep | FinalRequest] = field(default_factory=list)
    view: Snapshot | None = None

    def on_step(self, step: FinalStep) -> None:
        """Keep a step."""
        self.in_order.append(step)

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.in_order.append(request)

    @property
    def requests(self) -> list[FinalRequest]:
        """Return the requests."""
        return [each for each in self.in_order if isinstance(each, FinalRequest)]

    @property
    def steps(self) -> list[FinalStep]:
        """Return the steps."""
        return [each for each in self.in_order if isinstance(each, FinalStep)]

    def export_to(self, exporter: OtlpExporter, *, traces: dict[str, str] | None = None) -> None:
        """Replay all records into an exporter.

        Args:
            exporter: it is open.
            traces: what clients sent as `traceparent`, by request.
        """
        for each in self.in_order:
            if isinstance(each, FinalStep):
                exporter.on_step(each)
            else:
                trace = (traces or {}).get(each.request_id, "")
                exporter.on_request(replace(each, trace=trace))
        assert self.view is not None
        exporter.on_snapshot(self.view)


@pytest.fixture(scope="session")
def finals() -> Finals:
    """Fold the recording of the demo."""
    kept = Finals()
    source = open_source(DEMO, sinks=(kept,))
    catch_up(source)
    kept.view = source.snapshot(10**10)
    source.close()
    assert len(kept.requests) > 90
    assert len(kept.steps) > 2000
    return kept
