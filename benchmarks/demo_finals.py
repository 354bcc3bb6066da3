"""Final records of `samples/demo.isr`, for benchmarks of exporters."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.readers.source import catch_up, open_source

DEMO = Path(__file__).parent.parent / "samples" / "demo.isr"
BATCH = 64


class RecordingSink:
    """A sink that records all final records."""

    def __init__(self) -> None:
        """Create an empty sink."""
        self.steps: list[FinalStep] = []
        self.requests: list[FinalRequest] = []

    def on_step(self, step: FinalStep) -> None:
        """Append a step."""
        self.steps.append(step)

    def on_request(self, request: FinalRequest) -> None:
        """Append a request."""
        self.requests.append(request)


def demo_records() -> RecordingSink:
    """Fold the demo once and return its final records."""
    recorded = RecordingSink()
    source = open_source(DEMO, sinks=(recorded,))
    catch_up(source)
    source.close()
    return recorded


def full_step(like: FinalStep, number: int) -> FinalStep:
    """Return a full batch's step; one request changes in every tenth."""
    ones = like.tokens[:1].repeat(BATCH)
    return replace(
        like,
        step=number,
        request_ids=tuple(f"request-{number // 10 + row}" for row in range(BATCH)),
        phases=like.phases[:1].repeat(BATCH),
        tokens=ones,
        contexts=ones,
        flags=like.flags[:1].repeat(BATCH),
        shares_ns=ones,
    )
