"""The sampler: its sources on their threads, its ring, and when it ends.

Each source takes its turns on a thread of its own; this loop beats the heart, looks after them and
waits: for a signal, or for the end of the process that it was started beside. That is watched by a
pidfd and not by PR_SET_PDEATHSIG, for `run` becomes its command and must not leave it a child that
it never had.
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

from inferscope.counters.claims import Claims, NoClaims
from inferscope.counters.cupti_pm import CuptiPmSource
from inferscope.counters.cupti_search import usable
from inferscope.counters.dcgm import DEFAULT_URL, DcgmSource
from inferscope.counters.gpm import GpmSource
from inferscope.counters.host import HostSource
from inferscope.counters.nvml import NvmlSource
from inferscope.counters.source import AUTO, Claimer, Say, Source, Unavailable
from inferscope.counters.tape import Tape
from inferscope.counters.turns import Turns
from inferscope.probe.clock import Clock
from inferscope.probe.opening import make_ring
from inferscope.records import SAMPLER_ROLE, CounterSample
from inferscope.ring.discovery import find_engines, make_private

TURN_S = 0.1
_LAST_TURN_S = 1.0


@dataclass(frozen=True)
class Settings:
    """What to sample, and how often.

    Attributes:
        folder: of the rings.
        sources: by name.
        interval_ns: between two reads.
        pm_interval_ns: the windows of PM sampling.
        dcgm_url: of dcgm-exporter's page.
        devices: by index or uuid; none means all.
        pm_despite: programs that hold no counters, though they could.
    """

    folder: Path
    sources: tuple[str, ...] = AUTO
    interval_ns: int = 100_000_000
    pm_interval_ns: int = 500_000
    dcgm_url: str = DEFAULT_URL
    devices: tuple[str, ...] = ()
    pm_despite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """One reading of a source; `reason` is empty where it could be read."""

    source: str
    reason: str
    facts: list[CounterSample]
    samples: list[CounterSample]


class Stop(Protocol):
    """Says whether somebody asked the sampler to end."""

    @property
    def is_asked(self) -> bool:
        """Tell whether it is to end."""


def make_sources(settings: Settings, claims: Claimer, *, clock: Clock, say: Say) -> list[Source]:
    """Return the sources that are asked for; none is opened."""
    period_ns, devices = settings.interval_ns, settings.devices
    makers: dict[str, Callable[[], Source]] = {
        "nvml": lambda: NvmlSource(settings.folder, claims, period_ns=period_ns, wanted=devices),
        "gpm": lambda: GpmSource(claims, clock=clock, period_ns=period_ns, wanted=devices),
        "pm": lambda: CuptiPmSource(
            claims,
            clock=clock,
            say=say,
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
    """Have everything loaded that sampling will need, while this is still root.

    Python loads much only when it is used, codecs too, and what root has installed for itself the
    user that it becomes may not read. So each source is begun once, but for the one that would
    take the device's counters from somebody.
    """
    for name in ("encodings.ascii", "encodings.idna", "grp"):
        importlib.import_module(name)
    find_engines(settings.folder)
    for source in make_sources(settings, NoClaims(), clock=clock, say=_to_nobody):
        with suppress(Unavailable):
            if source.name == CuptiPmSource.name:
                usable()  # stays loaded, with what it opens late; nothing in it is called
            else:
                source.open(clock.monotonic_ns())
        source.close()


def _to_nobody(line: str) -> None:
    """Keep what is said while nothing is sampled yet."""


def look_once(settings: Settings, *, clock: Clock, say: Say) -> list[Look]:
    """Open every source, read it once and close it; nothing is claimed and no ring made."""
    sources = make_sources(settings, NoClaims(), clock=clock, say=say)
    return [_look_at(source, clock) for source in sources]


def _look_at(source: Source, clock: Clock) -> Look:
    try:
        facts = source.open(clock.monotonic_ns())
        source.read(clock.monotonic_ns())  # the first of what is counted between two reads
        time.sleep(source.period_ns * 1.2 / 1e9)
        return Look(source.name, "", facts, source.read(clock.monotonic_ns()))
    except Unavailable as error:
        return Look(source.name, str(error), [], [])
    finally:
        source.close()


def sample(
    settings: Settings, stop: Stop, *, clock: Clock, say: Say, beside_pid: int | None = None
) -> None:
    """Sample until asked to end, or until a process has ended.

    Raises:
        RingUnavailable: no ring can be made.
    """
    if CuptiPmSource.name in settings.sources:
        with suppress(Unavailable):
            usable()  # trying libraries may take longer than a turn, so it is done before them
    home = settings.folder / SAMPLER_ROLE
    make_private(settings.folder)
    make_private(home)
    claims = Claims(home)
    tape = Tape(make_ring(SAMPLER_ROLE, 0, clock, engine_id=SAMPLER_ROLE), clock)
    sources = make_sources(settings, claims, clock=clock, say=say)
    turns = [Turns(source, tape, clock=clock, say=say) for source in sources]
    companion = _Companion(beside_pid)
    try:
        tape.tend(cost_ns=time.process_time_ns())
        for each in turns:
            each.start()
        while not stop.is_asked and not companion.has_ended(TURN_S):
            for each in turns:
                each.look(clock.monotonic_ns())
            tape.tend(cost_ns=time.process_time_ns())
    finally:
        companion.close()
        _end(turns)
        tape.close(cost_ns=time.process_time_ns())
        claims.close()


def _end(turns: Sequence[Turns]) -> None:
    for each in turns:
        each.ask_to_end()
    until_s = time.monotonic() + _LAST_TURN_S
    for each in turns:
        each.wait(max(0.0, until_s - time.monotonic()))


class _Companion:
    """The process that the sampler ends with; None: none."""

    def __init__(self, pid: int | None) -> None:
        self._handle: int | None = None
        self._is_gone = False
        self._poll = select.poll()
        if pid is not None:
            try:
                self._handle = os.pidfd_open(pid)
            except OSError:  # it has ended already, or the kernel is older than 5.3
                self._is_gone = True
            else:
                self._poll.register(self._handle, select.POLLIN)

    def has_ended(self, wait_s: float) -> bool:
        """Wait for its end, or for so long."""
        if self._is_gone:
            return True
        return bool(self._poll.poll(wait_s * 1000))

    def close(self) -> None:
        """Let go of it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                os.close(handle)
