"""Cost of the probe's calls, in sequence with warm caches.

The lower bound: within an engine, whose weights push our code out of the cache between two steps,
the same calls cost several times as much (probe_overhead.py measures that). Prints ns per call and
µs per step at batch 1, 16 and 64, switched on and off: the best of many rounds over some seconds,
for a shared machine is slower for seconds at a time, and the median of the rounds beside it; and
the bytes that a step's records take in the ring. `same` is a step of unchanged rows: `same_step`
in place of plan, slices and emitted, which come every 257th step.

    python benchmarks/probe_cost.py --out probe_cost.json

With --beside N the steps are those of an engine whose device computes for 10 ms, while N threads of
the process compute in Python; printed are the mean and the largest cost of a step. --folder says
where the ring is: on a disk or in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferscope.probe import EngineInfo, Probe
from inferscope.records import (
    DECODE,
    Emitted,
    Record,
    StepPlan,
    StepSame,
    StepSlices,
    StepSpan,
)
from inferscope.ring.layout import frame_bytes
from inferscope.ring.reader import Frame, RingReader

BATCHES = (1, 16, 64)
TARGET_ON_US, TARGET_OFF_US = 15.0, 1.0
CALLS = ("plan", "start", "stop", "slices", "emitted")


def machine() -> dict[str, Any]:
    """Describe this machine and its load."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def calls(probe: Probe, batch: int) -> dict[str, Callable[[], None]]:
    """Return a step's calls in an engine's order."""
    indices = [probe.queued(f"request-{i}", prompt_tokens=500) for i in range(batch)]
    ones, zeros, phases = (1,) * batch, (0,) * batch, (DECODE,) * batch
    contexts = tuple(range(500, 500 + batch))
    return {
        "plan": lambda: probe.plan(
            7, start_ns=1, end_ns=2, waiting=3, running=batch, blocks_used=900, blocks_total=1000
        ),
        "start": lambda: probe.start(7),
        "stop": lambda: probe.stop(7),
        "slices": lambda: probe.slices(
            7, requests=indices, phases=phases, tokens=ones, contexts=contexts,
            flags=zeros, sampled=ones,
        ),
        "emitted": lambda: probe.emitted(indices, ones, step=7),
    }  # fmt: skip


def measure(probe: Probe, batch: int, *, repeats: int, steps: int) -> dict[str, float]:
    """Return the best of several rounds: ns per call, and µs for a step of them all."""
    parts = calls(probe, batch)
    sequence = [parts[name] for name in CALLS]
    best = dict.fromkeys((*CALLS, "step_us"), float("inf"))
    rounds_us = []
    now_ns = time.perf_counter_ns
    for _ in range(repeats):
        spent_ns = dict.fromkeys(CALLS, 0)
        for _ in range(steps):
            for name in CALLS:
                began_ns = now_ns()
                parts[name]()
                spent_ns[name] += now_ns() - began_ns
        for name in CALLS:
            best[name] = min(best[name], spent_ns[name] / steps)
        began_ns = now_ns()
        for _ in range(steps):
            for call in sequence:
                call()
        rounds_us.append((now_ns() - began_ns) / steps / 1e3)
    best["step_us"] = min(rounds_us)
    best["median_us"] = statistics.median(rounds_us)
    return {name: round(value, 2) for name, value in best.items()}


class Repeated:
    """An engine's steps of unchanged rows: recorded by `same_step`, or in full if it refuses."""

    def __init__(self, probe: Probe, batch: int) -> None:
        self.probe, self.step, self.spent_ns = probe, 0, 0
        self.batch = batch
        self.indices = [probe.queued(f"again-{i}", prompt_tokens=500) for i in range(batch)]
        self.ones, self.phases = (1,) * batch, (DECODE,) * batch
        self.contexts = tuple(range(500, 500 + batch))

    def one(self) -> None:
        """Record and time a step, including the previous step's emission."""
        self.step = step = self.step + 1
        probe, numbers = self.probe, {"waiting": 3, "running": self.batch, "blocks_used": 900}
        now_ns = time.perf_counter_ns
        began_ns = now_ns()
        at_ns = time.monotonic_ns()
        is_same = probe.same_step(
            step, start_ns=at_ns, end_ns=at_ns, blocks_total=1000, **numbers,
            emitted_step=step - 1, emitted_ns=at_ns,
        )  # fmt: skip
        self.spent_ns += now_ns() - began_ns
        if not is_same:
            probe.emitted(self.indices, self.ones, step=step - 1, at_ns=at_ns)
            probe.plan(step, start_ns=at_ns, end_ns=at_ns, blocks_total=1000, **numbers)
            probe.slices(
                step, requests=self.indices, phases=self.phases, tokens=self.ones,
                contexts=self.contexts, sampled=self.ones,
            )  # fmt: skip
        probe.start(step)
        probe.stop(step)


def measure_same(probe: Probe, batch: int, *, repeats: int, steps: int) -> dict[str, float]:
    """Return ns of a `same_step`, and µs and bytes of a step with its span."""
    engine = Repeated(probe, batch)
    rounds_us, calls_ns = [], []
    now_ns = time.perf_counter_ns
    for _ in range(repeats):
        engine.spent_ns, began_ns = 0, now_ns()
        for _ in range(steps):
            engine.one()
        rounds_us.append((now_ns() - began_ns) / steps / 1e3)
        calls_ns.append(engine.spent_ns / steps)
    return {
        "same_step": round(min(calls_ns), 2),
        "step_us": round(min(rounds_us), 2),
        "median_us": round(statistics.median(rounds_us), 2),
        "bytes": bytes_per_step(probe, (StepSame, StepSpan)),
    }


def bytes_per_step(probe: Probe, kinds: tuple[type[Record], ...]) -> float:
    """Return the mean bytes that a frame of each of these records occupies in the ring."""
    sizes: dict[int, list[int]] = {kind.CODE: [] for kind in kinds}
    if probe.path is None:
        return 0.0
    reader = RingReader(probe.path)
    while frames := reader.read():
        for frame in frames:
            if isinstance(frame, Frame) and frame.code in sizes:
                sizes[frame.code].append(frame_bytes(len(frame.payload)))
    reader.close()
    return round(sum(statistics.mean(each) for each in sizes.values() if each), 1)


def measure_beside(probe: Probe, num_threads: int, *, steps: int) -> tuple[float, float]:
    """Return mean and maximum of a step's cost in µs, at batch 64 with computing threads."""
    parts = calls(probe, 64)
    is_over = False

    def compute() -> None:
        while not is_over:
            pass

    threads = [threading.Thread(target=compute) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    costs_us = []
    now_ns = time.perf_counter_ns
    for _ in range(steps):
        began_ns = now_ns()
        parts["plan"]()
        parts["start"]()
        launched_ns = now_ns()
        time.sleep(0.01)
        ended_ns = now_ns()
        parts["stop"]()
        parts["slices"]()
        parts["emitted"]()
        costs_us.append((now_ns() - ended_ns + launched_ns - began_ns) / 1e3)
    is_over = True
    for thread in threads:
        thread.join()
    return statistics.mean(costs_us), max(costs_us)


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--folder", type=Path, help="make the ring in this folder")
    parser.add_argument("--beside", type=int, metavar="N", help="beside N computing threads")
    options = parser.parse_args()
    os.environ["INFERSCOPE_BUDGET"] = "2"  # nothing but the probe runs here
    rows, same_rows = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        if options.beside is not None:
            probe = Probe.open(EngineInfo(0, "bench"))
            mean_us, most_us = measure_beside(probe, options.beside, steps=options.steps)
            probe.close()
            print(f"beside {options.beside}: mean {mean_us:.1f} µs per step, most {most_us:.0f}")
            return
        for state in ("on", "off"):
            for batch in BATCHES:
                probe = Probe.open(EngineInfo(0, "bench")) if state == "on" else Probe.disabled()
                row = measure(probe, batch, repeats=options.repeats, steps=options.steps)
                row["bytes"] = bytes_per_step(probe, (StepPlan, StepSlices, StepSpan, Emitted))
                rows.append({"probe": state, "batch": batch, **row})
                probe.close()
        for batch in BATCHES:
            probe = Probe.open(EngineInfo(0, "bench"))
            same = measure_same(probe, batch, repeats=options.repeats, steps=options.steps)
            same_rows.append({"batch": batch, **same})
            probe.close()
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"{'probe':<6}{'batch':>6}"
        + "".join(f"{name:>9}" for name in CALLS)
        + f"{'step µs':>9}{'median':>8}{'bytes':>7}"
    )
    for row in rows:
        cells = "".join(f"{row[name]:>9.0f}" for name in CALLS)
        print(
            f"{row['probe']:<6}{row['batch']:>6}{cells}{row['step_us']:>9.2f}{row['median_us']:>8.2f}"
            f"{row['bytes']:>7.0f}"
        )
    for row in same_rows:
        print(
            f"{'same':<6}{row['batch']:>6}{row['same_step']:>9.0f} ns"
            f"{row['step_us']:>42.2f}{row['median_us']:>8.2f}{row['bytes']:>7.0f}"
        )
    on_us = next(r["step_us"] for r in rows if r["probe"] == "on" and r["batch"] == BATCHES[-1])
    off_us = max(r["step_us"] for r in rows if r["probe"] == "off")
    verdict = "met" if on_us <= TARGET_ON_US and off_us <= TARGET_OFF_US else "missed"
    print(
        f"target (batch 64 on <= {TARGET_ON_US:.0f} µs, off <= {TARGET_OFF_US:.0f} µs): {verdict}"
    )
    if options.out is not None:
        result = {"machine": about, "rows": rows, "same": same_rows, "target": verdict}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
