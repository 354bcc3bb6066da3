"""The probe on against off, on the reference engine: what observing costs, and how sure that is.

One process, one engine; short stretches of decoding at a full batch alternate between the probe and
none, in random order within each pair, while a reader in another process follows the ring. For each
pair the ratio on/off of the mean step (throughput) and of the p99 step (TBT: one token per request
and step). The median ratio comes with a bootstrap confidence interval. Beside it, the time spent in
the probe's calls, measured within the engine.

The rule (ENGINE.md): calls ÷ step <= 0.5 %, and the interval's upper end <= 2 % on a CPU.

    python benchmarks/probe_overhead.py --pairs 30 --out probe_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.probe import EngineInfo, Probe

LARGEST_CALL_SHARE = 0.005
LARGEST_OVERHEAD = 0.02
CALLS = ("plan", "start", "stop", "slices", "emitted")
_NUM_RESAMPLES = 4000
READER = """
import sys, time
from pathlib import Path
from inferscope.ring.reader import RingReader
reader = RingReader(Path(sys.argv[1]))
while True:
    while reader.read():
        pass
    time.sleep(0.05)
"""


class Timed:
    """A probe whose calls are timed; everything else goes straight through."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.spent_ns = 0
        for name in CALLS:
            setattr(self, name, self._timed(getattr(probe, name)))

    @property
    def on(self) -> bool:
        """Tell whether the probe records."""
        return self._probe.on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._probe, name)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        now_ns = time.perf_counter_ns

        def timed(*given: Any, **named: Any) -> None:
            began_ns = now_ns()
            call(*given, **named)
            self.spent_ns += now_ns() - began_ns

        return timed


def decode(engine: Engine, probe: Any, batch: int, num_steps: int) -> list[int]:
    """Run a full batch for some steps under a probe; return each step's ns, prefill left out."""
    engine.probe = probe
    sampling = Sampling(max_tokens=num_steps + 4, ignore_eos=True, temperature=0.0)
    names = [engine.submit([7 + i % 90] * 4, sampling) for i in range(batch)]
    for _ in range(2):
        engine.step()
    took = []
    for _ in range(num_steps):
        began_ns = time.perf_counter_ns()
        engine.step()
        took.append(time.perf_counter_ns() - began_ns)
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    return took


def p99(values: list[int]) -> float:
    """Return the 99th percentile."""
    return float(sorted(values)[min(len(values) - 1, int(0.99 * len(values)))])


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_NUM_RESAMPLES)
    )
    low, high = medians[int(0.025 * _NUM_RESAMPLES)], medians[int(0.975 * _NUM_RESAMPLES)]
    return statistics.median(ratios), low, high


def compare(engine: Engine, probe: Probe, batch: int, *, pairs: int, steps: int) -> dict[str, Any]:
    """Run the pairs at one batch size."""
    draw = random.Random(batch)
    none = Probe.disabled()
    decode(engine, none, batch, steps)
    decode(engine, probe, batch, steps)
    means, tails, step_ns = [], [], []
    for _ in range(pairs):
        took: dict[bool, list[int]] = {}
        for is_on in draw.sample([True, False], 2):
            took[is_on] = decode(engine, probe if is_on else none, batch, steps)
        means.append(statistics.fmean(took[True]) / statistics.fmean(took[False]))
        tails.append(p99(took[True]) / p99(took[False]))
        step_ns.append(statistics.fmean(took[False]))
    timed = Timed(probe)
    decode(engine, timed, batch, steps)
    timed.spent_ns = 0
    decode(engine, timed, batch, 4 * steps)
    calls_ns = timed.spent_ns / (4 * steps + 2)
    mean, tail = interval(means), interval(tails)
    share = calls_ns / statistics.median(step_ns)
    return {
        "batch": batch,
        "step_ms": statistics.median(step_ns) / 1e6,
        "calls_us": calls_ns / 1e3,
        "calls_share": share,
        "throughput_overhead": [value - 1 for value in mean],
        "p99_overhead": [value - 1 for value in tail],
        "passes": share <= LARGEST_CALL_SHARE
        and mean[2] - 1 <= LARGEST_OVERHEAD
        and tail[2] - 1 <= LARGEST_OVERHEAD,
    }


def main() -> int:
    """Measure, print a table, write JSON; 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="random:small-100m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30, help="per stretch")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        most = max(options.batches)
        engine = load_engine(
            options.model,
            EngineOptions(
                max_running=most, token_budget=max(64, 4 * most), num_blocks=most * 16,
                dtype=options.dtype, prefix_cache=False,
            ),
        )  # fmt: skip
        probe = Probe.open(EngineInfo(0, "bench", model=options.model))
        reader = subprocess.Popen([sys.executable, "-c", READER, str(probe.path)])
        if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
            os.sched_setaffinity(reader.pid, {(os.cpu_count() or 1) - 1})
            os.sched_setaffinity(0, set(range((os.cpu_count() or 1) - 1)))
        try:
            rows = [
                compare(engine, probe, batch, pairs=options.pairs, steps=options.steps)
                for batch in options.batches
            ]
            state = probe.on
        finally:
            reader.kill()
            reader.wait()
            probe.close()
    print(
        f"{options.model}, {options.pairs} pairs of {options.steps} steps, {os.cpu_count()} cores, "
        f"load {load_before:.2f} before; probe {'on' if state else 'OFF'} at the end"
    )
    print(
        f"{'batch':>6}{'step ms':>9}{'calls µs':>10}{'share':>8}  overhead: mean [95 %], p99 [95 %]"
    )
    for row in rows:
        cells = "  ".join(
            f"{middle:+.2%} [{low:+.2%} {high:+.2%}]"
            for middle, low, high in (row["throughput_overhead"], row["p99_overhead"])
        )
        print(
            f"{row['batch']:>6}{row['step_ms']:>9.2f}{row['calls_us']:>10.1f}"
            f"{row['calls_share']:>8.2%}  {cells}  {'pass' if row['passes'] else 'FAIL'}"
        )
    passes = state and all(row["passes"] for row in rows)
    print(f"rule (share <= 0.5 %, upper ends <= 2 %): {'passed' if passes else 'FAILED'}")
    if options.out is not None:
        result = {"load_before": load_before, **vars(options), "rows": rows, "passes": passes}
        text = json.dumps(result, indent=1, default=str)
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
