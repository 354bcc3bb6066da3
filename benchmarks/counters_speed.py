"""What joining counter samples costs the fold: µs per step, beside folding the same steps without.

The steps are those of `collector_speed`; two sources sample the engine's device ten times a second.
Steps are folded without and with them in turns. A part of the cost comes with every step, another
with every tenth of a second, however many steps are in it, and a third with every request that
ends: so it is measured with steps of 9 ms, and with steps as short as 5,000 a second have.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from collector_speed import busy_engine
from msgspec.structs import replace

from inferscope.collector.fold import Collector
from inferscope.collector.merge import Item, Merger
from inferscope.records import SAMPLER_ROLE, CounterSample, EngineInfo, Record, RingOpened

DEVICE = "GPU-0"
SAMPLE_NS = 100_000_000
STEPS_NS = {"9_ms": (9_000_000, 300_000), "0.2_ms": (0, 100_000)}
"""What steps take at least and what is between them; up to 0.4 ms are drawn on top."""


def samples(until_ns: int) -> Iterator[Record]:
    """Yield what two sources tell of the device, from its first step on."""
    draw, now_ns = random.Random(0), 1_000_000_000
    while now_ns < until_ns:
        begin_ns, now_ns = now_ns, now_ns + SAMPLE_NS
        shares = {"sm_active_share": draw.random(), "dram_share": draw.random()}
        shares["dram_peak_bytes_per_s"] = 4.8e12
        yield CounterSample(now_ns + 3_000_000, DEVICE, begin_ns, now_ns, "gpm", shares)
        taken = {"energy_uj": draw.random() * 7e7, "busy_share": draw.random()}
        yield CounterSample(now_ns + 4_000_000, DEVICE, begin_ns, now_ns, "nvml", taken)


def in_order(rings: Iterable[Iterable[Record]]) -> list[Item]:
    """Return the records of some rings, numbered from 1, in the order of the fold."""
    merger = Merger()
    for ring, records in enumerate(rings, 1):
        for sequence, record in enumerate(records):
            merger.add(ring, sequence, record, b"")
    return merger.take(None)


def fold_us(items: list[Item], num_steps: int) -> float:
    """Fold an engine's ring and a sampler's; return the µs of processor time that a step took."""
    collector = Collector()
    collector.fold(0, RingOpened(1, 1, "made-up", "core", 0, 1, "host", "boot", 1, 1))
    collector.fold(0, RingOpened(1, 2, "host", SAMPLER_ROLE, 0, 1, "host", "boot", 1, 1))
    began = time.process_time()
    for item in items:
        collector.fold(item.ring, item.record)
    return (time.process_time() - began) / num_steps * 1e6


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=4_000)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "steps": options.steps,
        "batch": options.batch,
    }
    for name, (step_ns, gap_ns) in STEPS_NS.items():
        told = [
            replace(record, device_uuid=DEVICE) if isinstance(record, EngineInfo) else record
            for record in busy_engine(options.steps, options.batch, step_ns=step_ns, gap_ns=gap_ns)
        ]
        without, with_samples = in_order([told]), in_order([told, samples(told[-1].t_ns)])
        turns = [
            (fold_us(without, options.steps), fold_us(with_samples, options.steps))
            for _ in range(options.turns)
        ]
        result[f"us_per_step_of_{name}"] = {
            "without": round(median(without_us for without_us, _ in turns), 1),
            "with": round(median(with_us for _, with_us in turns), 1),
            "join": round(median(with_us - without_us for without_us, with_us in turns), 1),
            "join_min": round(min(with_us - without_us for without_us, with_us in turns), 1),
        }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
