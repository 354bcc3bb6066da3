"""Step timers: when a step's work began and ended, on the host's clock or on the device's.

A timer is started before a step's first launch and stopped when its last one is queued (device)
or its outputs are on the host (host). It never waits for the device: `reap` asks which events are
done and takes only those, so a span appears when the device is through with it, a step or two
later, and `pending_ns` says from when on spans are still missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import msgspec


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

    def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
        """Begin a step, right before its first launch; positional, for it is called every step."""

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """End the step begun last."""

    def reap(self, now_ns: int) -> Sequence[Span]:
        """Return the spans that are complete, in step order."""

    def anchors(self) -> Sequence[Anchor]:
        """Return the clock anchors that completed since the last call."""

    def forget(self) -> None:
        """Give up the step begun last and all spans still to come: the probe is being switched."""

    @property
    def pending_ns(self) -> int:
        """Return the start of the oldest step without a span, 0 for none."""

    @property
    def dropped(self) -> int:
        """Return how many steps lost their span: the pool was exhausted, or an event failed."""


class HostTimer:
    """Times a step from launch to outputs ready, for engines whose device is the CPU.

    Attributes:
        dropped: steps without a span, because the next one began before they were stopped.
        pending_ns: the start of the step being executed, 0 for none.
    """

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

    def anchors(self) -> Sequence[Anchor]:
        """Return nothing: there is one clock."""
        return ()

    def forget(self) -> None:
        """Give up the step being executed, and spans not fetched."""
        self._open = None
        self._done = []
        self.pending_ns = 0


class EventSource(Protocol):
    """The calls of a device's timing events; `TorchEvents` is the real one.

    Any of them may raise RuntimeError, as CUDA does: it costs what the event was for.
    """

    def new(self) -> Any:
        """Make an event that records time."""

    def record(self, event: Any) -> None:
        """Put the event on the current stream."""

    def record_aside(self, event: Any) -> None:
        """Put the event on a stream of our own, where nothing else is waited for."""

    def is_done(self, event: Any) -> bool:
        """Ask, without waiting, whether the device has passed the event."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the time between two passed events; float32 on CUDA."""


class TorchEvents:
    """CUDA events by way of torch, which the observed process has loaded already."""

    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event
        self._new_stream: Any = torch.cuda.Stream
        self._aside: Any = None

    def new(self) -> Any:
        """Make a timing event."""
        return self._event(enable_timing=True)

    def record(self, event: Any) -> None:
        """Record on the current stream."""
        event.record()

    def record_aside(self, event: Any) -> None:
        """Record on a side stream, made on first use: on the device that is then the current."""
        if self._aside is None:
            self._aside = self._new_stream()
        event.record(self._aside)

    def is_done(self, event: Any) -> bool:
        """Query; never synchronises."""
        return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return milliseconds between two passed events."""
        return float(start.elapsed_time(end))


ANCHOR_NS = 2_000_000_000
"""Between anchors. `elapsed_time` is a float32 of milliseconds: at 2 s it still resolves 0.12 µs,
after an hour 0.25 ms, so offsets are always taken from an anchor a few seconds old."""
ANCHOR_AGAIN_NS = 100_000_000
"""After one that failed."""
_ANCHOR_QUERIES = 32
"""Made at once for a new anchor, some 50 µs: on a stream of its own it lands within a few."""


class _Flight:
    """A step between its launch and the device's passing it."""

    __slots__ = (
        "cold",
        "dummy",
        "end",
        "launch_end_ns",
        "mode",
        "padded",
        "start",
        "start_ns",
        "step",
    )

    def __init__(self, step: int, start_ns: int, mode: str, cold: bool, dummy: bool, start: Any):
        self.step, self.start_ns, self.mode, self.cold, self.dummy = (
            step,
            start_ns,
            mode,
            cold,
            dummy,
        )
        self.start = start
        self.end: Any = None
        self.launch_end_ns = 0
        self.padded = 0


class EventTimer:
    """Times steps by pooled device events, reaped by query.

    Attributes:
        dropped: steps without a span, because the pool was exhausted or an event failed.
    """

    def __init__(
        self,
        events: EventSource,
        *,
        pool_steps: int = 64,
        now: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Take the event source; events are made as they are needed, up to the pool's size."""
        self._events = events
        self._now = now
        self._limit = 2 * pool_steps + 2
        self._made = 0
        self._free: list[Any] = []
        self._flights: deque[_Flight] = deque()
        self._open: _Flight | None = None
        self.dropped = 0
        self._anchor: Any = None
        self._anchor_offset_ns = 0
        self._anchor_next: tuple[Any, int] | None = None
        self._anchor_due_ns = 0
        self._anchors: list[Anchor] = []

    def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
        """Record the start event; without a free event the step goes untimed, and is counted."""
        if self._open is not None:
            self._give_up(self._open)
        if self._anchor_next is not None:
            self._land_anchor()
        elif now_ns >= self._anchor_due_ns:
            self._drop_anchor(now_ns)
        event = self._recorded(self._events.record)
        if event is None:
            self.dropped += 1
        else:
            self._open = _Flight(step, now_ns, mode, cold, dummy, event)

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """Record the end event on the same stream."""
        flight = self._open
        if flight is None:
            return
        event = self._recorded(self._events.record)
        if event is None:
            self._give_up(flight)
            return
        self._open = None
        flight.end, flight.launch_end_ns, flight.padded = event, now_ns, padded_tokens
        self._flights.append(flight)

    def reap(self, now_ns: int) -> list[Span]:
        """Collect the flights that have landed, in order; a failing event costs its own step."""
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
            except RuntimeError:
                # A failed event is thrown away, not pooled: it would fail again.
                flights.popleft()
                self._made -= 2
                self.dropped += 1
                continue
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

    def forget(self) -> None:
        """Give up the step begun last and all in flight; recording their events anew is allowed."""
        for flight in self._flights:
            self._free += (flight.start, flight.end)
        self._flights.clear()
        if self._open is not None:
            self._free.append(self._open.start)
            self._open = None

    def anchors(self) -> Sequence[Anchor]:
        """Return the anchors that landed since the last call."""
        landed, self._anchors = self._anchors, []
        return landed

    @property
    def pending_ns(self) -> int:
        """Return the launch of the oldest step in flight, 0 for none."""
        if self._flights:
            return self._flights[0].start_ns
        return self._open.start_ns if self._open else 0

    def _recorded(self, record: Callable[[Any], None]) -> Any:
        """Return an event that was just recorded; None where there is none, or it failed."""
        if self._free:
            event = self._free.pop()
        elif self._made < self._limit:
            event = self._events.new()
            self._made += 1
        else:
            return None
        try:
            record(event)
        except RuntimeError:
            self._made -= 1
            return None
        return event

    def _give_up(self, flight: _Flight) -> None:
        """Leave a step without a span."""
        self._open = None
        self._free.append(flight.start)
        self.dropped += 1

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
        try:
            asked_ns = self._now()
            if not self._events.is_done(event):
                self._anchor_next = (event, asked_ns)
                return
            after_ns = self._now()
            if self._anchor is not None:
                elapsed_ms = self._events.elapsed_ms(self._anchor, event)
                self._anchor_offset_ns += round(1e6 * elapsed_ms)
        except RuntimeError:
            self._anchor_next = None
            self._made -= 1
            self._anchor_due_ns = before_ns + ANCHOR_AGAIN_NS
            return
        if self._anchor is not None:
            self._free.append(self._anchor)
        self._anchor, self._anchor_next = event, None
        error_ns = (after_ns - before_ns + 1) // 2
        self._anchors.append(Anchor(before_ns + error_ns, self._anchor_offset_ns, error_ns))

    def _offset_ns(self, event: Any) -> int:
        """Return an event's offset since the first anchor; before it, negative."""
        return self._anchor_offset_ns + round(1e6 * self._events.elapsed_ms(self._anchor, event))
