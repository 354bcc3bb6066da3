"""Housekeeping of a probe: every 100 ms beside the engine's thread, and at a fork.

A daemon thread beats the heart, reads the control byte, looks whether a profile is asked for,
inspects the ring's file and reads the host's counters, none of which takes the lock. Only when no
step has run for 50 ms, and the lock is free, does it take that, to reap (never from a device while
a step is open) and to report for an engine that is idle. It is the one thing of a probe that a fork
does not copy, so it is here that a forked child learns that the ring is not its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from inferscope.host_signals import suppressed
from inferscope.probe.host_log import would_block
from inferscope.probe.host_pressure import HostPressure
from inferscope.probe.lifecycle import Life
from inferscope.probe.log import HEALTH_NS, Log
from inferscope.probe.profiling import Profiling
from inferscope.probe.spans import Spans
from inferscope.records import UNSUPPORTED, CounterSample
from inferscope.ring import ControlByte

IDLE_NS = 50_000_000
_PARTS_AT_ONCE = 4
"""Records of an unfinished keyframe written per look; the engine's thread may wait for them."""

_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


class Keeper:
    """Housekeeping thread of a probe, until it is stopped or the process forks."""

    def __init__(self, log: Log, spans: Spans, life: Life, switch: ControlByte | None) -> None:
        self._log = log
        self._spans = spans
        self._life = life
        self._switch = switch
        self._switch_was_on = True
        self._profiling = None if log.path is None else Profiling(log.path)
        self._host = HostPressure()
        self._now = log.clock.monotonic_ns
        self.write_overdue: Callable[[int], object] | None = None
        """See `Probe.look_after`."""
        self._log_thread: threading.Thread | None = None
        self._is_stopping = False
        self._wake = threading.Lock()
        """Held until `stop`. No Event: its lock hangs a `stop` within a `stop` of one thread."""
        self._wake.acquire()
        _keepers.add(self)

    def begin(self, name: str) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system gives no more threads.
        """
        threading.Thread(target=self._keep, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the thread, at its next look; safe to call twice."""
        self._is_stopping = True
        with suppressed(RuntimeError):  # released already
            self._wake.release()

    def close(self) -> None:
        """Close the control byte, once no thread reads it any longer; safe to call twice."""
        if self._switch is not None:
            self._switch.close()

    def tend(self) -> None:
        """Beat the heart, which goes on whatever the probe's state; see to an idle engine."""
        life, log = self._life, self._log
        try:
            ring, now_ns = log.ring, self._now()
            if ring is None:
                return
            line = ring.inspect()  # first: its descriptor may be another file's by now
            if line:
                life.queue_message(line)
            ring.beat(now_ns)
            self._read_switch()
            if self._profiling is not None:
                self._profiling.poll()
            if life.on and self._host.is_due(now_ns):
                self._read_host(now_ns)
            if life.on and self.write_overdue is not None:
                self.write_overdue(now_ns)
            is_silent = not (life.on or life.wants_on or log.is_listing)
            if is_silent and log.state != UNSUPPORTED:
                return
            if now_ns - self._spans.last_step_ns < IDLE_NS or not log.lock.acquire(blocking=False):
                return
            try:
                # Read again: the interpreter's lock may have been another thread's for long, and a
                # record that is older than half a second comes behind the reader's fold.
                self._see_to(self._now())
            finally:
                log.lock.release()
                life.catch_up_unlocked()
        except Exception as error:
            life.caught(error)

    def fork(self) -> None:
        """Make the probe of a forked child a silent one."""
        self._life.fork()
        with suppressed(Exception):
            self.close()

    def _keep(self) -> None:
        while not self._wake.acquire(timeout=HEALTH_NS / 1e9) and not self._is_stopping:
            try:
                self.tend()
                self._write_messages()
            except Exception:  # noqa: PERF203 -- out of memory, perhaps for a moment
                continue
        self._life.catch_up_unlocked()
        self._write_messages()

    def _read_host(self, now_ns: int) -> None:
        """Read the host's counters; the next report writes them, on whichever thread that is."""
        counted = self._host.read(now_ns)
        if counted is not None:
            start_ns, values = counted
            self._log.host_sample = CounterSample(now_ns, "", start_ns, now_ns, "host", values)

    def _write_messages(self) -> None:
        """Begin to write pending messages, which may take for ever; the heart beats on."""
        if not self._life.has_messages or (
            self._log_thread is not None and self._log_thread.is_alive()
        ):
            return
        if would_block():
            return
        thread = threading.Thread(
            target=self._life.write_messages, name="inferscope-log", daemon=True
        )
        with suppress(RuntimeError):  # the system gives no more threads: at the next look
            thread.start()
            self._log_thread = thread

    def _read_switch(self) -> None:
        """Take notice when the byte changes: what stopped otherwise it does not start again."""
        if self._switch is None:
            return
        is_on = self._switch.is_on()
        if is_on != self._switch_was_on:
            self._switch_was_on = is_on
            self._life.want(is_on=is_on)

    def _see_to(self, now_ns: int) -> None:
        """Do for an idle engine what its next step would do; the lock is held."""
        life, log, spans = self._life, self._log, self._spans
        life.catch_up()
        if log.ring is None:
            return
        for _ in range(_PARTS_AT_ONCE):
            log.list_more(now_ns)
        if life.wants_on is not life.on and spans.is_between_steps(now_ns):
            life.turn(now_ns, spans.last_step + 1)
        if log.state == UNSUPPORTED and now_ns >= log.keyframe_due_ns:
            log.restate(now_ns)  # its process lives, and that is all there is to report
            spans.report(now_ns)
        if not life.on:
            return
        spans.reap(now_ns)
        # A rank without requests of its own must not fall silent in a step that takes long.
        if log.has_news or log.requests.num_live or spans.timer.pending_ns:
            life.report(now_ns)
        is_due = now_ns >= log.keyframe_due_ns or log.ring.wants_keyframe
        if is_due and not log.is_listing:
            log.restate(now_ns)


def _after_fork() -> None:
    for keeper in list(_keepers):
        keeper.fork()


os.register_at_fork(after_in_child=_after_fork)
