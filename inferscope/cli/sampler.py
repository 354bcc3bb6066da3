"""Sample hardware counters of GPUs and host into a ring, which all readers find automatically.

`run`, `serve` and `collect` start a sampler themselves. Start one by hand for counters that need
root, and for engines that run without a sampler. Each device has one sampler: a second one waits
until the first has exited. A sampler started as root switches to the owner of the rings. A
source without values reports the reason once and is retried.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from inferscope.cli.arg_types import interval_ns
from inferscope.cli.counters import parse_sources
from inferscope.cli.status_line import write_status
from inferscope.cli.stopping import stoppable
from inferscope.errors import NotFound
from inferscope.json_document import Document, json_line
from inferscope.probe import SystemClock
from inferscope.ring import ring_directory
from inferscope.sampler import (
    DCGM_URL,
    DEFAULT_URL,
    SOURCES,
    Settings,
    SourceReading,
    become,
    observed,
    owner_of,
    preload,
    read_once,
    sample,
)
from inferscope.sampler.cupti import NOT_PERMITTED, PROFILERS, may_profile

_PM_NEEDS_ASKING = (
    "off by default, because it may slow the device down: enable it with --counters pm."
)


class SampledDevice(msgspec.Struct, frozen=True):
    """State of one device in one source."""

    device: str
    """Device's id as its driver writes it; empty for the host and for the source itself."""
    reason: str
    """Reason why the source reports nothing; empty where it does."""
    facts: dict[str, str]
    """Facts about the device, by name."""


class DeviceSample(msgspec.Struct, frozen=True):
    """Counter values over one window."""

    device: str
    """Device's id as its driver writes it; empty for the host."""
    start_ns: int
    """Start of the window on the monotonic clock."""
    end_ns: int
    """End of the window on the monotonic clock."""
    values: dict[str, float]
    """Values by counter; each counter's name ends in its unit."""


class SampledSource(msgspec.Struct, frozen=True):
    """One reading of a source of counters."""

    source: str
    """Name of the source: nvml, gpm, pm, dcgm or host."""
    reason: str
    """Reason why it reports nothing; empty where it does."""
    devices: tuple[SampledDevice, ...]
    """Devices that the source knows."""
    samples: tuple[DeviceSample, ...]
    """Samples of the reading."""


class SamplerDocument(Document, frozen=True, kw_only=True):
    """One reading of all sources (`inferscope sampler --once --json`)."""

    sources: tuple[SampledSource, ...]
    """Readings of all sources, including sources that are off."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_argument_group("what")
    what.add_argument(
        "--counters", type=parse_sources, default="auto", metavar="LIST",
        help=f"sources: auto, or a list of {', '.join(SOURCES)} (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--device", action="append", default=[], metavar="ID",
        help="index or UUID of a device; repeatable (default: all devices)",
    )  # fmt: skip
    what.add_argument(
        "--pm-despite", action="append", choices=PROFILERS, default=[], metavar="NAME",
        help="use pm although this profiler runs and may hold the counters: "
        f"{', '.join(PROFILERS)}; repeatable (default: none)",
    )  # fmt: skip
    what.add_argument(
        "--dcgm-url", metavar="URL",
        help=f"metrics page of dcgm-exporter (default: the variable {DCGM_URL}, which process "
        f"listings do not show, else {DEFAULT_URL})",
    )  # fmt: skip
    when = parser.add_argument_group("when")
    when.add_argument(
        "--interval", type=interval_ns, default="100ms", metavar="TIME",
        help="time between two readings (default: %(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--pm-interval", type=interval_ns, default="500us", metavar="TIME",
        help="window length of PM sampling (default: %(default)s)",
    )  # fmt: skip
    lifetime = parser.add_argument_group("lifetime and ownership")
    of = lifetime.add_mutually_exclusive_group()
    of.add_argument(
        "--for", dest="engine", metavar="ENGINE_ID", help="exit when this engine has ended"
    )
    of.add_argument("--beside", type=int, metavar="PID", help="exit when this process has exited")
    lifetime.add_argument("--dir", type=Path, help="folder of the rings (default: INFERSCOPE_DIR)")
    lifetime.add_argument(
        "--owner",
        type=int,
        metavar="UID",
        help="owner of the rings, if started as root (default: the folder's owner)",
    )
    how = parser.add_argument_group("output")
    how.add_argument(
        "--once", action="store_true", help="print one reading of all sources and exit"
    )
    how.add_argument("--json", action="store_true", help="print one reading as JSON and exit")
    parser.epilog = """examples:
  inferscope sampler --once                       which counters work here, and why others do not
  sudo inferscope sampler --counters auto,pm --dir /tmp/inferscope-1000
"""


def run(options: argparse.Namespace) -> int:
    """Sample until stopped, or print one reading."""
    folder = options.dir or ring_directory()
    settings = Settings(
        folder=folder,
        sources=options.counters,
        interval_ns=options.interval,
        pm_interval_ns=options.pm_interval,
        dcgm_url=options.dcgm_url or os.environ.get(DCGM_URL) or DEFAULT_URL,
        devices=tuple(options.device),
        pm_despite=tuple(options.pm_despite),
    )
    if options.once or options.json:
        _print(_readings(settings), is_json=options.json)
        return 0
    beside_pid = options.beside if options.engine is None else _pid_of(options.engine, folder)
    owner = owner_of(folder) if options.owner is None else options.owner
    if os.geteuid() == 0:
        preload(settings, clock=SystemClock())
    given_up = become(owner, keeps_counters="pm" in settings.sources)
    if given_up:
        _write_status(given_up)
    os.environ["INFERSCOPE_DIR"] = str(folder)
    with stoppable() as stop:
        sample(settings, stop, clock=SystemClock(), log_line=_write_status, beside_pid=beside_pid)
    return 0


def _pid_of(engine_id: str, folder: Path) -> int:
    """Return the pid of an engine's first process."""
    there = observed(folder, time.monotonic_ns())
    pids = [process.pid for process in there if process.engine_id == engine_id]
    if not pids:
        raise NotFound(
            f"no engine {engine_id} runs under {folder}. `inferscope attach` lists them."
        )
    return pids[0]


def _readings(settings: Settings) -> list[SourceReading]:
    readings = read_once(settings, clock=SystemClock(), log_line=_write_status)
    if "pm" not in settings.sources:
        refused = may_profile() is False
        reason = f"{_PM_NEEDS_ASKING} {NOT_PERMITTED}" if refused else _PM_NEEDS_ASKING
        readings.append(SourceReading("pm", reason, [], []))
    return readings


def _print(readings: list[SourceReading], *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(json_line(SamplerDocument(sources=tuple(map(_source, readings)))))
        return
    for reading in readings:
        if reading.reason:
            sys.stdout.write(f"--  {reading.source:<6} {reading.reason}\n")
        for fact in reading.facts:
            about = fact.reason or ", ".join(f"{name} {text}" for name, text in fact.facts.items())
            mark, device = "--" if fact.reason else "ok", fact.device_uuid or "this machine"
            sys.stdout.write(f"{mark}  {reading.source:<6} {device}: {about}\n")
        for sample_ in reading.samples:
            items = sorted(sample_.values.items())
            values = ", ".join(f"{name} {value:g}" for name, value in items)
            sys.stdout.write(f"    {'':<6} {values}\n")


def _source(reading: SourceReading) -> SampledSource:
    return SampledSource(
        reading.source,
        reading.reason,
        tuple(SampledDevice(each.device_uuid, each.reason, each.facts) for each in reading.facts),
        tuple(
            DeviceSample(each.device_uuid, each.start_ns, each.end_ns, each.values)
            for each in reading.samples
        ),
    )


def _write_status(line: str) -> None:
    write_status(f"sampler: {line}")
