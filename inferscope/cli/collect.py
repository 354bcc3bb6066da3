"""Collect records from every engine of this host and export them.

Run one collector per host, or one per shard of its engines. Without a configuration file it serves
Prometheus metrics on 127.0.0.1:9464. Engines can start and exit while it runs.

Signals:
  SIGUSR1          pin the records of the last and the next 30 s, unless pins are off
  SIGHUP           reload configuration and objectives; counters continue
  Ctrl-C, SIGTERM  flush all exporters and exit
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

from inferscope.cli.counters import add_counters_option, default_sources, start_sampler
from inferscope.cli.status_line import write_status
from inferscope.cli.stopping import StopFlag, stoppable
from inferscope.daemon import (
    LOCK_NAME,
    Config,
    ExporterSet,
    Service,
    check_exporters,
    configure_trim,
    make_exporters,
    only_collector,
    read_config,
)
from inferscope.exporting import LiveExporter, live_exporter_names
from inferscope.foreign import without_secrets
from inferscope.probe import SystemClock
from inferscope.ring import (
    find_engines,
    make_private,
    names_of,
    owner_of,
    reading_from,
)
from inferscope.slo import objective_lines, objectives_summary

SWITCH_S = 0.001
"""Interpreter switch interval in seconds. A scrape takes the interpreter lock about five times, and
the fold releases it only after this interval; Python's default is 5 ms each time."""
GARBAGE = (50_000, 20, 50)
"""Thresholds of the cyclic garbage collector. Records form no cycles. With Python's default,
(700, 10, 10), and thirty engines, collection takes 39 µs of a step's 400; with these, under 10."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration in YAML (default: serve Prometheus metrics)",
    )
    parser.add_argument(
        "--slo",
        type=Path,
        metavar="FILE",
        help="file of SLO objectives; counts good and bad requests",
    )
    parser.add_argument(
        "--check", action="store_true", help="validate the configuration, print it and exit"
    )
    parser.add_argument(
        "--shard",
        metavar="K/N",
        help="collect shard K of N of this host's engines (default: all engines)",
    )
    add_counters_option(parser)
    parser.epilog = f"""exporters installed: {", ".join(live_exporter_names())}

examples:
  inferscope collect
  inferscope collect --slo slo.yaml
  inferscope collect --config collect.yaml --check
  inferscope collect --config collect.yaml --shard 1/2   # a second collector: 2/2
"""


def run(options: argparse.Namespace) -> int:
    """Run the collector until it is stopped."""
    read = partial(read_config, options.config, os.environ, slo=options.slo, shard=options.shard)
    config = read()
    exporters = make_exporters(config.exporters, config.shard)
    if options.check:
        return _check(config, exporters, default_sources(_sources(options, config)))
    configure_trim()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GARBAGE)
    if owner_of(config.rings) in (-1, os.geteuid()):
        make_private(config.rings)
    with only_collector(config.folder, config.shard), stoppable() as stop:
        flags = _ControlFlags(stop)
        signal.signal(signal.SIGUSR1, flags.pin)
        signal.signal(signal.SIGHUP, flags.reload)
        exporter_set = ExporterSet(
            exporters, sections=config.exporters, shard=config.shard, log_line=write_status
        )
        exporter_set.open()
        gc.freeze()  # objects loaded by now live until exit
        where = ("--dir", str(config.rings))
        counters = config.counters
        sampled = (*where, *counters.options)
        start_sampler(_sources(options, config), sampled, counters.environment)
        part = "" if config.shard.is_all else f", shard {config.shard} of its engines"
        write_status(
            f"collecting from {names_of(reading_from(config.rings))}{part}; Ctrl-C ends it"
        )
        if config.slo.objectives is not None:
            write_status(
                f"counting good and bad requests: {objectives_summary(config.slo.objectives)}"
            )
        service = Service(
            config, exporter_set, clock=SystemClock(), log_line=write_status, read=read
        )
        is_through = service.run(flags)
    if not is_through:  # an exporter's thread hangs, and the interpreter would wait for it
        os._exit(0)
    return 0


class _ControlFlags:
    """Requests that signals made, read by the service loop."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self.wants_pin = False
        self.wants_reload = False

    @property
    def stop_requested(self) -> bool:
        """Return whether the collector must stop."""
        return self._stop.stop_requested

    def pin(self, number: int, frame: FrameType | None) -> None:
        """Request a pin."""
        self.wants_pin = True

    def reload(self, number: int, frame: FrameType | None) -> None:
        """Request a reload of the configuration."""
        self.wants_reload = True


def _sources(options: argparse.Namespace, config: Config) -> tuple[str, ...] | None:
    """Return the counter sources of the option, else of the configuration; None for the default."""
    given: tuple[str, ...] | None = options.counters
    return config.counters.sources if given is None else given


def _check(config: Config, exporters: dict[str, LiveExporter], sources: tuple[str, ...]) -> int:
    """Print the configuration that a collector would run with, or raise its error."""
    check_exporters(exporters)
    now_ns = time.monotonic_ns()
    alive = [each for each in find_engines(*reading_from(config.rings)) if each.is_alive(now_ns)]
    rows = [("rings", f"{names_of(reading_from(config.rings))}, running engines: {len(alive)}")]
    rows.append(("folder", f"{config.folder} holds {LOCK_NAME}, budgets and pins"))
    if not config.shard.is_all:
        num = sum(config.shard.has(each.engine_id) for each in alive)
        rows.append(("shard", f"{config.shard}, running engines in it: {num}"))
    rows += [(name, exporter.describe()) for name, exporter in exporters.items()]
    url = config.counters.dcgm_url
    page = () if url is None else ("from", without_secrets(url))
    sampled = " ".join((", ".join(sources), *config.counters.options, *page))
    rows.append(("counters", sampled if sources else "off: this collector starts no sampler"))
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
        known = [f"{name} {limit:g} ms" for name, limit in limits if limit is not None]
        if slo.objectives is not None:
            known.insert(0, "any objective")
        rows.append(("breach", ", ".join(known) or "never: slo has no threshold"))
    if slo.objectives is not None:
        lines = objective_lines(slo.objectives)
        rows += [("slo" if not at else "", line) for at, line in enumerate(lines)]
        rows.append(("budgets", f"kept in {config.state}"))
    sys.stdout.write("".join(f"{name:<12}{what}\n" for name, what in rows))
    return 0


def _headers(exported: tuple[str, ...] | None) -> str:
    """Return which of the request headers that engines record are exported."""
    if exported is None:
        return "all that engines record (INFERSCOPE_HEADERS in their environment)"
    return f"{', '.join(exported)}, if engines record them" if exported else "none"
