"""The schedule of one source: open, read at a drift-free period, close, retry with backoff.

`turn` makes every decision from the time it is given; the source's thread only waits between
turns. A source that blocks, such as a driver whose device fell off the bus, delays no other.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from inferscope.probe import Clock
from inferscope.records import CounterSample
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import LogLine, Source, Unavailable, silence

FIRST_BACKOFF_NS = 1_000_000_000
LONGEST_BACKOFF_NS = 10_000_000_000
STUCK_NS = 5_000_000_000
"""Duration in nanoseconds after which a call counts as hung."""


class SourceRunner:
    """Runner of one source, on a thread of its own.

    Attributes:
        reason: why the source is unavailable; empty while it is read.
    """

    def __init__(
        self, source: Source, tape: SamplerRing, *, clock: Clock, log_line: LogLine
    ) -> None:
        self.reason = ""
        self._source = source
        self._tape = tape
        self._clock = clock
        self._log_line = log_line
        self._is_open = False
        self._has_reported = False
        self._backoff_ns = FIRST_BACKOFF_NS
        self._began_ns = 0
        self._in_call_since_ns: int | None = None
        self._is_stuck = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=source.name, daemon=True)

    def start(self) -> None:
        """Start the source's thread."""
        self._thread.start()

    def request_stop(self) -> None:
        """Request the thread to exit after the current turn."""
        self._stopping.set()

    def wait(self, patience_s: float) -> None:
        """Wait at most `patience_s` for the thread to exit; a hung source is abandoned."""
        self._thread.join(patience_s)

    def turn(self, now_ns: int) -> int:
        """Open or read the source; return the monotonic time of the next turn."""
        source = self._source
        self._in_call_since_ns = now_ns
        try:
            if self._is_open:
                self._tape.put(source.read(now_ns))
            else:
                self._opened(source.open(now_ns), now_ns)
        except Unavailable as lost:
            return self._lost(str(lost), now_ns)
        except Exception as error:  # a defect in one source must not stop the others
            return self._lost(f"failed: {type(error).__name__}: {error}", now_ns)
        finally:
            self._in_call_since_ns = None
        if self._is_stuck:
            self._is_stuck = False
            self._log_line(f"{source.name}: answering again")
        period_ns = source.period_ns
        num_passed = (self._clock.monotonic_ns() - self._began_ns) // period_ns
        return self._began_ns + (num_passed + 1) * period_ns

    def check_hung(self, now_ns: int) -> None:
        """Report a hung call once; called from another thread."""
        since_ns = self._in_call_since_ns
        if self._is_stuck or since_ns is None or now_ns - since_ns < STUCK_NS:
            return
        self._is_stuck = True
        reason = f"no answer for {STUCK_NS // 1_000_000_000} s: the driver or its device hangs."
        self._report(reason, now_ns)

    def close(self) -> None:
        """Close the source unless a call into it is running."""
        if self._in_call_since_ns is None:
            with suppress(Exception):
                self._source.close()

    def _opened(self, facts: list[CounterSample], now_ns: int) -> None:
        self._is_open = True
        self._backoff_ns = FIRST_BACKOFF_NS
        self._began_ns = now_ns
        if self._has_reported:
            self._log_line(f"{self._source.name}: available again")
        self.reason = ""
        self._tape.put(facts)

    def _lost(self, reason: str, now_ns: int) -> int:
        self._is_open = False
        with suppress(Exception):
            self._source.close()
        if reason != self.reason:
            self._report(reason, now_ns)
        due_ns = self._clock.monotonic_ns() + self._backoff_ns
        self._backoff_ns = min(2 * self._backoff_ns, LONGEST_BACKOFF_NS)
        return due_ns

    def _report(self, reason: str, now_ns: int) -> None:
        """Log the reason once, and write it to the ring, whose keyframes repeat it."""
        self.reason = reason
        self._has_reported = True
        self._tape.num_errors += 1
        self._log_line(f"{self._source.name}: {reason}")
        self._tape.put([silence(self._source.name, "", now_ns, reason)])

    def _run(self) -> None:
        while not self._stopping.is_set():
            due_ns = self.turn(self._clock.monotonic_ns())
            wait_ns = due_ns - self._clock.monotonic_ns()
            if wait_ns > 0:
                self._stopping.wait(wait_ns / 1e9)
        self.close()
