"""CUPTI PM sampling: device counters within each step, in windows of 50 to 1000 µs.

This is the only source that measures bytes per phase within a step. It needs privileges, a device
supports one session, and it can slow the device. So it runs only on request, and skips a device
that another program profiles. CUPTI stamps windows with the wall clock. Each sample carries the
distance of the two clocks at decoding, and the fold maps the windows by clock anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from inferscope.probe import Clock
from inferscope.records import CounterSample
from inferscope.sampler.claims import SessionClaims
from inferscope.sampler.clock_reading import read_both
from inferscope.sampler.cuda_driver import CudaDevices
from inferscope.sampler.cupti import layout
from inferscope.sampler.cupti.library import (
    NOT_PERMITTED,
    Cupti,
    CuptiError,
    counter_holders,
    describe_error,
    listed,
    may_profile,
)
from inferscope.sampler.cupti.search import usable
from inferscope.sampler.cupti.session import Decoded, Session
from inferscope.sampler.source import Claimer, LogLine, Unavailable, facts, silence

SHORTEST_NS = 200_000_000
"""Shortest period of decodes: each has a fixed cost, however few windows it finds, and records of
requests wait up to 500 ms for counters."""


class CuptiPmSource:
    """Reader of PM samples.

    Attributes:
        name: "pm".
        period_ns: period of decodes in nanoseconds, at least 200 ms.
    """

    name = "pm"

    def __init__(
        self,
        claims: Claimer,
        *,
        clock: Clock,
        log_line: LogLine,
        period_ns: int,
        interval_ns: int,
        wanted: Sequence[str] = (),
        despite: Container[str] = (),
        load: Callable[[], Cupti] = usable,
        list_devices: Callable[[], list[str]] = lambda: CudaDevices().uuids(),
    ) -> None:
        """Store the settings.

        Args:
            claims: claims of devices, shared with the other sources.
            clock: both clocks, for the anchors of windows.
            log_line: prints a line for the operator.
            period_ns: period of decodes in nanoseconds; shorter ones become 200 ms.
            interval_ns: length of a window in nanoseconds.
            wanted: CUDA ordinals or UUID prefixes of devices; empty for all.
            despite: programs of PROFILERS that the user declares not to hold the counters.
            load: loads and returns the library.
            list_devices: returns the devices' UUIDs in CUDA's order.
        """
        self.period_ns = max(period_ns, SHORTEST_NS)
        self._claims = claims
        self._clock = clock
        self._log_line = log_line
        self._interval_ns = interval_ns
        self._wanted = wanted
        self._despite = despite
        self._load = load
        self._list_devices = list_devices
        self._session_claims = SessionClaims()
        self._cupti: Cupti | None = None
        self._sessions: list[Session] = []
        self._has_overflowed = False
        self._has_lost_times = False

    def open(self, now_ns: int) -> list[CounterSample]:
        """Start a session on each device that no other program profiles.

        Raises:
            Unavailable: no session could start, with the reasons.
        """
        held_by = counter_holders(self._despite)
        if held_by:
            raise Unavailable(
                f"{listed(held_by)} may be using the device's counters, and a second session would "
                f"blank its series. {how_to_pass(held_by)} Or use --counters gpm."
            )
        if may_profile() is False:  # if unknown, the library reports it
            raise Unavailable(NOT_PERMITTED)
        uuids = self._list_devices()  # initialises the driver, which must precede CUPTI
        cupti = self._load()
        try:
            cupti.begin()
        except CuptiError as error:
            raise Unavailable(describe_error(error)) from None
        self._cupti = cupti
        states, reasons = [], []
        for ordinal, uuid in enumerate(uuids):
            if self._wanted and not any(_is_named(word, ordinal, uuid) for word in self._wanted):
                continue
            try:
                self._claims.take(uuid)
                self._session_claims.take(uuid)
                session = Session(cupti, ordinal, uuid, interval_ns=self._interval_ns)
            except (Unavailable, CuptiError) as error:
                self._session_claims.give_back(uuid)
                reason = describe_error(error) if isinstance(error, CuptiError) else str(error)
                reasons.append(reason)
                states.append(silence(self.name, uuid, now_ns, reason))
                continue
            self._sessions.append(session)
            states.append(facts(self.name, uuid, now_ns, session.facts()))
        if not self._sessions:
            raise Unavailable(" ".join(dict.fromkeys(reasons)) or "CUDA lists no such device.")
        return states

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return one sample per device with all its windows since the last read.

        Raises:
            Unavailable: a session failed; the caller closes all of them.
        """
        samples = []
        for session in self._sessions:
            try:
                decoded = session.decode()
            except CuptiError as error:
                raise Unavailable(_session_failed(session.uuid, error)) from None
            self._report_losses(decoded)
            if decoded.num_unstamped and not decoded.windows.rows:
                raise Unavailable(
                    f"all {decoded.num_unstamped} windows of {session.uuid} lack timestamps and "
                    "are lost; sampling restarts."
                )
            now = read_both(self._clock)
            found = session.sample(decoded.windows, now.real_ns - now.host_ns, source=self.name)
            if found is not None:
                samples.append(found)
        return samples

    def _report_losses(self, decoded: Decoded) -> None:
        """Print each cause of lost windows once."""
        interval_us = self._interval_ns // 1000
        if decoded.has_overflowed and not self._has_overflowed:
            self._has_overflowed = True
            self._log_line(
                f"{self.name}: the device's buffer overflowed and windows were lost. "
                f"Use a longer --pm-interval than {interval_us}us."
            )
        if decoded.num_unstamped and not self._has_lost_times:
            self._has_lost_times = True
            self._log_line(
                f"{self.name}: {decoded.num_unstamped} windows lack timestamps and count as lost: "
                "the sampler did not decode for more than 2 s. Give it more CPU time, or use a "
                f"longer --pm-interval than {interval_us}us."
            )

    def close(self) -> None:
        """Stop all sessions and then the profiler; safe to call twice."""
        sessions, self._sessions = self._sessions, []
        cupti, self._cupti = self._cupti, None
        for session in sessions:
            session.close()
        if cupti is not None:
            cupti.end()
        self._session_claims.close()


def how_to_pass(held_by: Mapping[str, int]) -> str:
    """Return the remedy for programs that may be using the counters."""
    pids = " and ".join(str(pid) for _, pid in sorted(held_by.items()))
    words = " ".join(f"--pm-despite {name}" for name in sorted(held_by))
    return (
        f"Stop process {pids} while you sample. If it is not profiling (for nv-hostengine, "
        "dcgmi profile --pause ensures that), override this check: "
        f"inferscope sampler --counters pm {words}."
    )


def _session_failed(uuid: str, error: CuptiError) -> str:
    if error.code == layout.ERROR_OUT_OF_MEMORY:
        return f"the buffer of {uuid} overflowed; sampling restarts. Use a longer --pm-interval."
    return f"sampling of {uuid} stopped: {describe_error(error)}"


def _is_named(word: str, ordinal: int, uuid: str) -> bool:
    return word == str(ordinal) if word.isdecimal() else uuid.startswith(word)
