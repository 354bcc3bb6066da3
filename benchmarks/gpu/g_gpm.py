"""(g) GPM against PM sampling over the same loads: is the fleet's source to be believed?

Each runs alone first, so that there are numbers of it even if both together do not work. Then GPM
is read faster than its 100 ms, under a load that does not change: when is there nothing new?
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from part import Bank, Setting, Unmet, main, shown
from watched import Sampler, Windows

from inferscope.probe.clock import SystemClock
from inferscope.records import CounterSample
from inferscope.sampler import gpm
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.nvml_devices import open_nvml
from inferscope.sampler.source import Unavailable

WORDS = ("sm_active_share", "tensor_share", "dram_share", "busy_share")
TURNS = (("gpm",), ("pm",), ("gpm", "pm"))
SWEEP_MS = (100, 50, 20, 10, 5, 2)
_LOADS = 4
_LEAST_S = 1.2
_EDGE_NS = 200_000_000
"""Left out at both ends of a load: GPM's windows are 100 ms."""
_SWEEP_READS = 15
_SETTLE_S = 0.3


def measure(setting: Setting, bank: Bank) -> None:
    """Run each load under either source, then both, then read GPM ever faster."""
    setting.need_gpu()
    of_load_s = max(_LEAST_S, setting.seconds / (_LOADS * len(TURNS) + 4))
    for sources in TURNS:
        name = " and ".join(sources)
        with bank.row(name):
            measured = under(setting, sources, of_load_s=of_load_s)
            bank.keep(name, measured, *lines_of(name, measured))
    if setting.is_cuda:
        with bank.row("sweep"), copying():
            bank.keep("sweep", *sweep(SWEEP_MS))


def under(setting: Setting, sources: tuple[str, ...], *, of_load_s: float) -> dict[str, Any]:
    """Return the values of concurrent sources by load, counter and source."""
    by_load = {}
    with Sampler(",".join(sources), pm_despite=setting.pm_despite) as sampler:
        for source in sources:
            sampler.of(source)
        for name, work in loads().items():
            start_ns = time.monotonic_ns()
            until_s = time.monotonic() + of_load_s
            while time.monotonic() < until_s:
                work()
                torch.cuda.synchronize()
            by_load[name] = (start_ns + _EDGE_NS, time.monotonic_ns() - _EDGE_NS)
    samples = {source: sampler.of(source) for source in sources}
    return {
        load: {
            word: {source: Windows(of_it, word).mean(*span) for source, of_it in samples.items()}
            for word in WORDS
        }
        for load, span in by_load.items()
    }


def lines_of(name: str, measured: dict[str, Any]) -> list[str]:
    """Return a line for each load."""
    return [
        f"{name}, {load:<8} "
        + ", ".join(
            f"{word} " + " / ".join(shown(number, ".3f") for number in by_source.values())
            for word, by_source in words.items()
        )
        for load, words in measured.items()
    ]


def loads() -> dict[str, Callable[[], object]]:
    """Return loads that stress memory, tensor pipes, both in turn, and next to nothing."""
    source = torch.ones(1 << 28, device="cuda")
    copied = torch.zeros_like(source)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones(1, device="cuda")

    def launches() -> None:
        for _ in range(200):
            one.add_(1.0)

    def half() -> None:
        copied.copy_(source)
        torch.cuda.synchronize()
        time.sleep(0.001)

    return {
        "copy": lambda: copied.copy_(source),
        "product": lambda: torch.mm(left, right),
        "half": half,
        "launches": launches,
    }


@contextmanager
def copying() -> Iterator[None]:
    """Copy all the time, in a thread."""
    is_over = threading.Event()
    work = loads()["copy"]

    def copy() -> None:
        while not is_over.is_set():
            for _ in range(8):
                work()
            torch.cuda.synchronize()

    thread = threading.Thread(target=copy, name="load")
    thread.start()
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        is_over.set()
        thread.join()


def sweep(
    intervals_ms: tuple[int, ...],
    *,
    load: Callable[[], Any] = open_nvml,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[dict[str, Any], str]:
    """Read GPM at each interval with the sampler's own source, its floor taken away.

    Args:
        intervals_ms: time between two reads.
        load: function that loads NVML.
        pause: function that waits for some seconds.

    Raises:
        Unmet: there is no GPM.
    """
    rows = {}
    floor_ns, gpm.SHORTEST_NS = gpm.SHORTEST_NS, 0
    try:
        for interval_ms in intervals_ms:
            source = gpm.GpmSource(NoClaims(), clock=SystemClock(), period_ns=0, load=load)
            try:
                source.open(time.monotonic_ns())
                rows[f"{interval_ms} ms"] = reads(source, interval_ms, pause)
            except Unavailable as reason:
                raise Unmet(str(reason)) from None
            finally:
                source.close()
    finally:
        gpm.SHORTEST_NS = floor_ns
    return rows, "GPM read every " + "; ".join(
        f"{name}: {row['num_new']} of {row['num_reads']} new, {row['num_zero']} all 0, "
        f"{row['num_failed']} failed, {shown(row['dram_share'], '.3f')} of DRAM, "
        f"{shown(row['read_us'], '.0f')} µs"
        for name, row in rows.items()
    )


def reads(
    source: gpm.GpmSource, interval_ms: int, pause: Callable[[float], None]
) -> dict[str, Any]:
    """Read a few times; return the new samples and the number of invalid reads."""
    found: list[CounterSample] = []
    took_us, num_failed = [], 0
    for _ in range(_SWEEP_READS):
        pause(interval_ms / 1e3)
        began_ns = time.perf_counter_ns()
        try:
            measured = [one for one in source.read(time.monotonic_ns()) if one.values]
        except Unavailable:
            measured = []
        took_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        num_failed += not measured
        found += measured[:1]
    values = [{word: one.values.get(word) for word in WORDS} for one in found]
    shares = [one["dram_share"] for one in values if one["dram_share"] is not None]
    return {
        "num_reads": _SWEEP_READS,
        "num_failed": num_failed,
        "num_new": len(values) - sum(map(_is_same, values[1:], values)),
        "num_zero": sum(not any(one.values()) for one in values),
        "dram_share": statistics.median(shares) if shares else None,
        "dram_share_spread": max(shares) - min(shares) if shares else None,
        "read_us": statistics.median(took_us),
    }


def _is_same(one: dict[str, float | None], other: dict[str, float | None]) -> bool:
    return one == other


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
