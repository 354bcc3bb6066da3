"""(a) Do the sampler's sources work here, at which rate, and what do they cost the engine?

PM sampling first runs alone: copies and replays of a CUDA graph, both of known size, must show
their bytes, and begin and end where events say. Then come the rows of a few seconds each, and only
then decoding without it, with it, with it and without it again, at windows of 500, 1000 and 100 µs:
the part's limit cuts off what is last. At the end is torch's profiler, which may break the rest.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

import torch
from bursts import Burst, EventClock, bursts, copying, judged, median, replaying
from load import Decoding, blocks_for, open_engine
from pairs import Pair, interval, mean_ratio
from part import Bank, Setting, Unmet, main, release, shown
from watched import Sampler, window_lengths_ns

from inferscope.counters.cupti_search import usable
from inferscope.counters.nvml_devices import open_nvml
from inferscope.counters.source import Unavailable
from inferscope.engine import Engine
from inferscope.engine.devices import device_uuid
from inferscope.records import CounterSample

INTERVALS_US = (500, 1000, 100)
"""The sampler's own first."""
MOST_ROUNDS = 4
_BATCH, _CONTEXT = 16, 512
_STEPS, _WARM_STEPS, _STEPS_PER_STRETCH = 40, 8, 4
_NOBODY = 65534


def measure(setting: Setting, bank: Bank) -> None:
    """Sample copies, alone and beside others, then decoding with and without."""
    setting.need_gpu()
    until_s = time.monotonic() + setting.seconds
    with bank.row("pm alone"):
        copies_alone(setting, bank)
    release()
    with bank.row("clock"):  # before the profiler, which has CUPTI tell another clock
        bank.keep("clock", *clock_line())
    with bank.row("pm without root"):
        bank.keep("pm without root", *without_root(setting))
    with bank.row("pm beside nvml, gpm"):
        bank.keep("pm beside nvml, gpm", *beside_sources(setting))
    release()
    with bank.row("A/B"):
        in_turn(setting, bank, until_s=until_s)
    release()
    with bank.row("pm beside torch.profiler"):
        bank.keep("pm beside torch.profiler", *beside_profiler(setting))


def copies_alone(setting: Setting, bank: Bank) -> None:
    """Copy, then replay a graph of copies, PM sampling being the only source."""
    told: dict[str, tuple[list[Burst], float]] = {}
    work, num_bytes = copying()
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        # Anchored only now, and for each row: clocks drift while a sampler starts.
        clock = EventClock()
        told["copies"] = bursts(clock, work, num_bytes), clock.error_ns
        with bank.row("graph replays"):
            replay, clock = replaying(work), EventClock()
            told["graph replays"] = bursts(clock, replay, num_bytes), clock.error_ns
    samples, facts = sampler.of("pm"), sampler.facts("pm")
    about = " ".join(f"{word} {fact}" for word, fact in facts.items())
    bank.keep("pm facts", facts, f"pm: {about}")
    for name, (of_it, error_ns) in told.items():
        row = judged(of_it, samples) | {"anchor_error_us": error_ns / 1e3}
        bank.keep(
            name,
            row,
            f"{name}: {shown(row['measured_over_true'], '.3f')} of the bytes that were moved; "
            f"windows begin {shown(row['start_off_us'], '+.0f')} µs and end "
            f"{shown(row['end_off_us'], '+.0f')} µs off the events "
            f"(median, ± {error_ns / 1e3:.0f} µs)",
        )


class Turn(NamedTuple):
    """One interval's decoding without, with, with and without PM sampling, in this order."""

    pairs: list[Pair]
    on_mhz: list[int]
    off_mhz: list[int]
    lengths_ns: list[int]
    num_dropped: float
    cpu_share: float | None
    said: list[str]


def in_turn(setting: Setting, bank: Bank, *, until_s: float) -> None:
    """Compare at every interval, and again as long as there is time; rows stand after each."""
    most = _CONTEXT + 5 * (_STEPS + _WARM_STEPS)
    engine = open_engine(setting, num_blocks=blocks_for(_BATCH, most))
    clock = SmClock(device_uuid(engine.model.device))
    turns: dict[int, list[Turn]] = {interval_us: [] for interval_us in INTERVALS_US}
    for at in range(MOST_ROUNDS):
        for interval_us, found in turns.items():
            if at and time.monotonic() > until_s:
                return
            name = f"A/B {interval_us} µs"
            with bank.row(name):
                found.append(turn(setting, engine, interval_us, clock))
                keep_turns(bank, name, found)


def turn(setting: Setting, engine: Engine, interval_us: int, clock: SmClock) -> Turn:
    """Decode four halves: the batch's context grows meanwhile, for both sides alike."""
    off_mhz: list[int] = []
    on_mhz: list[int] = []
    with closing(Decoding(engine, batch=_BATCH, context=_CONTEXT)) as decoding:
        first = timed(decoding, clock, off_mhz)
        despite = setting.pm_despite
        with Sampler("pm", pm_interval_us=interval_us, pm_despite=despite) as sampler:
            sampler.of("pm")
            second, third = (timed(decoding, clock, on_mhz) for _ in range(2))
        fourth = timed(decoding, clock, off_mhz)
    samples = sampler.of("pm")
    return Turn(
        mirrored(first, second, third, fourth),
        on_mhz,
        off_mhz,
        window_lengths_ns(samples),
        sum(one.values.get("num_dropped", 0.0) for one in samples),
        sampler.cpu_share,
        sampler.lines,
    )


def mirrored(
    first: list[int], second: list[int], third: list[int], fourth: list[int]
) -> list[Pair]:
    """Pair the stretches of off, on, on, off: those as far from the middle, before and behind.

    What changes evenly (a context that grows, a device that warms up) is then the same on both
    sides of every pair.
    """
    return [
        Pair([one_on, other_on], [one_off, other_off])
        for one_off, one_on, other_on, other_off in zip(
            first, second, reversed(third), reversed(fourth), strict=True
        )
    ]


def keep_turns(bank: Bank, name: str, turns: list[Turn]) -> None:
    """Keep what all turns at an interval say."""
    pairs = [pair for each in turns for pair in each.pairs]
    overhead = interval(pairs, mean_ratio)
    row = {
        "num_turns": len(turns),
        "num_pairs": len(pairs),
        "window_us": median([ns / 1e3 for each in turns for ns in each.lengths_ns]),
        "num_dropped": sum(each.num_dropped for each in turns),
        "step_ms": statistics.median(sum(pair.off) / 2 for pair in pairs) / 1e6,
        "overhead": overhead,
        "overhead_by_turn": [mean_ratio(each.pairs) - 1 for each in turns],
        "clock_on_mhz": median([mhz for each in turns for mhz in each.on_mhz]),
        "clock_off_mhz": median([mhz for each in turns for mhz in each.off_mhz]),
        "cpu_share": median([each.cpu_share for each in turns if each.cpu_share is not None]),
        "said": [line for each in turns for line in each.said],
    }
    bank.keep(
        name,
        row,
        f"{name}: windows {shown(row['window_us'], '.0f')} µs, {row['num_dropped']:.0f} lost, step "
        f"{overhead[0]:+.2%} [{overhead[1]:+.2%} {overhead[2]:+.2%}], SM clock "
        f"{shown(row['clock_on_mhz'], '.0f')} with, {shown(row['clock_off_mhz'], '.0f')} without, "
        f"sampler {shown(row['cpu_share'], '.1%')} of a core",
    )


def timed(decoding: Decoding, clock: SmClock, clocks_mhz: list[int]) -> list[int]:
    """Decode; return each few steps' nanoseconds, after some that only wake the device up."""
    decoding.run(_WARM_STEPS)
    took = []
    for _ in range(_STEPS // _STEPS_PER_STRETCH):
        took.append(round(decoding.run(_STEPS_PER_STRETCH).step_ns))
        clocks_mhz += clock.mhz()
    return took


class SmClock:
    """The SM clock of a device by NVML, where that is there."""

    def __init__(self, uuid: str) -> None:
        """Begin with NVML, for as long as this process runs."""
        self._nvml: Any = None
        try:
            self._nvml = open_nvml()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Unavailable:
            return
        except self._nvml.NVMLError:
            self._nvml = None

    def mhz(self) -> list[int]:
        """Return the clock now; nothing where nobody tells it."""
        if self._nvml is None:
            return []
        try:
            return [int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))]
        except self._nvml.NVMLError:
            return []


def beside_sources(setting: Setting) -> tuple[dict[str, Any], str]:
    """Copy under all sources at once; say how much each told."""
    work, num_bytes = copying()
    with Sampler("nvml,gpm,pm", pm_despite=setting.pm_despite) as sampler:
        told = bursts(EventClock(), work, num_bytes)
        time.sleep(1.0)
    numbers = {
        name: sum(one.source == name and bool(one.values) for one in sampler.samples)
        for name in ("nvml", "gpm", "pm")
    }
    reasons = {one.source: one.reason for one in sampler.samples if one.reason}
    row = {"num_samples": numbers, "reasons": reasons, **judged(told, pm_of(sampler))}
    share = shown(row["measured_over_true"], ".3f")
    return row, f"pm beside nvml, gpm: samples {numbers}, {share} of the bytes" + "".join(
        f"; {source}: {reason}" for source, reason in reasons.items()
    )


def beside_profiler(setting: Setting) -> tuple[dict[str, Any], str]:
    """Copy with torch.profiler on, begun before PM sampling and after it."""
    work, num_bytes = copying()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    row: dict[str, Any] = {}
    despite = setting.pm_despite
    with (
        Sampler("pm", pm_despite=despite) as sampler,
        torch.profiler.profile(activities=kinds) as profiler,
    ):
        told = bursts(EventClock(), work, num_bytes)
    row["sampler first"] = {**judged(told, pm_of(sampler)), "num_kernels": kernels(profiler)}
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        with Sampler("pm", pm_despite=despite) as sampler:
            told = bursts(EventClock(), work, num_bytes)
    row["profiler first"] = {**judged(told, pm_of(sampler)), "num_kernels": kernels(profiler)}
    reasons = [one.reason for one in sampler.samples if one.reason]
    return row, "pm beside torch.profiler: " + ", ".join(
        f"{name} {shown(part['measured_over_true'], '.3f')} of the bytes, "
        f"{part['num_kernels']} copies in the trace"
        for name, part in row.items()
    ) + "".join(f"; pm: {reason}" for reason in reasons[:1])


def without_root(setting: Setting) -> tuple[dict[str, Any], str]:
    """Sample as a user who may nothing, and say what comes of it.

    Raises:
        Unmet: this is not root, so everything above was without.
    """
    if os.geteuid() != 0:
        raise Unmet("the other rows ran without root")
    work, _ = copying()
    with Sampler("pm", pm_despite=setting.pm_despite, user=_NOBODY) as sampler:
        work()
        torch.cuda.synchronize()
    reasons = [one.reason for one in sampler.samples if one.reason]
    row = {"num_samples": len(pm_of(sampler)), "reasons": reasons, "said": sampler.lines}
    return row, f"pm without root: {row['num_samples']} samples" + "".join(
        f"; {reason}" for reason in reasons[:1]
    )


def clock_line() -> tuple[dict[str, Any], str]:
    """Hold CUPTI's clock against the wall clock.

    Raises:
        Unmet: there is no CUPTI, or it tells no time.
    """
    try:
        library = ctypes.CDLL(usable().path)
    except Unavailable as reason:
        raise Unmet(str(reason)) from None
    stamp, found = ctypes.c_uint64(), []
    for _ in range(50):
        before_ns = time.time_ns()
        code = library.cuptiGetTimestamp(ctypes.byref(stamp))
        after_ns = time.time_ns()
        if code:
            raise Unmet(f"cuptiGetTimestamp: error {code}")
        found.append((after_ns - before_ns, stamp.value - (before_ns + after_ns) // 2))
    bracket_ns, off_ns = min(found)
    row = {"bracket_ns": bracket_ns, "off_ns": off_ns, "is_inside": 2 * abs(off_ns) <= bracket_ns}
    return row, f"CUPTI's clock: {off_ns} ns off the wall clock (looked at within {bracket_ns} ns)"


def pm_of(sampler: Sampler) -> list[CounterSample]:
    """Return PM samples; none where there were none."""
    return [one for one in sampler.samples if one.source == "pm" and one.values]


def kernels(profiler: Any) -> int:
    """Return how many copies on the device a trace holds."""
    return sum("Memcpy" in event.name or "copy" in event.name for event in profiler.events())


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
