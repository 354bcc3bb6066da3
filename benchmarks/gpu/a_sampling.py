"""(a) Do the sampler's sources work here, at which rate, and what do they cost the engine?

A copy of known size must show its bytes. Then decoding runs in turn without PM sampling and with
it, at windows of 1000, 500 and 100 µs: step times in pairs, the SM clock meanwhile, windows lost.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from load import Decoding, open_engine
from pairs import Pair, interval, mean_ratio
from part import Setting, Unmet, main
from watched import Sampler, Windows

from inferscope.counters.nvml_devices import open_nvml
from inferscope.counters.source import Unavailable

INTERVALS_US = (1000, 500, 100)
_PAIRS = 3
_COPY_BYTES = 1 << 30
_NUM_COPIES = 64


def measure(setting: Setting) -> dict[str, Any]:
    """Sample a copy, then decoding with and without."""
    setting.need_gpu()
    result: dict[str, Any] = {"copy": copy_bytes(), "intervals": []}
    engine = open_engine(setting)
    decoding = Decoding(engine, batch=16, context=512)
    decoding.run(8)
    steps = max(8, round(setting.seconds / (len(INTERVALS_US) * _PAIRS * 6) / 0.015))
    for interval_us in INTERVALS_US:
        result["intervals"].append(compare(decoding, interval_us, steps))
    decoding.close()
    result["lines"] = [
        f"copy: {result['copy']['measured_over_true']:.3f} of the bytes that were moved",
        *(
            f"PM {row['interval_us']} µs: windows {row['window_us']:.0f} µs, "
            f"{row['num_dropped']:.0f} lost, step {row['overhead'][0]:+.2%} "
            f"[{row['overhead'][1]:+.2%} {row['overhead'][2]:+.2%}], "
            f"SM clock {row['clock_on_mhz']} with, {row['clock_off_mhz']} without, "
            f"sampler {row['cpu_share']:.1%} of a core"
            for row in result["intervals"]
        ),
    ]
    return result


def copy_bytes() -> dict[str, Any]:
    """Copy a known number of bytes under PM sampling."""
    source = torch.ones(_COPY_BYTES // 4, device="cuda")
    copied = torch.zeros_like(source)
    torch.cuda.synchronize()
    with Sampler("nvml,gpm,pm") as sampler:
        start_ns = time.monotonic_ns()
        for _ in range(_NUM_COPIES):
            copied.copy_(source)
        torch.cuda.synchronize()
        end_ns = time.monotonic_ns()
        time.sleep(0.3)
    samples = sampler.of("pm")
    moved = [
        Windows(samples, word).amount(start_ns - 2_000_000, end_ns + 2_000_000)
        for word in ("dram_read_bytes", "dram_write_bytes")
    ]
    true = 2 * _NUM_COPIES * _COPY_BYTES
    known = sum(bytes_ for bytes_ in moved if bytes_ is not None)
    return {
        "true_bytes": true,
        "read_bytes": moved[0],
        "write_bytes": moved[1],
        "measured_over_true": known / true,
        "facts": sampler.facts("pm"),
        "sources": {
            name: len([one for one in sampler.samples if one.source == name and one.values])
            for name in ("nvml", "gpm", "pm")
        },
    }


def compare(decoding: Decoding, interval_us: int, steps: int) -> dict[str, Any]:
    """Decode in turn without and with PM sampling."""
    pairs, clocks, dropped, cpu, lengths, lines = [], {True: [], False: []}, 0.0, [], [], []
    for _ in range(_PAIRS):
        off, off_mhz = timed(decoding, steps)
        with Sampler("pm", pm_interval_us=interval_us) as sampler:
            on, on_mhz = timed(decoding, steps)
        samples = sampler.of("pm")
        dropped += sum(one.values.get("num_dropped", 0.0) for one in samples)
        windows = Windows(samples, "busy_share")
        lengths.append(float(statistics.median((windows.ends - windows.starts).tolist())))
        cpu.append(sampler.cpu_share or 0.0)
        lines += sampler.lines
        clocks[True] += on_mhz
        clocks[False] += off_mhz
        pairs.append(Pair(on, off))
    return {
        "interval_us": interval_us,
        "window_us": statistics.median(lengths) / 1e3,
        "num_dropped": dropped,
        "overhead": interval(pairs, mean_ratio),
        "clock_on_mhz": statistics.median(clocks[True]) if clocks[True] else None,
        "clock_off_mhz": statistics.median(clocks[False]) if clocks[False] else None,
        "cpu_share": statistics.median(cpu),
        "said": lines,
    }


def timed(decoding: Decoding, num_steps: int) -> tuple[list[int], list[int]]:
    """Decode; return each few steps' nanoseconds and the SM clock after them."""
    took, clocks = [], []
    for _ in range(num_steps // 4):
        took.append(round(decoding.run(4).step_ns))
        clocks += clock_mhz()
    return took, clocks


def clock_mhz() -> list[int]:
    """Return the SM clock now; nothing where NVML is not there."""
    try:
        nvml = open_nvml()
    except Unavailable as reason:
        raise Unmet(str(reason)) from None
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    found = [int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))]
    nvml.nvmlShutdown()
    return found


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
