"""CUPTI PM sampling: what the device did within each step, in windows of 50 to 1000 µs.

The one source that sees bytes per phase within a step. It needs rights, there is one session per
device, and it may cost the device speed: so it runs only when asked for, and leaves a device alone
that somebody else profiles. The library stamps windows with the wall clock; they are told with the
distance between the two clocks when they were decoded, and the fold places them by anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from inferscope.counters import cupti_layout as layout
from inferscope.counters.both_clocks import read_both
from inferscope.counters.claims import SessionClaims
from inferscope.counters.cuda_driver import CudaDevices
from inferscope.counters.cupti import (
    NOT_PERMITTED,
    Cupti,
    CuptiError,
    in_words,
    listed,
    may_profile,
    rivals,
)
from inferscope.counters.cupti_search import usable
from inferscope.counters.cupti_session import Decoded, Session
from inferscope.counters.source import Claimer, Say, Unavailable, facts, silence
from inferscope.probe.clock import Clock
from inferscope.records import CounterSample


class CuptiPmSource:
    """Reads PM samples.

    Attributes:
        name: pm.
        period_ns: between two decodes.
    """

    name = "pm"

    def __init__(
        self,
        claims: Claimer,
        *,
        clock: Clock,
        say: Say,
        period_ns: int,
        interval_ns: int,
        wanted: Sequence[str] = (),
        despite: Container[str] = (),
        load: Callable[[], Cupti] = usable,
        list_devices: Callable[[], list[str]] = lambda: CudaDevices().uuids(),
    ) -> None:
        """Prepare.

        Args:
            claims: says which devices are ours.
            clock: both clocks, to place windows by.
            say: prints a line.
            period_ns: between two decodes.
            interval_ns: the windows' length.
            wanted: devices, by CUDA's number or uuid; none means all.
            despite: programs of PROFILERS that hold no counters, on the user's word.
            load: returns the library, loaded.
            list_devices: returns the devices' uuids, in CUDA's order.
        """
        self.period_ns = period_ns
        self._claims = claims
        self._clock = clock
        self._say = say
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
        """Begin a session on each device that nobody else profiles.

        Raises:
            Unavailable: on none, with the reason.
        """
        held_by = rivals(self._despite)
        if held_by:
            raise Unavailable(
                f"{listed(held_by)} may hold the device's counters, and a second session would "
                f"blank its series. {how_to_pass(held_by)} Or use --counters gpm."
            )
        if may_profile() is False:  # where that is not known, the library will tell
            raise Unavailable(NOT_PERMITTED)
        uuids = self._list_devices()  # initialises the driver, which CUPTI needs first
        cupti = self._load()
        try:
            cupti.begin()
        except CuptiError as error:
            raise Unavailable(in_words(error)) from None
        self._cupti = cupti
        told, reasons = [], []
        for ordinal, uuid in enumerate(uuids):
            if self._wanted and not any(_is_named(word, ordinal, uuid) for word in self._wanted):
                continue
            try:
                self._claims.take(uuid)
                self._session_claims.take(uuid)
                session = Session(cupti, ordinal, uuid, interval_ns=self._interval_ns)
            except (Unavailable, CuptiError) as error:
                self._session_claims.give_back(uuid)
                reason = in_words(error) if isinstance(error, CuptiError) else str(error)
                reasons.append(reason)
                told.append(silence(self.name, uuid, now_ns, reason))
                continue
            self._sessions.append(session)
            told.append(facts(self.name, uuid, now_ns, session.facts()))
        if not self._sessions:
            raise Unavailable(" ".join(dict.fromkeys(reasons)) or "CUDA shows no such device.")
        return told

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return the windows since the last read: a sample per device, of many windows.

        Raises:
            Unavailable: a session broke off; all are ended.
        """
        told = []
        for session in self._sessions:
            try:
                decoded = session.decode()
            except CuptiError as error:
                raise Unavailable(_broke_off(session.uuid, error)) from None
            self._say_losses(decoded)
            if decoded.num_unstamped and not decoded.windows.rows:
                raise Unavailable(
                    f"{decoded.num_unstamped} windows of {session.uuid} came without times, and "
                    "none with them; they are lost, and sampling it begins anew."
                )
            now = read_both(self._clock)
            found = session.sample(decoded.windows, now.real_ns - now.host_ns, source=self.name)
            if found is not None:
                told.append(found)
        return told

    def _say_losses(self, decoded: Decoded) -> None:
        """Print why windows were lost, each cause once."""
        interval_us = self._interval_ns // 1000
        if decoded.has_overflowed and not self._has_overflowed:
            self._has_overflowed = True
            self._say(
                f"{self.name}: the device's buffer overflowed and windows were lost. "
                f"Use a longer --pm-interval than {interval_us}us."
            )
        if decoded.num_unstamped and not self._has_lost_times:
            self._has_lost_times = True
            self._say(
                f"{self.name}: {decoded.num_unstamped} windows came without times and count as "
                "lost: the sampler did not decode for more than 2 s. Give it processor time, or a "
                f"longer --pm-interval than {interval_us}us."
            )

    def close(self) -> None:
        """End all sessions, and the profiler after them; once."""
        sessions, self._sessions = self._sessions, []
        cupti, self._cupti = self._cupti, None
        for session in sessions:
            session.close()
        if cupti is not None:
            cupti.end()
        self._session_claims.close()


def how_to_pass(held_by: Mapping[str, int]) -> str:
    """Return what to do about programs that may hold the counters."""
    pids = " and ".join(str(pid) for _, pid in sorted(held_by.items()))
    words = " ".join(f"--pm-despite {name}" for name in sorted(held_by))
    return (
        f"Stop process {pids} while you sample; or, where that profiles nothing "
        "(of nv-hostengine, dcgmi profile --pause sees to that), say so: "
        f"inferscope sampler --counters pm {words}."
    )


def _broke_off(uuid: str, error: CuptiError) -> str:
    if error.code == layout.ERROR_OUT_OF_MEMORY:
        return (
            f"the buffer of {uuid} overflowed, and sampling it begins anew. "
            "Use a longer --pm-interval."
        )
    return f"sampling {uuid} broke off. {in_words(error)}"


def _is_named(word: str, ordinal: int, uuid: str) -> bool:
    return word == str(ordinal) if word.isdecimal() else uuid.startswith(word)
