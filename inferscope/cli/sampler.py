"""Sample what devices and hosts count, into a ring of its own that every reader finds by itself.

`run`, `serve` and `collect` start one themselves; by hand it is for counters that need root, and
for engines that were started without it. There is one per device: a second one waits until the
first has ended. As root it becomes the user whose rings they are. Sources that have nothing to
tell say why, once, and are tried again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from inferscope.cli.counters import sampled_sources
from inferscope.cli.numbers import interval_ns
from inferscope.cli.saying import say
from inferscope.cli.stopping import stoppable
from inferscope.counters.cupti import NOT_PERMITTED, PROFILERS, may_profile
from inferscope.counters.dcgm import DEFAULT_URL
from inferscope.counters.privilege import become, owner_of
from inferscope.counters.processes import observed
from inferscope.counters.sampler import Settings, SourceReading, preload, read_once, sample
from inferscope.counters.source import DCGM_URL, SOURCES
from inferscope.errors import NotFound
from inferscope.json_document import Document, json_line
from inferscope.probe.clock import SystemClock
from inferscope.ring.discovery import ring_directory

_PM_NEEDS_ASKING = "only when asked for, with --counters pm: it may cost the device speed."


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
    """Sources, those that were not asked for included."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    what = parser.add_argument_group("what")
    what.add_argument(
        "--counters", type=sampled_sources, default="auto", metavar="LIST",
        help=f"auto, or some of {', '.join(SOURCES)} (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--device", action="append", default=[], metavar="ID",
        help="index or uuid, once per device (default: all that the driver shows)",
    )  # fmt: skip
    what.add_argument(
        "--pm-despite", action="append", choices=PROFILERS, default=[], metavar="NAME",
        help="a program that holds no counters now, though pm is refused because it could "
        f"({', '.join(PROFILERS)}); once per program",
    )  # fmt: skip
    what.add_argument(
        "--dcgm-url", metavar="URL",
        help=f"page of dcgm-exporter (default: {DCGM_URL} of the environment, which no list of "
        f"processes shows, else {DEFAULT_URL})",
    )  # fmt: skip
    when = parser.add_argument_group("when")
    when.add_argument(
        "--interval", type=interval_ns, default="100ms", metavar="TIME",
        help="between two readings (%(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--pm-interval", type=interval_ns, default="500us", metavar="TIME",
        help="windows of PM sampling (%(default)s)",
    )  # fmt: skip
    whose = parser.add_argument_group("beside whom")
    of = whose.add_mutually_exclusive_group()
    of.add_argument("--for", dest="engine", metavar="ENGINE_ID", help="end when it has ended")
    of.add_argument("--beside", type=int, metavar="PID", help="end when this process has ended")
    whose.add_argument("--dir", type=Path, help="the rings' folder (default: INFERSCOPE_DIR)")
    whose.add_argument(
        "--owner", type=int, metavar="UID", help="of the rings, for root (default: the folder's)"
    )
    how = parser.add_argument_group("output")
    how.add_argument("--once", action="store_true", help="print one reading of all and leave")
    how.add_argument("--json", action="store_true", help="with --once: print it as JSON")
    parser.epilog = """examples:
  inferscope sampler --once                       what can be counted here, and why not the rest
  sudo inferscope sampler --counters auto,pm --dir /tmp/inferscope-1000
"""


def run(options: argparse.Namespace) -> int:
    """Sample until somebody stops it, or print one reading."""
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
        _print(_looks(settings), is_json=options.json)
        return 0
    beside_pid = options.beside if options.engine is None else _pid_of(options.engine, folder)
    owner = owner_of(folder) if options.owner is None else options.owner
    if os.geteuid() == 0:
        preload(settings, clock=SystemClock())
    given_up = become(owner, keeps_counters="pm" in settings.sources)
    if given_up:
        _say(given_up)
    os.environ["INFERSCOPE_DIR"] = str(folder)
    with stoppable() as stop:
        sample(settings, stop, clock=SystemClock(), say=_say, beside_pid=beside_pid)
    return 0


def _pid_of(engine_id: str, folder: Path) -> int:
    """Return the process of an engine that was first."""
    there = observed(folder, time.monotonic_ns())
    pids = [process.pid for process in there if process.engine_id == engine_id]
    if not pids:
        raise NotFound(
            f"no engine {engine_id} runs under {folder}. `inferscope attach` lists them."
        )
    return pids[0]


def _looks(settings: Settings) -> list[SourceReading]:
    looks = read_once(settings, clock=SystemClock(), say=_say)
    if "pm" not in settings.sources:
        refused = may_profile() is False
        reason = f"{_PM_NEEDS_ASKING} {NOT_PERMITTED}" if refused else _PM_NEEDS_ASKING
        looks.append(SourceReading("pm", reason, [], []))
    return looks


def _print(looks: list[SourceReading], *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(json_line(SamplerDocument(sources=tuple(map(_source, looks)))))
        return
    for look in looks:
        if look.reason:
            sys.stdout.write(f"--  {look.source:<6} {look.reason}\n")
        for told in look.facts:
            about = told.reason or ", ".join(f"{word} {fact}" for word, fact in told.facts.items())
            mark, device = "--" if told.reason else "ok", told.device_uuid or "this machine"
            sys.stdout.write(f"{mark}  {look.source:<6} {device}: {about}\n")
        for told in look.samples:
            values = ", ".join(f"{word} {value:g}" for word, value in sorted(told.values.items()))
            sys.stdout.write(f"    {'':<6} {values}\n")


def _source(look: SourceReading) -> SampledSource:
    return SampledSource(
        look.source,
        look.reason,
        tuple(SampledDevice(each.device_uuid, each.reason, each.facts) for each in look.facts),
        tuple(
            DeviceSample(each.device_uuid, each.start_ns, each.end_ns, each.values)
            for each in look.samples
        ),
    )


def _say(line: str) -> None:
    say(f"sampler: {line}")
