"""Lock-free notes of steps on the engine's thread, between two dispatches: events and times.

    begin ─► marking ─ end ─► marked ─► flights      the last arrow is `EventTimer`'s, ahead of each
                                                     look at the device: behind the next launch

Before a launch the device waits for the host, and a model's weights have pushed our code out of the
caches, where each function called costs a microsecond or two. So a step is noted here without the
log's lock: only the engine's thread touches the step that is open. PENDING is written as well, but
while the step before has no span it states that one's start, and there is nothing to write.

All other steps go to the probe, under the lock: the first ones, for which no events are made yet; a
step whose predecessor's end was lost; all steps of a probe that is off, or is to be switched. There
the rules of `Probe.start` and `Probe.stop` hold.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from inferscope.host_signals import pass_on
from inferscope.probe.columns import LARGEST_INT64
from inferscope.probe.lifecycle import Life
from inferscope.probe.log import Log
from inferscope.probe.spans import Spans
from inferscope.probe.timers import EventTimer


class UnderLock(Protocol):
    """Methods of a probe that `Marks` calls."""

    def start(self, step: int, *, mode: str, cold: bool, dummy: bool, reaps: bool) -> None:
        """Begin a step."""

    def stop(self, step: int, *, padded_tokens: int) -> None:
        """End a step."""

    def device_start(self) -> None:
        """Move the start of the open step's device span here."""


class Marks:
    """Notes of the steps of one engine's thread. Arguments are numbers, and are not checked.

    Methods raise only exceptions of signal handlers. Behind each launch `book` has to be called,
    and then `Probe.sign`, `slices` or `same_step`, which write the steps that have ended.

    Arguments are passed by position: the interpreter runs a third of the code for such a call.

    Attributes:
        has_moved: whether the step noted last began by `device_start`; then the next one need not
            record an event at its launch.
    """

    __slots__ = (  # side by side in memory: each cache line that is touched cold costs 0.1 µs
        "_cost_ns",
        "_is_capturing",
        "_life",
        "_log",
        "_marked",
        "_marking",
        "_now_ns",
        "_probe",
        "_record",
        "_spans",
        "_spare",
        "_timer",
        "has_moved",
    )

    def __init__(
        self,
        probe: UnderLock,
        life: Life,
        spans: Spans,
        timer: EventTimer,
        log: Log,
        now_ns: Callable[[], int],
    ) -> None:
        """Prefer `Probe.marks`."""
        self._probe = probe
        self._life = life
        self._spans = spans
        self._timer = timer
        self._log = log
        self._now_ns = now_ns
        self._record = timer.events.record
        self._is_capturing = timer.events.is_capturing
        self._spare, self._marking, self._marked = timer.spare, timer.marking, timer.marked
        self._cost_ns = 0
        self.has_moved = False
        timer.begin_marking()

    def begin(
        self,
        step: int,
        mode: str = "eager",
        cold: bool = False,
        dummy: bool = False,
        starts: bool = True,
    ) -> None:
        """Begin a step, right before its first launch; see `Probe.start`.

        Args:
            step: number of the step.
            mode: launch mode.
            cold: whether it is the first step of its kind.
            dummy: whether it computes nothing for any request.
            starts: whether the device span begins here, unless `device_start` moves it. Otherwise
                it begins at `device_start`, and a step that ends without that call has no span.
        """
        life, spans, spare = self._life, self._spans, self._spare
        self.has_moved = False
        try:
            if (
                not spare
                or self._marking
                or spans.is_open
                or not life.on
                or not life.wants_on
                or type(step) is not int
                or not life.first_step <= step <= LARGEST_INT64
                or (starts and self._is_capturing())
            ):
                self._probe.start(step, mode=mode, cold=cold, dummy=dummy, reaps=False)
                return
            flight = spare.pop()
            spans.last_step_ns = flight.start_ns = began_ns = self._now_ns()
            if starts:
                try:
                    self._record(flight.start)
                except Exception as error:
                    self._lose(error, num_lost=1)
                    return
                flight.has_start = True
                self._cost_ns += self._now_ns() - began_ns
            spans.last_step = flight.step = step
            flight.mode, flight.cold, flight.dummy = mode, cold, dummy
            self._marking.append(flight)
            if not spans.pending_ns and life.is_ours():
                spans.publish_pending()
        except Exception as error:
            life.caught(error)

    def device_start(self) -> None:
        """Move the start of the open step's device span here; see `Probe.device_start`.

        The first call of a step counts: a model may run its forward in several parts.
        """
        if self.has_moved:
            return
        marking, self.has_moved = self._marking, True
        if not marking:
            self._probe.device_start()
            return
        try:
            flight, began_ns = marking[-1], self._now_ns()
            self._record(flight.start)
            flight.has_start = True
            self._cost_ns += self._now_ns() - began_ns
        except Exception as error:
            self._lose(error)

    def end(self, step: int, padded_tokens: int = 0) -> int:
        """End a step, right behind its last launch, and its device span; return the time in ns.

        See `Probe.stop`.
        """
        now_ns, marking = self._now_ns(), self._marking
        if not marking or marking[-1].step != step:
            self._end_another(step, padded_tokens)
            return now_ns
        try:
            flight = marking[-1]
            if not flight.has_start:
                self._end_unstarted(now_ns)
                return now_ns
            self._record(flight.end)
            self._cost_ns += self._now_ns() - now_ns
        except Exception as error:
            self._lose(error)
            return now_ns
        self._spans.last_step_ns = flight.launch_end_ns = now_ns
        flight.padded = padded_tokens
        # In this order: an exception of a signal handler between them costs no step.
        self._marked.append(flight)
        del marking[-1:]  # not `pop`: a signal handler or the probe's thread may have emptied it
        return now_ns

    def book(self) -> None:
        """Add the cost of the events to the probe's; called behind each launch."""
        self._spans.thread = get_ident()
        # Without the lock: an addition may be lost, and none is torn.
        cost_ns, self._cost_ns = self._cost_ns, 0
        self._log.cost_ns += cost_ns

    def _end_unstarted(self, now_ns: int) -> None:
        """Drop the span of a step that should have begun at `device_start`, but did not."""
        try:
            self._life.perform(now_ns, None, _give_up, self._timer)
        except Exception as error:
            self._life.caught(error)

    def _end_another(self, step: int, padded_tokens: int) -> None:
        """End a step that is not the one begun here last."""
        marking, life = self._marking, self._life
        try:
            if marking and step < marking[-1].step:
                return  # a later one has replaced it
            if marking:  # the later one's beginning was lost, and so was the open one's end
                life.perform(self._now_ns(), None, _give_up, self._timer)
            self._probe.stop(step, padded_tokens=padded_tokens)
        except Exception as error:
            life.caught(error)

    def _lose(self, error: Exception, *, num_lost: int = 0) -> None:
        """Drop the spans of all noted steps: an event has failed.

        Raises:
            Exception: the same one, where it is of a signal handler of the host.
        """
        life = self._life
        try:
            lose = self._timer.lose_marking
            life.perform(self._now_ns(), lose, lose, num_lost)
        except Exception as raised:
            life.caught(raised)
        pass_on(error)


def _give_up(timer: Any) -> None:
    timer.give_up_marking()
