"""Copies of known size, in bursts between two events, compared with counters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from watched import Traffic

from inferscope.records import CounterSample

_COPY_BYTES = 1 << 30
_COPIES_PER_BURST, _BURSTS = 16, 5
_PAUSE_S = 0.03
"""Pause between bursts in seconds, so that counters can separate them."""
_EDGE_NS = 2_000_000


class Burst(NamedTuple):
    """Work of known size, between two events.

    Attributes:
        start_ns: as the events say, on our clock.
        end_ns: likewise.
        num_bytes: read and written.
    """

    start_ns: float
    end_ns: float
    num_bytes: int


class EventClock:
    """Puts a stream's events on our clock.

    Attributes:
        error_ns: at most.
    """

    def __init__(self) -> None:
        """Anchor an event of an idle device between two looks at the clock; the best of many."""
        best: tuple[int, int, Any] | None = None
        for _ in range(30):
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            before_ns = time.monotonic_ns()
            event.record()
            while not event.query():
                pass
            after_ns = time.monotonic_ns()
            if best is None or after_ns - before_ns < best[0]:
                best = after_ns - before_ns, (before_ns + after_ns) // 2, event
        assert best is not None
        self.error_ns = best[0] / 2
        _, self._host_ns, self._event = best

    def ns(self, event: Any) -> float:
        """Return when an event was passed."""
        return self._host_ns + float(self._event.elapsed_time(event)) * 1e6


def bursts(clock: EventClock, work: Callable[[], object], num_bytes: int) -> list[Burst]:
    """Do work a few times, each after a pause."""
    found = []
    for _ in range(_BURSTS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        time.sleep(_PAUSE_S)
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        found.append(Burst(clock.ns(first), clock.ns(last), num_bytes))
    time.sleep(_PAUSE_S)
    return found


def copying() -> tuple[Callable[[], object], int]:
    """Return copies of known size, warm, and the bytes that they move."""
    source = torch.ones(_COPY_BYTES // 4, device="cuda")
    copied = torch.zeros_like(source)

    def copy() -> None:
        for _ in range(_COPIES_PER_BURST):
            copied.copy_(source)

    copy()
    torch.cuda.synchronize()
    return copy, 2 * _COPIES_PER_BURST * _COPY_BYTES


def replaying(work: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of some work."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def judged(measured: list[Burst], samples: list[CounterSample]) -> dict[str, Any]:
    """Hold bursts against counters; None for what they cannot tell."""
    traffic = Traffic(samples)
    moved = [
        traffic.amount(burst.start_ns - _EDGE_NS, burst.end_ns + _EDGE_NS) for burst in measured
    ]
    seen = [
        (burst, bytes_) for burst, bytes_ in zip(measured, moved, strict=True) if bytes_ is not None
    ]
    margin_ns = _PAUSE_S / 2 * 1e9
    edges = [
        (burst, edge)
        for burst in measured
        if (edge := traffic.read.edges(burst.start_ns - margin_ns, burst.end_ns + margin_ns))
        is not None
    ]
    return {
        "num_bursts": len(measured),
        "num_told": len(seen),
        "measured_over_true": (
            sum(bytes_ for _, bytes_ in seen) / sum(burst.num_bytes for burst, _ in seen)
            if seen
            else None
        ),
        "num_edges": len(edges),
        "start_off_us": median([(edge.start_ns - burst.start_ns) / 1e3 for burst, edge in edges]),
        "end_off_us": median([(edge.end_ns - burst.end_ns) / 1e3 for burst, edge in edges]),
    }


def median(numbers: list[float] | list[int]) -> float | None:
    """Return the median, None of nothing."""
    return float(statistics.median(numbers)) if numbers else None
