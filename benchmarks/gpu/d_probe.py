"""(d) Overhead of the probe, on against off, at batches of 1, 64 and 256.

The same pairs as benchmarks/probe_overhead.py, with the probe timing steps by the device's events.
The mean is judged. The 99th percentile is only reported: half a minute of steps cannot
resolve half a per cent of it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from typing import Any

from load import blocks_for, open_engine
from pairs import Pair, interval, mean_ratio, p99_ratio
from part import Bank, Setting, main
from probe_overhead import LARGEST_CALL_SHARE, calls_ns, run_pairs

from inferscope.engine import Engine
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.probe import Probe

LARGEST_OVERHEAD = 0.005
_STEPS = 8
"""Steps per half of a pair."""
_LEAST_PAIRS, _MOST_PAIRS = 5, 2000
_LONGEST = 400
"""Tokens of a request, by when its batch is begun anew."""


def measure(setting: Setting, bank: Bank) -> None:
    """Run the pairs at each batch, each for its share of the time that is left."""
    batches = (1, 4) if setting.is_dry else (1, 64, 256)
    until_s = time.monotonic() + setting.seconds
    most = max(batches)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        engine = open_engine(
            setting,
            num_blocks=blocks_for(most, _LONGEST),
            max_running=most,
            token_budget=4 * most,
        )
        timer = step_timer(engine.model.device)
        probe = Probe.open(describe(engine, name=setting.model), timer=timer)
        try:
            for at, batch in enumerate(batches):
                name = f"batch {batch}"
                with bank.row(name):
                    left_s = max(0.0, until_s - time.monotonic())
                    by_s = time.monotonic() + left_s / (len(batches) - at)
                    row = compare(engine, probe, batch, until_s=by_s)
                    bank.keep(name, row, line_of(name, row))
        finally:
            probe.close()


def compare(engine: Engine, probe: Probe, batch: int, *, until_s: float) -> dict[str, Any]:
    """Run pairs at one batch until it is time to stop."""
    path_ns, hidden_ns = calls_ns(engine, probe, batch)
    pairs: list[Pair] = []
    with closing(run_pairs(engine, probe, batch, pairs=_MOST_PAIRS, steps=_STEPS)) as running:
        for pair in running:
            pairs.append(pair)
            if len(pairs) >= _LEAST_PAIRS and time.monotonic() > until_s:
                break
    mean = interval(pairs, mean_ratio)
    step_ns = statistics.median(ns for pair in pairs for ns in pair.off)
    share = path_ns / step_ns
    return {
        "batch": batch,
        "num_pairs": len(pairs),
        "step_ms": step_ns / 1e6,
        "calls_us": path_ns / 1e3,
        "hidden_us": hidden_ns / 1e3,
        "calls_share": share,
        "throughput_overhead": mean,
        "pooled_p99_overhead": p99_ratio(pairs) - 1,
        "is_on_at_the_end": probe.on,
        "passes": probe.on and share <= LARGEST_CALL_SHARE and mean[2] <= LARGEST_OVERHEAD,
    }


def line_of(name: str, row: dict[str, Any]) -> str:
    """Return a batch as a line."""
    middle, low, high = row["throughput_overhead"]
    verdict = "passes" if row["passes"] else "does NOT pass"
    return (
        f"{name}: step {row['step_ms']:.2f} ms, calls {row['calls_us']:.1f} µs "
        f"({row['calls_share']:.2%}) and {row['hidden_us']:.1f} µs behind launches, mean "
        f"{middle:+.2%} [{low:+.2%} {high:+.2%}] over "
        f"{row['num_pairs']} pairs: {verdict}; p99 {row['pooled_p99_overhead']:+.2%}"
        + ("" if row["is_on_at_the_end"] else "; the probe was OFF at the end")
    )


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
