"""Memory of the fold after every tenth of 24 hours of traffic.

Folds ten million slices of made-up steps, stretched over a day, with requests that come and go all
the time, Ticks included, as `collect` would. Nothing of a finished request may stay but what the
windows and the last few hundred requests hold, so the memory must stop growing early.

    python benchmarks/attribution_memory.py --out benchmarks/results/attribution_memory.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from collector_speed import busy_engine, memory_mb
from probe_cost import machine

from inferscope.fold.fold import Collector
from inferscope.readers.merge import Merger
from inferscope.records import RingOpened, decode, encode

_FOLD_EVERY = 400
_SETTLED = 2
"""Number of tenths after which memory may not grow."""
TARGET_MB = 2.0


def main() -> None:
    """Fold, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slices", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--out", type=Path, help="write the results to this file as JSON")
    options = parser.parse_args()

    num_steps = options.slices // options.batch
    step_ns = round(options.hours * 3600e9 / num_steps)
    collector, merger = Collector(), Merger()
    collector.fold(0, RingOpened(1, 1, "made-up", "core", 0, 1, "host", "boot", 1, 1))
    before_mb, buckets = memory_mb(), []
    day = busy_engine(
        num_steps, options.batch, step_ns=round(0.8 * step_ns), gap_ns=round(0.2 * step_ns)
    )
    next_ns = options.hours * 360e9
    print(f"{'hours':>6}{'MB':>9}{'finished':>11}{'records':>12}")
    for sequence, record in enumerate(day):
        payload = encode(record)
        merger.add(1, sequence, decode(record.CODE, payload), payload)
        if sequence % _FOLD_EVERY == 0:
            for item in merger.take(None):
                collector.fold(item.ring, item.record)
            if collector.now_ns >= next_ns:
                buckets.append(_look(collector))
                next_ns += options.hours * 360e9
    for item in merger.take(None):
        collector.fold(item.ring, item.record)
    if len(buckets) < 10:
        buckets.append(_look(collector))
    settled = [look["mb"] for look in buckets[_SETTLED - 1 :]]
    growth_mb = round(max(settled) - settled[0], 2)
    verdict = "met" if growth_mb <= TARGET_MB else "missed"
    print(f"target (no more than {TARGET_MB:.0f} MB beyond the second tenth): {verdict}")
    if options.out is not None:
        result = {
            "machine": machine(),
            "slices": num_steps * options.batch,
            "hours": options.hours,
            "before_mb": round(before_mb, 2),
            "tenths": buckets,
            "growth_after_second_tenth_mb": growth_mb,
            "target": verdict,
            "unjoined": collector.num_unjoined,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _look(collector: Collector) -> dict[str, float]:
    (engine,) = collector.engines.values()
    hours, mb = collector.now_ns / 3600e9, memory_mb()
    finished, num = engine.lives.num_finished, collector.num_records
    print(f"{hours:>6.1f}{mb:>9.1f}{finished:>11,}{num:>12,}", flush=True)
    return {"hours": round(hours, 2), "mb": round(mb, 2), "finished": finished, "records": num}


if __name__ == "__main__":
    main()
