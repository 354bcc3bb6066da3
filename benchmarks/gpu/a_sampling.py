"""(a) The sampler's sources: whether they work here, at which rate, and at what cost.

First come the facts of the machine and what `doctor` says. PM sampling then runs alone: copies and
replays of a CUDA graph, both of known size, must show their bytes, and kernels must begin and end
where events and the host's clock say. Next is decoding without it, with it, with it and without it
again, at windows of 500, 1000 and 100 µs, with the device's clocks; then PM beside GPM and NVML,
where the sampler's processor time goes, source by source and call by call, and what CUPTI itself
answers to a user without rights and to one with CAP_PERFMON alone. At the end is torch's profiler,
which may break the rest: the part's limit cuts off what is last.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bursts import Burst, EventClock, bursts, copying, judged, median, replaying
from edges import held, spin
from load import Decoding, blocks_for, open_engine
from pairs import Pair, interval, mean_ratio
from part import Bank, Setting, Unmet, is_gvisor, main, need_counters, release, shown
from watched import Sampler, window_lengths_ns

from inferscope.calibration import driver_version
from inferscope.engine import Engine
from inferscope.engine.devices import device_uuid
from inferscope.records import CounterSample
from inferscope.sampler.cupti.library import counter_holders, listed, may_profile
from inferscope.sampler.nvml_devices import open_nvml
from inferscope.sampler.source import Unavailable

INTERVALS_US = (500, 1000, 100)
"""The sampler's own first."""
PM_CLOCKS = ("gpc_clock_mhz", "sys_clock_mhz", "dram_clock_mhz")
MOST_ROUNDS = 4
_BATCH, _CONTEXT = 16, 512
_STEPS, _WARM_STEPS, _STEPS_PER_STRETCH = 40, 8, 4
_NOBODY = 65534
_CLOCK_US = 200
"""Windows by which edges are looked for: half as many to evaluate as at the shortest interval."""
_DOCTOR_S, _RIGHTS_S = 60.0, 45.0
_CALLS_S, _CALLS_LIMIT_S = 1.2, 40.0
"""How long each source is read alone, and how long all of them may take."""
_LEAST_CALL_SHARE = 0.001
"""Share of a core from which on a call is printed."""


def measure(setting: Setting, bank: Bank) -> None:
    """Keep the facts, then sample known work, alone and beside others, and decoding with it."""
    until_s = time.monotonic() + setting.seconds
    with bank.row("facts"):
        bank.keep("facts", *facts_of_machine())
    setting.need_gpu()
    with bank.row("pm alone"):
        copies_alone(setting, bank)
    release()
    with bank.row("clock"):
        bank.keep("clock", *clock_line(setting))
    with bank.row("A/B"):
        in_turn(setting, bank, until_s=until_s)
    release()
    with bank.row("pm beside nvml, gpm"):
        bank.keep("pm beside nvml, gpm", *beside_sources(setting))
    release()
    with bank.row("sampler's calls"):
        bank.keep("sampler's calls", *calls_of_sources())
    for name, rights in (("pm without root", "none"), ("pm with CAP_PERFMON", "perfmon")):
        with bank.row(name):
            bank.keep(name, *with_rights(setting, name, rights))
    with bank.row("pm beside torch.profiler"):
        bank.keep("pm beside torch.profiler", *beside_profiler(setting))


def facts_of_machine() -> tuple[dict[str, Any], str]:
    """Return the machine, its kernel and drivers, and all that `doctor` finds."""
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=_DOCTOR_S,
        check=True,
    )
    findings = json.loads(done.stdout)["checks"]
    row = {
        "uname_r": platform.release(),
        "is_gvisor": is_gvisor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "devices": [
            torch.cuda.get_device_name(at)
            for at in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        ],
        "uid": os.geteuid(),
        "may_profile": may_profile(),
        "doctor": findings,
    }
    missing = ", ".join(each["name"] for each in findings if not each["is_fine"])
    return row, (
        f"facts: kernel {row['uname_r']}{' (gVisor)' if row['is_gvisor'] else ''}, driver "
        f"{row['driver'] or '-'}, torch {row['torch']}, "
        f"{', '.join(row['devices']) or 'no device'}; doctor marks: {missing or 'nothing'}"
    )


def copies_alone(setting: Setting, bank: Bank) -> None:
    """Copy, then replay a graph of copies, PM sampling being the only source."""
    measured: dict[str, tuple[list[Burst], float]] = {}
    work, num_bytes = copying()
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        # Anchored only now, and for each row: clocks drift while a sampler starts.
        clock = EventClock()
        measured["copies"] = bursts(clock, work, num_bytes), clock.error_ns
        with bank.row("graph replays"):
            replay, clock = replaying(work), EventClock()
            measured["graph replays"] = bursts(clock, replay, num_bytes), clock.error_ns
    samples, facts = sampler.of("pm"), sampler.facts("pm")
    about = " ".join(f"{word} {fact}" for word, fact in facts.items())
    refused = sampler.refused_with_perfmon
    if refused:
        about += f"; only with CAP_SYS_ADMIN, with CAP_PERFMON: {refused}"
    row = {**facts, "said": sampler.lines, "refused_with_perfmon": refused}
    bank.keep("pm facts", row, f"pm: {about}")
    for name, (of_it, error_ns) in measured.items():
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
    pm_mhz: dict[str, list[float]]
    """The device's clocks by PM sampling itself, by word."""
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
        {word: [one.values[word] for one in samples if word in one.values] for word in PM_CLOCKS},
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
    """Keep the results of all turns at an interval."""
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
        "pm_clocks_mhz": {
            word: median([mhz for each in turns for mhz in each.pm_mhz[word]]) for word in PM_CLOCKS
        },
        "cpu_share": median([each.cpu_share for each in turns if each.cpu_share is not None]),
        "said": [line for each in turns for line in each.said],
    }
    bank.keep(
        name,
        row,
        f"{name}: windows {shown(row['window_us'], '.0f')} µs, {row['num_dropped']:.0f} lost, step "
        f"{overhead[0]:+.2%} [{overhead[1]:+.2%} {overhead[2]:+.2%}], SM clock "
        f"{shown(row['clock_on_mhz'], '.0f')} with, {shown(row['clock_off_mhz'], '.0f')} without "
        f"(GPC by PM {shown(row['pm_clocks_mhz']['gpc_clock_mhz'], '.0f')}), "
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
        """Return the SM clock now in MHz, None if it is unavailable."""
        if self._nvml is None:
            return []
        try:
            return [int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))]
        except self._nvml.NVMLError:
            return []


def beside_sources(setting: Setting) -> tuple[dict[str, Any], str]:
    """Copy under all sources at once; return each source's number of samples."""
    work, num_bytes = copying()
    with Sampler("nvml,gpm,pm", pm_despite=setting.pm_despite) as sampler:
        measured = bursts(EventClock(), work, num_bytes)
        time.sleep(1.0)
    numbers = {
        name: sum(one.source == name and bool(one.values) for one in sampler.samples)
        for name in ("nvml", "gpm", "pm")
    }
    reasons = {one.source: one.reason for one in sampler.samples if one.reason}
    row = {"num_samples": numbers, "reasons": reasons, **judged(measured, pm_of(sampler))}
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
        measured = bursts(EventClock(), work, num_bytes)
    row["sampler first"] = {**judged(measured, pm_of(sampler)), "num_kernels": kernels(profiler)}
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        with Sampler("pm", pm_despite=despite) as sampler:
            measured = bursts(EventClock(), work, num_bytes)
    row["profiler first"] = {**judged(measured, pm_of(sampler)), "num_kernels": kernels(profiler)}
    reasons = [one.reason for one in sampler.samples if one.reason]
    return row, "pm beside torch.profiler: " + ", ".join(
        f"{name} {shown(part['measured_over_true'], '.3f')} of the bytes, "
        f"{part['num_kernels']} copies in the trace"
        for name, part in row.items()
    ) + "".join(f"; pm: {reason}" for reason in reasons[:1])


def calls_of_sources() -> tuple[dict[str, Any], str]:
    """Return the processor time of each source alone, by the calls that it makes.

    Raises:
        Unmet: the kernel hides the counters.
        RuntimeError: the program did not come to its end.
    """
    need_counters()
    rows = printed("stages.py", str(_CALLS_S), limit_s=_CALLS_LIMIT_S)
    return rows, "sampler's calls:\n" + "\n".join(
        f"      {name:<28} {calls_shown(row)}" for name, row in rows.items()
    )


def calls_shown(row: dict[str, Any]) -> str:
    """Return one source's time for the table."""
    if "reason" in row:
        return str(row["reason"])
    per_read = row["num_windows"] / max(row["num_reads"], 1)
    parts = [f"{row['cpu_share']:.1%} of a core"]
    if "image_bytes" in row:
        image_mb = row["image_bytes"] / 1e6
        parts.append(f"{per_read:.0f} windows a read, image {image_mb:.1f} MB")
    parts += [
        f"{name} {call['num'] / max(row['num_reads'], 1):.0f} x {call['cpu_us']:.1f} µs "
        f"= {call['cpu_share']:.1%}"
        for name, call in row["calls"].items()
        if call["cpu_share"] >= _LEAST_CALL_SHARE
    ]
    parts += [
        f"Python {row['python_share']:.1%}",
        f"other threads {row['other_threads_share']:.1%}",
    ]
    return ", ".join(parts)


def with_rights(setting: Setting, name: str, rights: str) -> tuple[dict[str, Any], str]:
    """Ask CUPTI itself, as another user, for every step of PM sampling.

    Args:
        setting: of the part.
        name: the row's.
        rights: none or perfmon.

    Raises:
        Unmet: this process is not root, or the counters may be held.
    """
    if os.geteuid() != 0:
        raise Unmet("only root can become another user")
    need_counters()
    held_by = counter_holders(setting.pm_despite)
    if held_by:
        raise Unmet(f"{listed(held_by)} may hold the counters")
    row = asked(_NOBODY, rights)
    refused = [f"{step}: {result}" for step, result in row["steps"].items() if result != "ok"]
    return row, (
        f"{name} ({row['rights']}): {row['num_windows']} windows"
        + "".join(f"; refused at {line}" for line in refused)
    )


def asked(uid: int, rights: str) -> dict[str, Any]:
    """Return what a process of its own is answered, with few rights.

    Raises:
        RuntimeError: it did not come to its end.
    """
    return printed("rights.py", str(uid), rights, limit_s=_RIGHTS_S)


def printed(program: str, *words: str, limit_s: float) -> dict[str, Any]:
    """Return the JSON that a program beside this one prints.

    Raises:
        RuntimeError: it did not come to its end.
    """
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), *words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-300:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def clock_line(setting: Setting) -> tuple[dict[str, Any], str]:
    """Compare the stamps of PM sampling with the edges of kernels, by events and by the host."""
    with Sampler("pm", pm_interval_us=_CLOCK_US, pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        clock = EventClock()
        kernels_ = spin(clock)
    age_ns = sampler.newest_age_ns
    row = held(kernels_, sampler.of("pm")) | {
        "anchor_error_us": clock.error_ns / 1e3,
        "newest_age_ms": None if age_ns is None else age_ns / 1e6,
    }
    verdicts = {True: "inside", False: "NOT inside", None: "not seen inside"}
    return row, (
        f"clock: {row['num_seen']} of {row['num_kernels']} kernels seen, they begin "
        f"{shown(row['start_off_us'], '+.0f')} µs and end {shown(row['end_off_us'], '+.0f')} µs "
        f"off the events (median, ± {row['anchor_error_us']:.0f} µs), "
        f"{verdicts[row['is_inside']]} the host's brackets; newest window "
        f"{shown(row['newest_age_ms'], '.0f')} ms old, busy runs "
        f"{shown(row['shift_ms'], '+.3f')} ms off the kernels"
    )


def pm_of(sampler: Sampler) -> list[CounterSample]:
    """Return PM samples; none where there were none."""
    return [one for one in sampler.samples if one.source == "pm" and one.values]


def kernels(profiler: Any) -> int:
    """Return how many copies on the device a trace holds."""
    return sum("Memcpy" in event.name or "copy" in event.name for event in profiler.events())


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
