"""Measured peak rates of a device: memory bandwidth, matrix products, launches.

Each rate is the best of several warm batches, each long enough for the clock's resolution. A
ceiling is an upper bound, and other load on the machine can only lower a measurement. Amounts are
those that the program requests: a copy reads and writes each byte once, an n³ product is 2n³ FLOPs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_GPU_BYTES = 1 << 30
_CPU_BYTES = 1 << 28
"""Array size in bytes, larger than the last-level cache of most processors."""
_MEMORY_SHARE = 8
"""Divisor of free memory: an array takes at most one eighth of it."""
_GPU_SIDE, _CPU_SIDE, _LEAST_SIDE = 8192, 1024, 128
_BATCH_S = 0.02
_LONGEST_PRODUCT_S = 0.25
_LAUNCHES = 512
"""Launches per batch, fewer than a stream queues before the host has to wait."""
_SHARES = {"copy": 0.2, "read": 0.2, "launch": 0.05, "products": 0.55}

FLOAT8 = "float8_e4m3fn"


class Ceilings(NamedTuple):
    """Peak rates of one device.

    Attributes:
        copy_bytes_s: bytes read plus bytes written per second by a copy.
        read_bytes_s: bytes read per second without writes, as decoding reads weights.
        launch_s: host seconds per operation.
        flops_s: FLOP/s of dense products by dtype; unsupported dtypes are absent.
    """

    copy_bytes_s: float
    read_bytes_s: float
    launch_s: float
    flops_s: dict[str, float]


class Stopwatch(Protocol):
    """Timer of work on a device."""

    def seconds(self, work: Callable[[], object], num: int) -> float:
        """Run the work `num` times and return the total device time in seconds."""


class HostStopwatch:
    """Timer of work on a CPU."""

    def seconds(self, work: Callable[[], object], num: int) -> float:
        """Return the total time by the host's clock, in seconds."""
        start_ns = time.perf_counter_ns()
        for _ in range(num):
            work()
        return (time.perf_counter_ns() - start_ns) / 1e9


class EventStopwatch:
    """Timer of work on a GPU by events: launch time counts only where it is the limit."""

    def seconds(self, work: Callable[[], object], num: int) -> float:
        """Return the seconds between two events on the current stream."""
        new_event: Any = torch.cuda.Event
        start, end = (new_event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def measure_ceilings(device: torch.device, *, seconds: float) -> Ceilings:
    """Measure a device for about `seconds` seconds."""
    is_cuda = device.type == "cuda"
    stopwatch: Stopwatch = EventStopwatch() if is_cuda else HostStopwatch()
    budget_s = {name: share * seconds for name, share in _SHARES.items()}
    num_bytes = _array_bytes(device)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    copy_s = _copy_s(source, stopwatch, budget_s=budget_s["copy"])
    # Both read every byte and write almost none; the faster one is the ceiling.
    square = source.view(-1, 1024)
    vector = torch.ones(1024, dtype=torch.float32, device=device)
    read_s = min(
        best_s(work, stopwatch, budget_s=budget_s["read"] / 2)
        for work in (lambda: torch.mv(square, vector), source.sum)
    )
    return Ceilings(
        2 * num_bytes / copy_s,
        num_bytes / read_s,
        _launch_s(device, budget_s=budget_s["launch"]),
        _products(device, stopwatch, seconds=budget_s["products"]),
    )


def best_s(work: Callable[[], object], stopwatch: Stopwatch, *, budget_s: float) -> float:
    """Return the minimum seconds per run of the work over batches of at least `_BATCH_S`."""
    once_s = max(min(stopwatch.seconds(work, 1) for _ in range(2)), 1e-7)
    num = max(1, round(_BATCH_S / once_s))
    best, until_s = once_s, time.monotonic() + budget_s
    while True:
        best = min(best, stopwatch.seconds(work, num) / num)
        if time.monotonic() > until_s:
            return best


def _copy_s(source: Tensor, stopwatch: Stopwatch, *, budget_s: float) -> float:
    copied = torch.zeros_like(source)
    return best_s(lambda: copied.copy_(source), stopwatch, budget_s=budget_s)


def _launch_s(device: torch.device, *, budget_s: float) -> float:
    """Return the host seconds of one operation on a single element."""
    one = torch.ones(1, device=device)
    best, until_s = float("inf"), time.monotonic() + budget_s
    while True:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_ns = time.perf_counter_ns()
        for _ in range(_LAUNCHES):
            one.add_(1.0)
        best = min(best, (time.perf_counter_ns() - start_ns) / _LAUNCHES / 1e9)
        if time.monotonic() > until_s:
            return best


def _products(device: torch.device, stopwatch: Stopwatch, *, seconds: float) -> dict[str, float]:
    dtypes = [torch.float32, torch.bfloat16]
    if device.type == "cuda":
        dtypes += [torch.float16]
        if torch.cuda.get_device_capability(device) >= (8, 9):
            dtypes += [torch.float8_e4m3fn]
    found = {}
    for dtype in dtypes:
        flops_s = _product(device, dtype, stopwatch, seconds=seconds / len(dtypes))
        if flops_s is not None:
            found[str(dtype).removeprefix("torch.")] = flops_s
    return found


def _product(
    device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, *, seconds: float
) -> float | None:
    """Return the FLOP/s of square products; None if the device has no kernel for the dtype.

    The side grows only while one product is short: a CPU without instructions for a dtype takes a
    hundred times as long.
    """
    side = _LEAST_SIDE
    wanted = _GPU_SIDE if device.type == "cuda" else _CPU_SIDE
    try:
        work = _multiplication(device, dtype, side)
        took_s = min(stopwatch.seconds(work, 1) for _ in range(3))
        while side < wanted and 8 * took_s < _LONGEST_PRODUCT_S:
            side *= 2
            work = _multiplication(device, dtype, side)
            took_s = min(stopwatch.seconds(work, 1) for _ in range(2))
        return float(2 * side**3 / best_s(work, stopwatch, budget_s=seconds))
    except (RuntimeError, NotImplementedError):
        return None


def _multiplication(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], Tensor]:
    # Random numbers: on equal values a chip draws less power and keeps clocks that models never
    # reach.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    if str(dtype).endswith(FLOAT8):
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
        )
    out = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=out)


def _array_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        wanted = _GPU_BYTES
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        wanted = _CPU_BYTES
    return min(wanted, free_bytes // _MEMORY_SHARE) // 4096 * 4096
