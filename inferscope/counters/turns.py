"""The turns of one source: opened, read on a drift-free schedule, closed and tried again.

All that happens is decided by `turn`, which is given the time; a thread beside it only waits. So a
source that blocks, as a driver does whose device has fallen off the bus, holds nobody else up.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from inferscope.counters.source import Say, Source, Unavailable, silence
from inferscope.counters.tape import Tape
from inferscope.probe.clock import Clock
from inferscope.records import CounterSample

FIRST_BACKOFF_NS = 1_000_000_000
LONGEST_BACKOFF_NS = 10_000_000_000
STUCK_NS = 5_000_000_000
"""A call that has not come back by then will not soon."""


class Turns:
    """One source's life.

    Attributes:
        reason: why it has nothing to tell; empty while it has.
    """

    def __init__(self, source: Source, tape: Tape, *, clock: Clock, say: Say) -> None:
        self.reason = ""
        self._source = source
        self._tape = tape
        self._clock = clock
        self._say = say
        self._is_open = False
        self._has_spoken = False
        self._backoff_ns = FIRST_BACKOFF_NS
        self._began_ns = 0
        self._in_call_since_ns: int | None = None
        self._is_stuck = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=source.name, daemon=True)

    def start(self) -> None:
        """Take turns on a thread of its own."""
        self._thread.start()

    def ask_to_end(self) -> None:
        """Ask the thread to end after the turn under way."""
        self._stopping.set()

    def wait(self, patience_s: float) -> None:
        """Wait for its end; a source that is stuck is left behind."""
        self._thread.join(patience_s)

    def turn(self, now_ns: int) -> int:
        """Open the source or read it; return when the next turn is due."""
        source = self._source
        self._in_call_since_ns = now_ns
        try:
            if self._is_open:
                self._tape.put(source.read(now_ns))
            else:
                self._opened(source.open(now_ns), now_ns)
        except Unavailable as lost:
            return self._lost(str(lost), now_ns)
        except Exception as error:  # whatever goes wrong in one, the others go on
            return self._lost(f"it failed: {type(error).__name__}: {error}", now_ns)
        finally:
            self._in_call_since_ns = None
        if self._is_stuck:
            self._is_stuck = False
            self._say(f"{source.name}: it answers again")
        period_ns = source.period_ns
        num_passed = (self._clock.monotonic_ns() - self._began_ns) // period_ns
        return self._began_ns + (num_passed + 1) * period_ns

    def look(self, now_ns: int) -> None:
        """Say, once, when a call does not come back; called from another thread."""
        since_ns = self._in_call_since_ns
        if self._is_stuck or since_ns is None or now_ns - since_ns < STUCK_NS:
            return
        self._is_stuck = True
        reason = f"no answer for {STUCK_NS // 1_000_000_000} s: the driver or its device hangs."
        self._tell(reason, now_ns)

    def close(self) -> None:
        """Close the source, unless a call into it is under way."""
        if self._in_call_since_ns is None:
            with suppress(Exception):
                self._source.close()

    def _opened(self, facts: list[CounterSample], now_ns: int) -> None:
        self._is_open = True
        self._backoff_ns = FIRST_BACKOFF_NS
        self._began_ns = now_ns
        if self._has_spoken:
            self._say(f"{self._source.name}: it can be read again")
        self.reason = ""
        self._tape.put(facts)

    def _lost(self, reason: str, now_ns: int) -> int:
        self._is_open = False
        with suppress(Exception):
            self._source.close()
        if reason != self.reason:
            self._tell(reason, now_ns)
        due_ns = self._clock.monotonic_ns() + self._backoff_ns
        self._backoff_ns = min(2 * self._backoff_ns, LONGEST_BACKOFF_NS)
        return due_ns

    def _tell(self, reason: str, now_ns: int) -> None:
        """Say why it is silent: to people once, to the ring's readers for as long as it is."""
        self.reason = reason
        self._has_spoken = True
        self._tape.num_errors += 1
        self._say(f"{self._source.name}: {reason}")
        self._tape.put([silence(self._source.name, "", now_ns, reason)])

    def _run(self) -> None:
        while not self._stopping.is_set():
            due_ns = self.turn(self._clock.monotonic_ns())
            wait_ns = due_ns - self._clock.monotonic_ns()
            if wait_ns > 0:
                self._stopping.wait(wait_ns / 1e9)
        self.close()
