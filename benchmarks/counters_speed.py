"""Cost of joining counter samples in the fold: µs per step over the same steps without samples.

The steps are those of `collector_speed`; two sources sample the engine's device ten times a second.
Steps are folded alternately without and with samples, in either order. The report gives the
difference's median, quartiles and minimum. Load on the core or its sibling enlarges all of them.
The cost has a part per step, a part per 100 ms bucket and a part per ended request, so it is
measured with steps of 9 ms and with 5,000 steps per second. Both last for more windows than a
regression needs; the report states which regressions succeeded. Steps of 9 ms are also folded with
PM sampling in place of the two sources: each contains 18 windows.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median, quantiles

from collector_speed import busy_engine
from msgspec.structs import replace

from inferscope.fold.fold import Collector
from inferscope.readers.merge import Item, Merger
from inferscope.records import SAMPLER_ROLE, Clock, CounterSample, EngineInfo, Record, RingOpened

DEVICE = "GPU-0"
SAMPLE_NS = 100_000_000
PM_WINDOW_NS = 500_000
PM_WORDS = ("sm_active_share", "busy_share", "dram_share", "tensor_share")
PM_BYTES = ("dram_read_bytes", "dram_write_bytes")
WALL_NS = 1_790_000_000_000_000_000
"""Nanoseconds by which the wall clock, which stamps PM samples, is ahead."""
SHAPES = {"9_ms": (9_000_000, 300_000, 1), "0.2_ms": (0, 100_000, 6)}
"""Least duration of a step and gap between steps, in nanoseconds, and the relative number of
steps; up to 0.4 ms are drawn on top."""


def samples(until_ns: int) -> Iterator[Record]:
    """Yield the samples of two sources of the device, from its first step on."""
    draw, now_ns = random.Random(0), 1_000_000_000
    while now_ns < until_ns:
        begin_ns, now_ns = now_ns, now_ns + SAMPLE_NS
        shares = {"sm_active_share": draw.random(), "dram_share": draw.random()}
        shares["dram_peak_bytes_per_s"] = 4.8e12
        yield CounterSample(now_ns + 3_000_000, DEVICE, begin_ns, now_ns, "gpm", shares)
        taken = {"energy_uj": draw.random() * 7e7, "busy_share": draw.random()}
        yield CounterSample(now_ns + 4_000_000, DEVICE, begin_ns, now_ns, "nvml", taken)


def pm_samples(until_ns: int) -> Iterator[Record]:
    """Yield the device's PM samples: every 100 ms an anchor and 200 windows."""
    draw, now_ns = random.Random(0), 1_000_000_000
    num = SAMPLE_NS // PM_WINDOW_NS
    while now_ns < until_ns:
        begin_ns, now_ns = now_ns, now_ns + SAMPLE_NS
        edges_ns = range(begin_ns, now_ns + 1, PM_WINDOW_NS)
        columns = {word: array("f", [draw.random() for _ in range(num)]) for word in PM_WORDS}
        values = {word: sum(column) / num for word, column in columns.items()}
        for word in PM_BYTES:
            columns[word] = array("f", [draw.random() * 2e9 for _ in range(num)])
            values[word] = sum(columns[word])
        read_ns = now_ns + 3_000_000
        yield Clock(read_ns, read_ns + WALL_NS, error_ns=500, host_ns=read_ns)
        yield CounterSample(
            read_ns, DEVICE, begin_ns, now_ns, "pm", values,
            starts_ns=array("q", edges_ns[:-1]).tobytes(),
            ends_ns=array("q", edges_ns[1:]).tobytes(),
            series={word: column.tobytes() for word, column in columns.items()},
            real_offset_ns=WALL_NS,
        )  # fmt: skip


def in_order(rings: Iterable[Iterable[Record]]) -> list[Item]:
    """Return the records of some rings, numbered from 1, in fold order."""
    merger = Merger()
    for ring, records in enumerate(rings, 1):
        for sequence, record in enumerate(records):
            merger.add(ring, sequence, record, b"")
    return merger.take(None)


def fold_us(items: list[Item], num_steps: int) -> tuple[Collector, float]:
    """Fold an engine's ring and a sampler's; return µs of processor time per step."""
    gc.collect()
    collector = Collector()
    collector.fold(0, RingOpened(1, 1, "made-up", "core", 0, 1, "host", "boot", 1, 1))
    collector.fold(0, RingOpened(1, 2, "host", SAMPLER_ROLE, 0, 1, "host", "boot", 1, 1))
    began = time.process_time()
    for item in items:
        collector.fold(item.ring, item.record)
    return collector, (time.process_time() - began) / num_steps * 1e6


def in_turns(
    without: list[Item], with_samples: list[Item], *, num_steps: int, num_turns: int
) -> dict[str, object]:
    """Fold records without and with samples alternately; return µs per step."""
    took_us: tuple[list[float], list[float]] = ([], [])
    found = None
    for turn in range(num_turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            collector, us = fold_us(with_samples if which else without, num_steps)
            took_us[which].append(us)
            if which:
                found = collector.engines["made-up"].lives.counters.found
    assert found is not None
    joins_us = [with_us - without_us for without_us, with_us in zip(*took_us, strict=True)]
    low, _, high = quantiles(joins_us, n=4, method="inclusive")
    return {
        "steps": num_steps,
        "without": round(median(took_us[0]), 1),
        "with": round(median(took_us[1]), 1),
        "join": round(median(joins_us), 1),
        "join_quartiles": [round(low, 1), round(high, 1)],
        "join_min": round(min(joins_us), 1),
        "join_of_fastest": round(min(took_us[1]) - min(took_us[0]), 1),
        "told_apart": {"sm": found.sm.now() is not None, "energy": found.energy.now() is not None},
    }


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=4_000)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=9)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "batch": options.batch,
        "turns": options.turns,
    }
    for name, (step_ns, gap_ns, times_as_many) in SHAPES.items():
        num_steps = options.steps * times_as_many
        records = [
            replace(record, device_uuid=DEVICE) if isinstance(record, EngineInfo) else record
            for record in busy_engine(num_steps, options.batch, step_ns=step_ns, gap_ns=gap_ns)
        ]
        without, until_ns = in_order([records]), records[-1].t_ns
        cases = {name: samples}
        if step_ns > PM_WINDOW_NS:
            cases[f"{name}_pm"] = pm_samples
        for case, sampled in cases.items():
            result[f"us_per_step_of_{case}"] = in_turns(
                without,
                in_order([records, sampled(until_ns)]),
                num_steps=num_steps,
                num_turns=options.turns,
            )
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
