"""The log: records become frames of the ring, in the order of time, with keyframes among them.

    keyframe ┬ Keyframe, EngineInfo, CostTable…,
             │ Live…, Clock                          all that a reader who starts here must know
             └ records … ProbeHealth … records …     what happened since, and how the probe is

A keyframe comes every 10 s and every quarter of the ring, so a whole one is always there. It lists
512 requests in flight at once and the others 256 at a time, behind each record written: listing
65,536 at once takes 40 to 70 ms. `Clock` ends it. A record too large for its ring is left out and
counted, and the next report has the count.

A signal handler may raise in the middle of any method. The frame being written is then completed
by the next write, or, where its writing had not begun, left out without a number; all others are
whole, and the next record begins an unfinished keyframe anew.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inferscope.probe.clock import Clock as TimeSource
from inferscope.probe.columns import OddValues
from inferscope.probe.repeats import Repeats
from inferscope.probe.requests import MOST_ROW_BYTES, RequestTable
from inferscope.records import (
    FAILED,
    ON,
    Clock,
    CostTable,
    CounterSample,
    EngineInfo,
    Keyframe,
    ProbeHealth,
    Record,
    encode,
)
from inferscope.ring import STARTS_KEYFRAME, RingWriter

KEYFRAME_NS = 10_000_000_000
HEALTH_NS = 100_000_000
_ROWS_AT_ONCE = 512
"""Requests in flight listed where a keyframe begins."""
_ROWS_PER_RECORD = 256
"""Requests listed behind each record after that: 0.07 ms, measured here."""
MOST_UNSUPPORTED = 8
"""Features that a report names as unsupported; later ones are in the host's log only."""


class Hidden:
    """A context of calls whose cost is hidden: the device computes meanwhile."""

    __slots__ = ("_log", "_since_ns")

    def __init__(self, log: Log) -> None:
        """Count in a log."""
        self._log = log
        self._since_ns = 0

    def __enter__(self) -> None:
        self._since_ns = self._log.cost_ns

    def __exit__(self, *_: object) -> None:
        log = self._log
        log.hidden_ns += log.cost_ns - self._since_ns


class Log:
    """Writes into one ring.

    Attributes:
        lock: stands around every call, and around all that is kept beside the log. A thread can ask
            whether it is its own: a signal handler or a finaliser may call the probe within a call.
        ring: None where there never was one, once it is closed, and in a forked child.
        path: of the ring; it stays when the log is closed.
        paused_ns: since when the engine is paused, None while it is not.
        clock: the two clocks.
        requests: what is in flight, for keyframes.
        state: one of `PROBE_STATES`.
        message: note on the probe in the next reports.
        unsupported: features of the engine that cannot be observed, at most MOST_UNSUPPORTED.
        num_errors: failures so far.
        odd: argument values that no record could hold.
        num_lost_calls: calls left out because the probe was busy, or the process out of memory.
        cost_ns: spent on the engine's thread so far.
        hidden_ns: of it, while the device computed.
        host_sample: counters of the host that no report has written yet, None where there are none.
        health_due_ns: when a busy engine's next report is due.
        keyframe_due_ns: when the next keyframe is due, however little was written.
        is_listing: a keyframe has begun and lists requests in flight behind other records.
        repeats: what a step that repeats the last one can be stated by.
    """

    def __init__(
        self,
        ring: RingWriter | None,
        info: EngineInfo,
        clock: TimeSource,
        *,
        tables: Sequence[CostTable] = (),
    ) -> None:
        self.lock = threading.RLock()
        self.ring = ring
        self.path: Path | None = None if ring is None else ring.path
        self.clock = clock
        self.requests = RequestTable()
        self.state = FAILED if ring is None else ON
        self.message = ""
        self.unsupported: tuple[str, ...] = ()
        self.num_errors = 0
        self.odd = OddValues()
        self.num_lost_calls = 0
        self.cost_ns = 0
        self.hidden_ns = 0
        self.host_sample: CounterSample | None = None
        self.health_due_ns = 0
        self.keyframe_due_ns = 0
        self.paused_ns: int | None = None
        self.is_listing = False
        self.repeats = Repeats()
        self._info = info
        self._tables = tables
        self._last_t_ns = 0
        self._num_refused = 0
        self._frames_at_health = -1

    @property
    def has_news(self) -> bool:
        """Return whether anything was written since the last report."""
        return self.ring is not None and self.ring.sequence != self._frames_at_health

    def write(self, record: Record) -> bool:
        """Write a record, and a keyframe where one is due; return whether the record is written."""
        ring = self.ring
        if ring is None:
            return False
        t_ns = record.t_ns
        if t_ns < self._last_t_ns:
            is_written = self._put(ring, record)
        else:
            # `_put`, without the call and its keywords: 0.1 µs, four times a step.
            self._last_t_ns = t_ns
            payload = encode(record)
            is_written = ring.write(record.CODE, payload)
            if not is_written:
                self._refuse(ring, record, len(payload))
        if self.is_listing:
            self.list_more(self._last_t_ns)
        elif t_ns >= self.keyframe_due_ns or ring.bytes_since_keyframe * 4 > ring.capacity:
            self.restate(self._last_t_ns)
        return is_written

    def restate(self, now_ns: int) -> None:
        """Begin a keyframe: all that a reader who starts here must know.

        It takes at most a good quarter of the ring, and the next one, unless its time has come, is
        due a quarter later: so a whole one is always there.
        """
        ring = self.ring
        if ring is None:
            return
        self.is_listing, self.keyframe_due_ns = False, 0
        self.repeats.forget()
        keyframe = Keyframe(now_ns, self.state, ring.last_keyframe, self.paused_ns)
        self._put(ring, keyframe, flags=STARTS_KEYFRAME)
        self._put(ring, msgspec.structs.replace(self._info, t_ns=now_ns))
        for table in self._tables:
            self._put(ring, msgspec.structs.replace(table, t_ns=now_ns))
        self.requests.begin_list(ring.capacity // 4)
        self.is_listing, self.keyframe_due_ns = True, now_ns + KEYFRAME_NS
        self._list(ring, now_ns, _ROWS_AT_ONCE)

    def list_more(self, now_ns: int) -> None:
        """Go on with the keyframe that has begun."""
        ring = self.ring
        if ring is not None and self.is_listing:
            self._list(ring, now_ns, _ROWS_PER_RECORD)

    def _list(self, ring: RingWriter, now_ns: int, num_rows: int) -> None:
        """List the next `num_rows` requests; end the keyframe if none is left."""
        most_rows = (ring.largest_bytes - 64) // MOST_ROW_BYTES
        requests = self.requests
        while True:
            asked = min(num_rows, most_rows)
            live, num_passed = requests.next_rows(now_ns, asked)
            self._put(ring, live)
            requests.pass_over(num_passed)
            if requests.is_listed:
                break
            num_rows -= asked
            if num_rows <= 0 or num_passed < asked:
                return
        # The record's time, if others were written meanwhile. From the offset between the clocks
        # subtract what has passed since then.
        now_ns = max(now_ns, self._last_t_ns)
        since_ns = self.clock.monotonic_ns() - now_ns
        self._put(ring, Clock(now_ns, self.clock.real_ns() - since_ns))
        self.is_listing = False
        ring.bytes_since_keyframe = 0

    def report(self, now_ns: int, *, complete_through_ns: int, num_dropped: int) -> None:
        """Write how the probe is: its state, cost and losses; before it, what the host counted."""
        ring = self.ring
        if ring is None:
            return
        self.health_due_ns = now_ns + HEALTH_NS
        sample, self.host_sample = self.host_sample, None
        if sample is not None:
            self._put(ring, msgspec.structs.replace(sample, t_ns=now_ns))
        self._frames_at_health = ring.sequence + 1
        self._put(
            ring,
            ProbeHealth(
                now_ns,
                self.state,
                ring.sequence,
                self.num_errors,
                self.cost_ns,
                complete_through_ns,
                num_dropped,
                self.message,
                self.odd.num,
                self.num_lost_calls,
                self.unsupported,
                self.hidden_ns,
            ),
        )

    def close(self) -> None:
        """Leave the ring on disk, its last record written."""
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.beat(0)
            ring.close()

    def abandon(self) -> RingWriter | None:
        """Release the parent's ring in a forked child without writing to it, and return it.

        The lock is replaced: a thread that the child does not have may hold the old one.
        """
        ring, self.ring = self.ring, None
        self.path = None
        self.state = FAILED
        self.lock = threading.RLock()
        return ring

    def _put(self, ring: RingWriter, record: Record, *, flags: int = 0) -> bool:
        """Write a record and return whether it is written.

        Time never runs backwards in a ring, not even between two threads.
        """
        if record.t_ns < self._last_t_ns:
            record = msgspec.structs.replace(record, t_ns=self._last_t_ns)
        self._last_t_ns = record.t_ns
        payload = encode(record)
        is_written = ring.write(record.CODE, payload, flags=flags)
        if not is_written:
            self._refuse(ring, record, len(payload))
        return is_written

    def _refuse(self, ring: RingWriter, record: Record, num_bytes: int) -> None:
        self._num_refused += 1
        self.repeats.forget()
        if ring.failure:
            self.message = f"{ring.num_failed} records left out: the ring: {ring.failure}"
            return
        self.message = (
            f"{self._num_refused} records left out: {type(record).__name__} of {num_bytes} bytes, "
            f"this ring takes {ring.largest_bytes}; set a larger INFERSCOPE_RING_MB"
        )
