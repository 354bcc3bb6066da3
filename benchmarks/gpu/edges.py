"""Kernels of known edges, against their edges by PM sampling's windows."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from bursts import EventClock, median
from watched import Windows, window_lengths_ns

from inferscope.records import CounterSample

_KERNELS = 8
_CYCLES = 40_000_000
"""About 20 ms of a spinning kernel, at 2 GHz."""
_PAUSE_S, _SHIFT_S = 0.05, 0.0137
"""Each pause is longer than the one before: kernels begin at another place within a window."""
_MARGIN_NS = 10_000_000
_BUSY, _LEAST_RUN_NS = 0.5, 8_000_000
"""Busy share of a window within a kernel, and the shortest run of such windows that is one."""


class Kernel(NamedTuple):
    """One kernel on an idle device, in ns of our clock.

    Attributes:
        before_ns: by the host, before its launch.
        start_ns: by the event before it.
        end_ns: by the event behind it.
        after_ns: by the host, when the device was idle again.
    """

    before_ns: int
    start_ns: float
    end_ns: float
    after_ns: int


def spin(clock: EventClock) -> list[Kernel]:
    """Run kernels one at a time, each after a pause."""
    found = []
    for at in range(_KERNELS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        time.sleep(_PAUSE_S + at * _SHIFT_S)
        before_ns = time.monotonic_ns()
        first.record()
        torch.cuda._sleep(_CYCLES)
        last.record()
        torch.cuda.synchronize()
        found.append(Kernel(before_ns, clock.ns(first), clock.ns(last), time.monotonic_ns()))
    time.sleep(_PAUSE_S)
    return found


def held(kernels: list[Kernel], samples: list[CounterSample]) -> dict[str, Any]:
    """Compare the kernels' edges with those of the busy windows; None for what is not seen.

    `is_inside` needs no events: it says whether every edge by PM sampling lies between the host's
    two readings, give or take a window. `shift_ms` compares the kernels with as many busy runs,
    wherever those lie: the distance of the clocks if stamps are of another clock than expected.
    """
    busy = Windows(samples, "busy_share")
    starts_ns = runs(busy)
    busy.values = busy.values * (busy.ends - busy.starts)
    window_ns = median(window_lengths_ns(samples))
    seen = [
        (kernel, edges)
        for kernel in kernels
        if (edges := busy.edges(kernel.before_ns - _MARGIN_NS, kernel.after_ns + _MARGIN_NS))
    ]
    starts_us = [(edges.start_ns - kernel.start_ns) / 1e3 for kernel, edges in seen]
    ends_us = [(edges.end_ns - kernel.end_ns) / 1e3 for kernel, edges in seen]
    shift_ns = (
        median([at - kernel.start_ns for at, kernel in zip(starts_ns, kernels, strict=True)])
        if len(starts_ns) == len(kernels)
        else None
    )
    return {
        "num_runs": len(starts_ns),
        "shift_ms": None if shift_ns is None else shift_ns / 1e6,
        "num_kernels": len(kernels),
        "num_seen": len(seen),
        "window_us": None if window_ns is None else window_ns / 1e3,
        "start_off_us": median(starts_us),
        "start_off_range_us": [min(starts_us), max(starts_us)] if seen else None,
        "end_off_us": median(ends_us),
        "end_off_range_us": [min(ends_us), max(ends_us)] if seen else None,
        "is_inside": all(
            kernel.before_ns - window_ns <= edges.start_ns
            and edges.end_ns <= kernel.after_ns + window_ns
            for kernel, edges in seen
        )
        if seen and window_ns is not None
        else None,
    }


def runs(busy: Windows) -> list[float]:
    """Return the start of each run of busy windows as long as a kernel."""
    found: list[list[float]] = []
    for start_ns, end_ns, share in zip(busy.starts, busy.ends, busy.values, strict=True):
        if share < _BUSY:
            continue
        if found and start_ns - found[-1][1] <= end_ns - start_ns:
            found[-1][1] = end_ns
        else:
            found.append([start_ns, end_ns])
    return [start_ns for start_ns, end_ns in found if end_ns - start_ns >= _LEAST_RUN_NS]
