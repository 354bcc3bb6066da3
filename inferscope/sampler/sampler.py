"""The sampler process: its sources on their threads, its ring, and its lifetime.

Each source runs on a thread of its own. The main loop writes the heartbeat, reports hung sources
and waits for a signal or for the exit of the process that it belongs to. It watches that process
by a pidfd: PR_SET_PDEATHSIG needs a parent, and `run` execs its command, which must not inherit a
child process.
"""

from __future__ import annotations

import importlib
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from inferscope.probe import Clock, make_ring
from inferscope.records import SAMPLER_ROLE, CounterSample
from inferscope.ring import find_engines, make_private
from inferscope.sampler.claims import Claims, NoClaims
from inferscope.sampler.cupti.pm import CuptiPmSource
from inferscope.sampler.cupti.search import usable
from inferscope.sampler.dcgm import DEFAULT_URL, DcgmSource
from inferscope.sampler.gpm import GpmSource
from inferscope.sampler.host import HostSource
from inferscope.sampler.nvml import NvmlSource
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import AUTO, Claimer, LogLine, Source, Unavailable
from inferscope.sampler.source_runner import SourceRunner

TURN_S = 0.1
_LAST_TURN_S = 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of a sampler.

    Attributes:
        folder: ring directory.
        sources: names of the sources to read.
        interval_ns: period of reads in nanoseconds.
        pm_interval_ns: length of PM sampling's windows in nanoseconds.
        dcgm_url: URL of dcgm-exporter's metrics page.
        devices: device indices or UUID prefixes; empty for all devices.
        pm_despite: names of running programs that the user declares not to hold the counters.
    """

    folder: Path
    sources: tuple[str, ...] = AUTO
    interval_ns: int = 100_000_000
    pm_interval_ns: int = 500_000
    dcgm_url: str = DEFAULT_URL
    devices: tuple[str, ...] = ()
    pm_despite: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceReading:
    """Result of one reading of a source; `reason` is empty if it succeeded."""

    source: str
    reason: str
    facts: list[CounterSample]
    samples: list[CounterSample]


class StopSignal(Protocol):
    """Stop request of a sampler, set by a signal handler."""

    @property
    def stop_requested(self) -> bool:
        """Return whether a stop was requested."""


def make_sources(
    settings: Settings, claims: Claimer, *, clock: Clock, log_line: LogLine
) -> list[Source]:
    """Return the sources that the settings name, unopened."""
    period_ns, devices = settings.interval_ns, settings.devices
    makers: dict[str, Callable[[], Source]] = {
        "nvml": lambda: NvmlSource(settings.folder, claims, period_ns=period_ns, wanted=devices),
        "gpm": lambda: GpmSource(claims, clock=clock, period_ns=period_ns, wanted=devices),
        "pm": lambda: CuptiPmSource(
            claims,
            clock=clock,
            log_line=log_line,
            period_ns=period_ns,
            interval_ns=settings.pm_interval_ns,
            wanted=devices,
            despite=settings.pm_despite,
        ),
        "dcgm": lambda: DcgmSource(
            claims, period_ns=period_ns, url=settings.dcgm_url, wanted=devices
        ),
        "host": lambda: HostSource(settings.folder, claims, period_ns=period_ns),
    }
    return [makers[name]() for name in settings.sources]


def preload(settings: Settings, *, clock: Clock) -> None:
    """Load every module and library that sampling needs while the process is still root.

    Python imports many modules, codecs among them, on first use, and the user that the process
    becomes may not be allowed to read what root installed. So each source is opened once, except
    PM sampling, which would take the device's counters from another process.
    """
    for name in ("encodings.ascii", "encodings.idna", "grp"):
        importlib.import_module(name)
    find_engines(settings.folder)
    for source in make_sources(settings, NoClaims(), clock=clock, log_line=_discard):
        with suppress(Unavailable):
            if source.name == CuptiPmSource.name:
                usable()  # stays loaded, with the libraries it opens late; none is called
            else:
                source.open(clock.monotonic_ns())
        source.close()


def _discard(line: str) -> None:
    """Discard a line: sampling has not started, and will report the same."""


def read_once(settings: Settings, *, clock: Clock, log_line: LogLine) -> list[SourceReading]:
    """Open, read once and close every source, without claims or a ring."""
    sources = make_sources(settings, NoClaims(), clock=clock, log_line=log_line)
    return [_read_source(source, clock) for source in sources]


def _read_source(source: Source, clock: Clock) -> SourceReading:
    try:
        facts = source.open(clock.monotonic_ns())
        source.read(clock.monotonic_ns())  # the start of values that are differences of reads
        time.sleep(source.period_ns * 1.2 / 1e9)
        return SourceReading(source.name, "", facts, source.read(clock.monotonic_ns()))
    except Unavailable as error:
        return SourceReading(source.name, str(error), [], [])
    finally:
        source.close()


def sample(
    settings: Settings,
    stop: StopSignal,
    *,
    clock: Clock,
    log_line: LogLine,
    beside_pid: int | None = None,
) -> None:
    """Sample until a stop is requested or the process `beside_pid` exits.

    Raises:
        RingUnavailable: the ring cannot be created.
    """
    if CuptiPmSource.name in settings.sources:
        with suppress(Unavailable):
            usable()  # trying libraries can take longer than a turn, so it comes before the threads
    home = settings.folder / SAMPLER_ROLE
    make_private(settings.folder)
    make_private(home)
    claims = Claims(home)
    tape = SamplerRing(make_ring(SAMPLER_ROLE, 0, clock, engine_id=SAMPLER_ROLE), clock)
    sources = make_sources(settings, claims, clock=clock, log_line=log_line)
    turns = [SourceRunner(source, tape, clock=clock, log_line=log_line) for source in sources]
    companion = _Companion(beside_pid)
    try:
        tape.tend(cost_ns=time.process_time_ns())
        for each in turns:
            each.start()
        while not stop.stop_requested and not companion.has_ended(TURN_S):
            for each in turns:
                each.check_hung(clock.monotonic_ns())
            tape.tend(cost_ns=time.process_time_ns())
    finally:
        companion.close()
        _end(turns)
        tape.close(cost_ns=time.process_time_ns())
        claims.close()


def _end(turns: Sequence[SourceRunner]) -> None:
    for each in turns:
        each.request_stop()
    until_s = time.monotonic() + _LAST_TURN_S
    for each in turns:
        each.wait(max(0.0, until_s - time.monotonic()))


class _Companion:
    """The process whose exit ends the sampler; without a PID, none does."""

    def __init__(self, pid: int | None) -> None:
        self._handle: int | None = None
        self._is_gone = False
        self._poll = select.poll()
        if pid is not None:
            try:
                self._handle = os.pidfd_open(pid)
            except OSError:  # it has exited already, or the kernel is older than 5.3
                self._is_gone = True
            else:
                self._poll.register(self._handle, select.POLLIN)

    def has_ended(self, wait_s: float) -> bool:
        """Wait at most `wait_s` for the process; return whether it has exited."""
        if self._is_gone:
            return True
        return bool(self._poll.poll(wait_s * 1000))

    def close(self) -> None:
        """Close the pidfd; safe to call twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                os.close(handle)
