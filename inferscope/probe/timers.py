"""Step timers: when a step's work began and ended, on the host's clock or on the device's.

A timer is started before a step's first launch and stopped when its last one is queued (device)
or its outputs are on the host (host). It never waits for the device: `reap` asks which events are
done and takes only those, so a span appears when the device is through with it, a step or two
later, and `pending_ns` is the time from which spans are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import msgspec

from inferscope.host_signals import pass_on, suppressed


class Span(msgspec.Struct, frozen=True, gc=False):
    """A step's execution as timed; device times are offsets since the timer's first anchor."""

    step: int
    mode: str
    padded_tokens: int
    cold: bool
    dummy: bool
    launch_start_ns: int
    launch_end_ns: int
    ready_ns: int
    device_start_ns: int | None
    device_end_ns: int | None


class Anchor(NamedTuple):
    """The device's clock beside the host's: the offset was reached at `host_ns` ± `error_ns`."""

    host_ns: int
    device_ns: int
    error_ns: int


class StepTimer(Protocol):
    """What the probe needs of a timer; all calls come from under the probe's lock."""

    @property
    def is_marking(self) -> bool:
        """Return whether a step is open that `Marks` began, without the lock."""

    def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
        """Begin a step, right before its first launch; positional, for it is called every step."""

    def device_start(self) -> None:
        """Move the start of the open step's device span here: nothing ran for it before."""

    def device_end(self) -> None:
        """Set the end of the open step's device span here, before the host waits for it."""

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """End the step begun last."""

    def reap(self, now_ns: int) -> Sequence[Span]:
        """Return the spans that are complete, in step order; on the thread that runs the steps."""

    def reap_aside(self, now_ns: int) -> Sequence[Span]:
        """Return them on another thread, where that is safe; only while no step is open."""

    def anchors(self) -> Sequence[Anchor]:
        """Return the clock anchors that completed since the last call."""

    def forget(self) -> None:
        """Discard the step begun last and all outstanding spans: the probe is being switched."""

    @property
    def pending_ns(self) -> int:
        """Return the start of the oldest step without a span, 0 for none."""

    @property
    def dropped(self) -> int:
        """Return how many steps lost their span: the pool was exhausted, or the device failed."""


class HostTimer:
    """Times a step from launch to outputs ready, for engines whose device is the CPU.

    Attributes:
        dropped: steps without a span, because the next one began before they were stopped.
        pending_ns: the start of the step being executed, 0 for none.
        is_marking: False.
    """

    is_marking = False

    def __init__(self) -> None:
        self.dropped = 0
        self.pending_ns = 0
        self._open: tuple[int, int, str, bool, bool] | None = None
        self._done: list[Span] = []

    def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
        """Begin a step."""
        if self._open is not None:
            self.dropped += 1
        self._open = (step, now_ns, mode, cold, dummy)
        self.pending_ns = now_ns

    def device_start(self) -> None:
        """Do nothing: a host span runs from launch to outputs ready."""

    def device_end(self) -> None:
        """Do nothing, likewise."""

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """End the step: its span is complete at once."""
        if self._open is None:
            return
        step, start_ns, mode, cold, dummy = self._open
        self._open = None
        self.pending_ns = 0
        self._done.append(
            Span(step, mode, padded_tokens, cold, dummy, start_ns, now_ns, now_ns, None, None)
        )

    def reap(self, now_ns: int) -> Sequence[Span]:
        """Return the spans stopped since the last call."""
        if not self._done:
            return ()
        done, self._done = self._done, []
        return done

    def reap_aside(self, now_ns: int) -> Sequence[Span]:
        """Return the same: any thread may read the host's clock."""
        return self.reap(now_ns)

    def anchors(self) -> Sequence[Anchor]:
        """Return nothing: there is one clock."""
        return ()

    def forget(self) -> None:
        """Discard the step being executed, and spans not fetched."""
        self._open = None
        self._done = []
        self.pending_ns = 0


class EventSource(Protocol):
    """The calls of a device's timing events; `TorchEvents` is the real one.

    Any of them may raise anything: the timer discards its state and starts again.
    """

    def new(self) -> Any:
        """Make an event that records time."""

    def record(self, event: Any) -> None:
        """Put the event on the current stream of the timed device."""

    def record_aside(self, event: Any) -> None:
        """Put the event on a stream of our own, where nothing else is waited for."""

    def is_done(self, event: Any) -> bool:
        """Ask, without waiting, whether the device has passed the event."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the time between two passed events; float32 on CUDA."""

    def is_capturing(self) -> bool:
        """Return whether the calling thread records a graph: then no event may be queried."""

    def aside(self) -> AbstractContextManager[bool]:
        """Prepare a thread that is not the engine's; yield whether it may query events.

        It may not where a query would invalidate a graph capture of another thread.
        """

    def reset(self) -> None:
        """Forget the stream of `record_aside`, which may belong to a lost context."""


ANCHOR_NS = 2_000_000_000
"""Between anchors. `elapsed_time` is a float32 of milliseconds: at 2 s it still resolves 0.12 µs,
after an hour 0.25 ms, so offsets are always taken from an anchor a few seconds old."""
ANCHOR_AGAIN_NS = 100_000_000
"""Between a failure and the next use of the device: steps in between are not timed."""
_ANCHOR_QUERIES = 32
"""Made at once for a new anchor, some 50 µs: on a stream of its own it lands within a few."""


class Flight:
    """A step between its launch and the device's passing it.

    Attributes:
        start: event at which it begins.
        end: event at which it ends, None for none yet.
        has_start: the event `start` is recorded.
        launch_end_ns: when the host had queued it, 0 before.
    """

    __slots__ = (
        "cold",
        "dummy",
        "end",
        "has_start",
        "launch_end_ns",
        "mode",
        "padded",
        "start",
        "start_ns",
        "step",
    )
    step: int
    start_ns: int
    mode: str
    cold: bool
    dummy: bool

    def __init__(self, start: Any, end: Any) -> None:
        self.start, self.end = start, end
        self.has_start = False
        self.launch_end_ns = 0
        self.padded = 0


_MOST_SPARE = 4
"""Flights at hand for `Marks`: a step open, one that has ended, and two more under a pipeline."""


class EventTimer:
    """Times steps by pooled device events, reaped by query.

    An event that fails is hardly ever alone: its context is lost, or a kernel before it faulted.
    So any failure discards all events, the anchor and its stream; the steps in flight are counted
    as dropped, and timing starts again `ANCHOR_AGAIN_NS` later. Device offsets go on from the last
    anchor by the host's clock, so that they never run backwards.

    `Marks` notes steps in `marking` and `marked`, on the engine's thread and without the lock. They
    enter the flights, in their order, before the next step that is begun under the lock, and ahead
    of each look at the device. Of these lists each operation is atomic: the engine's thread adds to
    both, and a flight belongs to the thread that takes it out.

    Attributes:
        dropped: steps without a span, because the pool was exhausted or the device failed.
        events: of the device.
        spare: flights, with both events, for `Marks`.
        marking: the step that it has begun and not ended.
        marked: steps that it has ended.
    """

    def __init__(
        self,
        events: EventSource,
        *,
        pool_steps: int = 64,
        now: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Take the event source; events are made as they are needed, up to the pool's size."""
        self.events = self._events = events
        self._now = now
        self._limit = 2 * pool_steps + 2
        self._made = 0
        self._free: list[Any] = []
        self._flights: deque[Flight] = deque()
        self._open: Flight | None = None
        self.spare: list[Flight] = []
        self.marking: list[Flight] = []
        self.marked: deque[Flight] = deque()
        self._is_marked = False
        self.dropped = 0
        self._anchor: Any = None
        self._anchor_offset_ns = 0
        self._anchor_host_ns: int | None = None
        self._anchor_next: tuple[Any, int] | None = None
        self._anchor_due_ns = 0
        self._anchors: list[Anchor] = []
        self._resumes_ns = 0
        """Before then the device is left alone: it has just failed."""

    def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
        """Record the start event; without a free event the step goes untimed, and is counted."""
        self.give_up_marking()
        self._take_marked()
        if self._open is not None:
            self._give_up(self._open)
        event = self._started(now_ns)
        if event is None:
            self.dropped += 1
            return
        self._open = flight = Flight(event, None)
        flight.step, flight.start_ns, flight.mode = step, now_ns, mode
        flight.cold, flight.dummy = cold, dummy

    def device_start(self) -> None:
        """Record the start event again, later on the same stream."""
        flight = self._open
        if flight is None or flight.end is not None:
            return
        try:
            self._events.record(flight.start)
        except Exception as error:
            self._restart()
            pass_on(error)

    def device_end(self) -> None:
        """Record the end event; without a free event `stop` tries again."""
        flight = self._open
        if flight is not None and flight.end is None:
            flight.end = self._recorded(self._events.record)

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """Record the end event on the same stream, unless `device_end` has."""
        flight = self._open
        if flight is None:
            return
        self.device_end()
        if flight.end is None:
            if self._open is not None:  # the pool is exhausted
                self._give_up(flight)
            return
        self._open = None
        flight.launch_end_ns, flight.padded = now_ns, padded_tokens
        self._flights.append(flight)

    def reap(self, now_ns: int) -> list[Span]:
        """Collect the flights that have landed, in order; on the thread that runs the steps."""
        self._take_marked()
        has_to_ask = self._has_to_ask or self._is_marked
        if not has_to_ask or self._is_capturing():
            return []
        if self._is_marked:
            self._prepare(now_ns)
        return self._collect(now_ns)

    def reap_aside(self, now_ns: int) -> list[Span]:
        """Collect them from another thread, while no step is open; nothing where it may not ask."""
        self._take_marked()
        if not self._has_to_ask:
            return []
        spans: list[Span] = []
        with suppressed(Exception), self._events.aside() as may_ask:
            if may_ask:
                spans = self._collect(now_ns)
        return spans

    def forget(self) -> None:
        """Discard the step begun last and all in flight; their events may be recorded again."""
        for flight in self._flights:
            self._free += (flight.start, flight.end)
        self._flights.clear()
        for flight in self._drain_marked():
            self._release(flight)
        if self._open is not None:
            self._release(self._open)
            self._open = None
        if self._anchor_next is not None:
            self._free.append(self._anchor_next[0])
            self._anchor_next = None

    def anchors(self) -> Sequence[Anchor]:
        """Return the anchors that landed since the last call."""
        landed, self._anchors = self._anchors, []
        return landed

    @property
    def pending_ns(self) -> int:
        """Return the launch of the oldest step in flight, 0 for none."""
        if self._flights:
            return self._flights[0].start_ns
        for noted in (self.marked, self.marking):
            with suppress(IndexError):  # another thread took it out: into the flights, or to forget
                return noted[0].start_ns
        return self._open.start_ns if self._open else 0

    @property
    def is_marking(self) -> bool:
        """Return whether a step is open that `Marks` began."""
        return bool(self.marking)

    def begin_marking(self) -> None:
        """Keep spare flights from now on, and drop anchors while the device computes."""
        self._is_marked = True

    def give_up_marking(self) -> None:
        """Leave the step that `Marks` has begun without a span: its end was lost."""
        while self.marking:
            flight = self.marking.pop()
            if not flight.launch_end_ns:  # else it is among those that have ended
                self._release(flight)
                self.dropped += 1

    def lose_marking(self, num_lost: int) -> None:
        """Discard everything that the device gave: an event of `Marks` has failed.

        Args:
            num_lost: steps without a span that are in none of the lists.
        """
        self.dropped += num_lost
        self._restart()

    def _take_marked(self) -> None:
        """Enter the steps that `Marks` has ended."""
        while self.marked:
            self._flights.append(self.marked.popleft())

    def _drain_marked(self) -> list[Flight]:
        """Take out all flights that `Marks` has, spare ones apart."""
        drained = {id(flight): flight for flight in (*self.marked, *self.marking)}
        self.marked.clear()
        self.marking.clear()
        return list(drained.values())

    def _prepare(self, now_ns: int) -> None:
        """Make flights for the next steps, and drop an anchor if one is due."""
        if now_ns < self._resumes_ns:
            return
        while len(self.spare) < _MOST_SPARE and self._limit - self._made + len(self._free) > 1:
            start, end = self._taken(), self._taken()
            if start is None or end is None:  # the device has failed
                return
            self.spare.append(Flight(start, end))
        if self._anchor_next is None and max(self._anchor_due_ns, self._resumes_ns) <= now_ns:
            self._drop_anchor(now_ns)

    @property
    def _has_to_ask(self) -> bool:
        """Return whether an event is in flight; without one no call reaches the device."""
        return bool(self._flights) or self._anchor_next is not None

    def _is_capturing(self) -> bool:
        """Return whether the calling thread records a graph, or may."""
        try:
            return self._events.is_capturing()
        except Exception as error:
            pass_on(error)
            return True

    def _started(self, now_ns: int) -> Any:
        """Return the recorded start event of a step; None for a step that cannot be timed."""
        if now_ns < self._resumes_ns or self._is_capturing():
            return None
        if self._anchor_next is not None:
            self._land_anchor()
        elif now_ns >= self._anchor_due_ns:
            self._drop_anchor(now_ns)
        if now_ns < self._resumes_ns:
            return None
        return self._recorded(self._events.record)

    def _recorded(self, record: Callable[[Any], None]) -> Any:
        """Return an event that was just recorded; None where there is none, or it failed."""
        event = self._taken()
        if event is None:
            return None
        try:
            record(event)
        except Exception as error:
            self._restart()
            pass_on(error)
            return None
        return event

    def _taken(self) -> Any:
        """Return an event of the pool; None where there is none, or none can be made."""
        try:
            if self._free:
                return self._free.pop()
            if self._made >= self._limit:
                return None
            event = self._events.new()
        except Exception as error:
            self._restart()
            pass_on(error)
            return None
        self._made += 1
        return event

    def _restart(self) -> None:
        """Discard everything that the device gave, and leave it alone for a while."""
        self.dropped += len(self._flights) + (self._open is not None) + len(self._drain_marked())
        self._flights.clear()
        self.spare.clear()
        self._free.clear()
        self._made = 0
        self._open = self._anchor = self._anchor_next = None
        self._anchor_due_ns = self._resumes_ns = self._now() + ANCHOR_AGAIN_NS
        with suppressed(Exception):
            self._events.reset()

    def _give_up(self, flight: Flight) -> None:
        """Leave a step without a span."""
        self._open = None
        self._release(flight)
        self.dropped += 1

    def _release(self, flight: Flight) -> None:
        """Return the events of an open step to the pool."""
        self._free.append(flight.start)
        if flight.end is not None:
            self._free.append(flight.end)

    def _collect(self, now_ns: int) -> list[Span]:
        if self._anchor_next is not None:
            self._land_anchor()
        spans: list[Span] = []
        flights = self._flights
        while flights and self._anchor is not None:
            flight = flights[0]
            try:
                if not self._events.is_done(flight.end):
                    break
                start_ns = self._offset_ns(flight.start)
                end_ns = start_ns + round(1e6 * self._events.elapsed_ms(flight.start, flight.end))
            except Exception as error:
                self._restart()
                pass_on(error)
                break
            flights.popleft()
            self._free += (flight.start, flight.end)
            spans.append(
                Span(
                    flight.step,
                    flight.mode,
                    flight.padded,
                    flight.cold,
                    flight.dummy,
                    flight.start_ns,
                    flight.launch_end_ns,
                    now_ns,
                    start_ns,
                    max(start_ns, end_ns),
                )
            )
        return spans

    def _drop_anchor(self, now_ns: int) -> None:
        """Record an anchor aside, between two looks at the clock."""
        before_ns = self._now()
        event = self._recorded(self._events.record_aside)
        if event is None:
            self._anchor_due_ns = now_ns + ANCHOR_AGAIN_NS
            return
        self._anchor_due_ns = now_ns + ANCHOR_NS
        self._anchor_next = (event, before_ns)
        for _ in range(_ANCHOR_QUERIES):
            self._land_anchor()
            if self._anchor_next is None:
                break

    def _land_anchor(self) -> None:
        """Take the anchor in flight, if the device has passed it.

        The device passed it between the last look at the clock before a query that said no (or the
        recording) and the first look after one that said yes: the middle is the estimate, half the
        width its error. On a stream of its own that is a few microseconds, however busy the device.
        """
        if self._anchor_next is None:
            return
        event, before_ns = self._anchor_next
        asked_ns = self._now()
        try:
            if not self._events.is_done(event):
                self._anchor_next = (event, asked_ns)
                return
            after_ns = self._now()
            error_ns = (after_ns - before_ns + 1) // 2
            host_ns = before_ns + error_ns
            if self._anchor is not None:
                elapsed_ms = self._events.elapsed_ms(self._anchor, event)
                self._anchor_offset_ns += round(1e6 * elapsed_ms)
            elif self._anchor_host_ns is not None:  # the first since a restart
                self._anchor_offset_ns += host_ns - self._anchor_host_ns
        except Exception as error:
            self._restart()
            pass_on(error)
            return
        if self._anchor is not None:
            self._free.append(self._anchor)
        self._anchor, self._anchor_next, self._anchor_host_ns = event, None, host_ns
        self._anchors.append(Anchor(host_ns, self._anchor_offset_ns, error_ns))

    def _offset_ns(self, event: Any) -> int:
        """Return an event's offset since the first anchor; before it, negative."""
        return self._anchor_offset_ns + round(1e6 * self._events.elapsed_ms(self._anchor, event))
