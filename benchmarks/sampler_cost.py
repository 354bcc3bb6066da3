"""Cost of a sampler: processor time of its process next to engines, and of each source's reads.

The process is the real one, measured by the kernel's clock of it over some seconds, once it has
begun; which of its sources had something to read here is part of the result. The reads of NVML and
GPM are timed as well over a driver that is replayed: that is our side of them and the binding's,
without the driver's own time, for a machine without a GPU.

    python benchmarks/sampler_cost.py --out sampler_cost.json
    python benchmarks/sampler_cost.py --counters auto,pm      # as root, on a machine with a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
from probe_cost import machine
from process_clock import process_cpu_ns

from inferscope.probe.clock import SystemClock
from inferscope.records import CounterSample, decode
from inferscope.ring.discovery import sampler_rings
from inferscope.ring.reader import Frame, RingReader
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.gpm import GpmSource
from inferscope.sampler.nvml import NvmlSource

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.sampler.recorded_nvml import H200, RecordedLibrary, Recording

TARGET_SHARE, PM_TARGET_SHARE = 0.02, 0.15
_WARM_UP_S = 3.0
_ENGINE = """
import sys
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "bench"))
print("up", flush=True)
sys.stdin.read()
"""


@contextmanager
def engines(num: int, environment: dict[str, str]) -> Iterator[None]:
    """Start processes with rings, which the host source reports on."""
    words = [sys.executable, "-c", _ENGINE]
    running = [
        subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(num)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in running:
            process.communicate()


def whole_process(counters: str, seconds: float, num_engines: int) -> dict[str, Any]:
    """Return the share of a core that a sampler uses, and its records meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "INFERSCOPE_DIR": folder, "INFERSCOPE_RING_MB": "16"}
        words = [sys.executable, "-m", "inferscope", "sampler", "--counters", counters]
        with engines(num_engines, environment):
            sampler = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            try:
                time.sleep(_WARM_UP_S)
                began_ns, cpu_ns = time.monotonic_ns(), process_cpu_ns(sampler.pid)
                time.sleep(seconds)
                spent_ns = process_cpu_ns(sampler.pid) - cpu_ns
                wall_ns = time.monotonic_ns() - began_ns
            finally:
                sampler.terminate()
                sampler.wait()
        (path,) = sampler_rings(Path(folder))
        return {
            "counters": counters,
            "engines": num_engines,
            "seconds": wall_ns / 1e9,
            "core_share": round(spent_ns / wall_ns, 5),
            **written(path, began_ns, began_ns + wall_ns),
        }


def written(path: Path, from_ns: int, to_ns: int) -> dict[str, Any]:
    """Return the number and the size of each source's samples in a time range of a ring."""
    reader = RingReader(path)
    num_by_source: dict[str, int] = {}
    num_bytes = 0
    while frames := reader.read():
        for frame in frames:
            if not isinstance(frame, Frame):
                continue
            record = decode(frame.code, frame.payload)
            if from_ns <= record.t_ns < to_ns:
                num_bytes += len(frame.payload)
                if isinstance(record, CounterSample) and record.values:
                    num_by_source[record.source] = num_by_source.get(record.source, 0) + 1
    reader.close()
    return {"samples": num_by_source, "ring_bytes_s": round(num_bytes / (to_ns - from_ns) * 1e9)}


def replayed_reads(repeats: int) -> dict[str, float]:
    """Return the median µs of processor time per read of each source over a replayed driver."""
    recording = Recording.of(H200)
    recording.document["devices"][0]["turns"] = recording.document["devices"][0]["turns"][1:2]
    pynvml.nvmlLib = RecordedLibrary(recording)
    with tempfile.TemporaryDirectory() as folder:
        nvml = NvmlSource(Path(folder), NoClaims(), period_ns=100_000_000)
        gpm = GpmSource(NoClaims(), clock=_Hurried(), period_ns=100_000_000)
        nvml.open(0)
        gpm.open(0)
        return {
            "nvml_us": _median_us(lambda i: nvml.read(i * 100_000), repeats),
            "gpm_us": _median_us(gpm.read, repeats),
        }


class _Hurried(SystemClock):
    """A clock that advances 100 ms between any two readings."""

    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:  # type: ignore[override]
        """Return the time."""
        self._now_ns += 100_000_000
        return self._now_ns


def _median_us(read: Callable[[int], object], repeats: int) -> float:
    times_us = []
    for i in range(1, repeats + 1):
        began_ns = time.thread_time_ns()
        read(i)
        times_us.append((time.thread_time_ns() - began_ns) / 1e3)
    return round(statistics.median(times_us), 1)


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counters", default="auto")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engines", type=int, default=4, help="processes with rings")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    about = machine()
    row = whole_process(options.counters, options.seconds, options.engines)
    reads = replayed_reads(500)
    target = PM_TARGET_SHARE if "pm" in options.counters.split(",") else TARGET_SHARE
    verdict = "met" if row["core_share"] <= target else "missed"
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"sampler --counters {row['counters']}, {row['engines']} engine processes:")
    print(f"  {row['core_share']:.2%} of a core over {row['seconds']:.0f} s")
    print(f"  samples {row['samples']}, {row['ring_bytes_s'] / 1024:.1f} KB/s into the ring")
    print(f"replayed driver: nvml {reads['nvml_us']} µs, gpm {reads['gpm_us']} µs per read")
    print(f"target (<= {target:.0%} of a core): {verdict}")
    if options.out is not None:
        result = {"machine": about, "process": row, "replayed_reads": reads, "target": verdict}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
