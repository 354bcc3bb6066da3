"""Overhead of the probe on the reference engine: probe on against off, with its uncertainty.

One process, one engine, one batch decoding; a few steps with the probe and as many without, in
random order, make a pair, while a reader in another process follows the ring. What else the machine
does meets both halves of a pair alike. From all pairs: the median ratio on/off of the mean step
(throughput), and from groups of ten pairs the median ratio of the 99th percentile (TBT: one token
per request and step), each with a bootstrap interval. Beside it, the time spent in the probe's
calls on the step's path, less what the same stopwatch reads around a probe that is off.

The rule (ENGINE.md): calls ÷ step <= 0.5 %, and both intervals' upper ends <= 2 % on a CPU.

    python benchmarks/probe_overhead.py --pairs 400 --out probe_overhead.json
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
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pairs import Pair, grouped, interval, mean_ratio, tail_ratio

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.probe import EngineInfo, Probe

LARGEST_CALL_SHARE = 0.005
LARGEST_OVERHEAD = 0.02
CALLS = ("plan", "start", "stop", "slices", "emitted")
MARKS = ("begin", "end", "book")
"""What takes the place of `start` and `stop` on a device that computes beside the host."""
_PAIRS_PER_BATCH = 20
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


class CallTimes:
    """Nanoseconds spent in the probe's calls.

    Attributes:
        path_ns: before a launch, or while the device waits for the host.
        hidden_ns: behind a launch, while the device computes.
    """

    def __init__(self) -> None:
        self.path_ns = self.hidden_ns = 0
        self.is_hidden = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that adds its time."""
        now_ns = time.perf_counter_ns

        def timed(*given: Any, **named: Any) -> Any:
            began_ns = now_ns()
            answer = call(*given, **named)
            took_ns = now_ns() - began_ns
            if self.is_hidden:
                self.hidden_ns += took_ns
            else:
                self.path_ns += took_ns
            return answer

        return timed


class Timed:
    """A probe, or its marks, with timed calls; all other attributes are passed through."""

    def __init__(self, timed: Any, times: CallTimes, names: tuple[str, ...] = CALLS) -> None:
        self._timed = timed
        self._times = times
        for name in names:
            setattr(self, name, times.timed(getattr(timed, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timed, name)

    @property
    def hidden(self) -> AbstractContextManager[None]:
        """Return the context of calls behind a launch."""
        return self._behind_launch()

    def marks(self) -> Any:
        """Return the marks, timed, where the probe has any."""
        marks = self._timed.marks()
        return None if marks is None else Timed(marks, self._times, MARKS)

    @contextmanager
    def _behind_launch(self) -> Iterator[None]:
        with self._timed.hidden:
            self._times.is_hidden = True
            try:
                yield
            finally:
                self._times.is_hidden = False


class Decoding:
    """A full batch that decodes until it is closed."""

    def __init__(self, engine: Engine, probe: Probe, batch: int, *, most_steps: int) -> None:
        """Submit the batch and run its prefill; the probe knows its requests."""
        self._engine = engine
        self._probe = probe
        engine.probe = probe
        sampling = Sampling(max_tokens=most_steps, ignore_eos=True, temperature=0.0)
        self._names = [engine.submit([7 + i % 90] * 4, sampling) for i in range(batch)]
        self.run(probe, 4)

    def run(self, probe: Any, num_steps: int) -> list[int]:
        """Decode under a probe; return each step's nanoseconds."""
        self._engine.probe = probe
        took = []
        for _ in range(num_steps):
            began_ns = time.perf_counter_ns()
            self._engine.step()
            took.append(time.perf_counter_ns() - began_ns)
        return took

    def close(self) -> None:
        """End the batch."""
        self._engine.probe = self._probe
        for name in self._names:
            self._engine.cancel(name)
        while self._engine.has_work:
            self._engine.step()


def run_pairs(
    engine: Engine, probe: Probe, batch: int, *, pairs: int, steps: int
) -> Generator[Pair, None, None]:
    """Yield pairs of stretches; contexts start anew now and then, for they grow.

    Closed before its end, it ends the batch as it stands.
    """
    draw = random.Random(batch)
    none = Probe.disabled()
    for first in range(0, pairs, _PAIRS_PER_BATCH):
        num = min(_PAIRS_PER_BATCH, pairs - first)
        decoding = Decoding(engine, probe, batch, most_steps=2 * (steps + 1) * (num + 1) + 16)
        try:
            for _ in range(num):
                took: dict[bool, list[int]] = {}
                for is_on in draw.sample([True, False], 2):
                    observed = probe if is_on else none
                    decoding.run(observed, 1)  # a server changes its probe never, and we each time
                    took[is_on] = decoding.run(observed, steps)
                yield Pair(took[True], took[False])
        finally:
            decoding.close()


def calls_ns(engine: Engine, probe: Probe, batch: int) -> tuple[float, float]:
    """Return the nanoseconds of a step's calls in the engine, whose weights evict the caches.

    Returns:
        on the step's path, and behind its launch.
    """
    read = {True: [0.0, 0.0], False: [0.0, 0.0]}
    num_rounds, num_steps = 12, 10
    decoding = Decoding(engine, probe, batch, most_steps=2 * num_rounds * (num_steps + 1) + 16)
    for _ in range(num_rounds):
        for is_on, sums in read.items():
            times = CallTimes()
            timed = Timed(probe if is_on else Probe.disabled(), times)
            decoding.run(timed, 1)
            times.path_ns = times.hidden_ns = 0
            decoding.run(timed, num_steps)
            sums[0] += times.path_ns / num_steps / num_rounds
            sums[1] += times.hidden_ns / num_steps / num_rounds
    decoding.close()
    path_ns, hidden_ns = (on - off for on, off in zip(read[True], read[False], strict=True))
    return path_ns, hidden_ns


def compare(engine: Engine, probe: Probe, batch: int, *, pairs: int, steps: int) -> dict[str, Any]:
    """Run the pairs at one batch size."""
    measured = list(run_pairs(engine, probe, batch, pairs=pairs, steps=steps))
    path_ns, hidden_ns = calls_ns(engine, probe, batch)
    step_ns = statistics.median(ns for pair in measured for ns in pair.off)
    mean = interval(measured, mean_ratio)
    tail = interval(grouped(measured), tail_ratio)
    share = path_ns / step_ns
    return {
        "batch": batch,
        "step_ms": step_ns / 1e6,
        "calls_us": path_ns / 1e3,
        "hidden_us": hidden_ns / 1e3,
        "calls_share": share,
        "throughput_overhead": mean,
        "p99_overhead": tail,
        "passes": share <= LARGEST_CALL_SHARE
        and mean[2] <= LARGEST_OVERHEAD
        and tail[2] <= LARGEST_OVERHEAD,
    }


def main() -> int:
    """Measure, print a table and write JSON; return 1 if the rule does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="random:small-100m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=4, help="per half of a pair")
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
                max_running=most, token_budget=max(64, 4 * most), num_blocks=most * 18,
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
        f"{options.model}, {options.pairs} pairs of {options.steps} + {options.steps} steps, "
        f"{os.cpu_count()} cores, load {load_before:.2f} before; "
        f"probe {'on' if state else 'OFF'} at the end"
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
