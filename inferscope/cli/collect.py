"""Follow every engine of this host and export what they do; one collector a host, or a shard of it.

Without a configuration it serves Prometheus on 127.0.0.1:9464. Engines come and go without a
restart. SIGUSR1 pins the records of the last and the next half minute, unless pins are off; SIGHUP
reads configuration and objectives again, and counters go on; Ctrl-C and SIGTERM send what is left
and end it.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from inferscope.cli.counters import add_counters_option, sample_beside, usual
from inferscope.cli.saying import say
from inferscope.cli.stopping import Stop, stoppable
from inferscope.collecting.config import Config, read_config
from inferscope.collecting.exporter_set import ExporterSet, check_exporters, make_exporters
from inferscope.collecting.lock import LOCK_NAME, only_collector
from inferscope.collecting.memory import configure_trim
from inferscope.collecting.service import Service
from inferscope.exporting import LiveExporter, live_exporter_names
from inferscope.foreign import without_secrets
from inferscope.probe.clock import SystemClock
from inferscope.ring.discovery import (
    find_engines,
    make_private,
    names_of,
    owner_of,
    reading_from,
)
from inferscope.slo.objective_text import objective_lines, objectives_summary

SWITCH_S = 0.001
"""A scrape takes the interpreter's lock some five times, and the fold does not let go of it before
it is asked for so long: by default 5 ms each time."""


GARBAGE = (50_000, 20, 50)
"""Of objects made, between two searches for cycles among them, and of these before a deeper one.
Records make none. By default, (700, 10, 10), all that is kept of thirty engines is searched so
often that it takes 39 µs of a step's 400; so it takes less than 10."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML (default: prometheus)")
    parser.add_argument(
        "--slo", type=Path, metavar="FILE", help="objectives to count good and bad requests by"
    )
    parser.add_argument(
        "--check", action="store_true", help="say what it would do and whether it could, and leave"
    )
    parser.add_argument(
        "--shard", metavar="K/N", help="of the host's engines the K-th of N parts (default: all)"
    )
    add_counters_option(parser)
    parser.epilog = f"""exporters installed: {", ".join(live_exporter_names())}

examples:
  inferscope collect
  inferscope collect --slo slo.yaml
  inferscope collect --config collect.yaml --check
  inferscope collect --config collect.yaml --shard 1/2   # and another one with 2/2
"""


def run(options: argparse.Namespace) -> int:
    """Collect."""
    read = partial(read_config, options.config, os.environ, slo=options.slo, shard=options.shard)
    config = read()
    exporters = make_exporters(config.exporters, config.shard)
    if options.check:
        return _check(config, exporters, usual(_sources(options, config)))
    configure_trim()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GARBAGE)
    if owner_of(config.rings) in (-1, os.geteuid()):
        make_private(config.rings)
    with only_collector(config.folder, config.shard), stoppable() as stop:
        flags = _Wishes(stop)
        signal.signal(signal.SIGUSR1, flags.pin)
        signal.signal(signal.SIGHUP, flags.reload)
        exporter_set = ExporterSet(
            exporters, sections=config.exporters, shard=config.shard, say=say
        )
        exporter_set.open()
        gc.freeze()  # what is loaded by now stays
        where = ("--dir", str(config.rings))
        counters = config.counters
        sampled = (*where, *counters.options)
        sample_beside(_sources(options, config), sampled, counters.environment)
        part = "" if config.shard.is_all else f", shard {config.shard} of its engines"
        say(f"collecting from {names_of(reading_from(config.rings))}{part}; Ctrl-C ends it")
        if config.slo.objectives is not None:
            say(f"counting good and bad requests: {objectives_summary(config.slo.objectives)}")
        service = Service(config, exporter_set, clock=SystemClock(), say=say, read=read)
        is_through = service.run(flags)
    if not is_through:  # a thread of an exporter hangs: the interpreter would wait for it
        os._exit(0)
    return 0


class _Wishes:
    """What signals ask for."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.wants_pin = False
        self.wants_reload = False

    @property
    def stop_requested(self) -> bool:
        """Tell whether it is to end."""
        return self._stop.stop_requested

    def pin(self, number: int, frame: FrameType | None) -> None:
        """Note that somebody wants a pin."""
        self.wants_pin = True

    def reload(self, number: int, frame: FrameType | None) -> None:
        """Note that the configuration is to be read again."""
        self.wants_reload = True


def _sources(options: argparse.Namespace, config: Config) -> tuple[str, ...] | None:
    """Return what is to be sampled, as usual here where nobody says; the option comes first."""
    given: tuple[str, ...] | None = options.counters
    return config.counters.sources if given is None else given


def _check(config: Config, exporters: dict[str, LiveExporter], sources: tuple[str, ...]) -> int:
    """Print what a collector would do, unless it could not."""
    check_exporters(exporters)
    now_ns = time.monotonic_ns()
    alive = [each for each in find_engines(*reading_from(config.rings)) if each.is_alive(now_ns)]
    rows = [("rings", f"{names_of(reading_from(config.rings))}, engines there now: {len(alive)}")]
    rows.append(("folder", f"{config.folder}, its own: {LOCK_NAME}, budgets, pins"))
    if not config.shard.is_all:
        num = sum(config.shard.has(each.engine_id) for each in alive)
        rows.append(("shard", f"{config.shard}, of these: {num}"))
    rows += [(name, exporter.describe()) for name, exporter in exporters.items()]
    url = config.counters.dcgm_url
    page = () if url is None else ("from", without_secrets(url))
    sampled = " ".join((", ".join(sources), *config.counters.options, *page))
    rows.append(("counters", sampled if sources else "none are sampled by this collector"))
    rows.append(("headers", _headers(config.headers)))
    pins, slo = config.own_pins, config.slo
    if pins is None:
        rows.append(("pins", "none"))
    else:
        rows.append(
            (
                "pins",
                f"{pins.folder}, {pins.max_mb:g} MB at most, on {', '.join(pins.on) or 'nothing'}",
            )
        )
        rows.append(("", f"{pins.before_s:g} s before and {pins.after_s:g} s after an incident"))
        limits = (("first token", slo.ttft_ms), ("between tokens", slo.tbt_ms))
        known = [f"{what} {limit:g} ms" for what, limit in limits if limit is not None]
        if slo.objectives is not None:
            known.insert(0, "any objective")
        rows.append(("breach", ", ".join(known) or "never: slo has no threshold"))
    if slo.objectives is not None:
        lines = objective_lines(slo.objectives)
        rows += [("slo" if not at else "", line) for at, line in enumerate(lines)]
        rows.append(("budgets", f"kept in {config.state}"))
    sys.stdout.write("".join(f"{name:<12}{what}\n" for name, what in rows))
    return 0


def _headers(told: tuple[str, ...] | None) -> str:
    """Say what exporters are told of what engines note from headers."""
    if told is None:
        return "all that engines note (INFERSCOPE_HEADERS in their environment)"
    return f"{', '.join(told)}, of what engines note" if told else "nothing of what engines note"
