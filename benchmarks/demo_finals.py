"""What became final in `samples/demo.isr`, for benchmarks of those who are told of it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.source import catch_up, open_source

DEMO = Path(__file__).parent.parent / "samples" / "demo.isr"
BATCH = 64


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        """Start empty."""
        self.steps: list[FinalStep] = []
        self.requests: list[FinalRequest] = []

    def step(self, step: FinalStep) -> None:
        """Keep a step."""
        self.steps.append(step)

    def request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.requests.append(request)


def told_of_demo() -> Told:
    """Fold the demo once, and return what became final."""
    told = Told()
    source = open_source(DEMO, sinks=(told,))
    catch_up(source)
    source.close()
    return told


def full_step(like: FinalStep, number: int) -> FinalStep:
    """Return a step of a full batch, one member of which changes in every tenth."""
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
