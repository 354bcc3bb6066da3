"""Step timers: when a step's work began and ended, on the host's clock or on the device's.

A timer is started before a step's first launch and stopped when its last one is queued (device)
or its outputs are on the host (host). It never waits for the device: `reap` asks which events are
done and takes only those, so a span appears when the device is through with it, a step or two
later, and `pending_ns` says from when on spans are still missing.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol


class Span(NamedTuple):
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

    def start(self, step: int, now_ns: int, *, mode: str, cold: bool, dummy: bool) -> None:
        """Begin a step, right before its first launch."""

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """End the step begun last."""

    def reap(self, now_ns: int) -> list[Span]:
        """Return the spans that are complete, in step order."""

    def anchors(self) -> list[Anchor]:
        """Return the clock anchors that completed since the last call."""

    @property
    def pending_ns(self) -> int:
        """Return the start of the oldest step without a span, 0 for none."""

    @property
    def dropped(self) -> int:
        """Return how many steps lost their span: the pool was exhausted, or an event failed."""


class HostTimer:
    """Times a step from launch to outputs ready, for engines whose device is the CPU."""

    dropped = 0

    def __init__(self) -> None:
        self._open: tuple[int, int, str, bool, bool] | None = None
        self._done: list[Span] = []

    def start(self, step: int, now_ns: int, *, mode: str, cold: bool, dummy: bool) -> None:
        """Begin a step."""
        self._open = (step, now_ns, mode, cold, dummy)

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """End the step: its span is complete at once."""
        if self._open is None:
            return
        step, start_ns, mode, cold, dummy = self._open
        self._open = None
        self._done.append(
            Span(step, mode, padded_tokens, cold, dummy, start_ns, now_ns, now_ns, None, None)
        )

    def reap(self, now_ns: int) -> list[Span]:
        """Return the spans stopped since the last call."""
        done, self._done = self._done, []
        return done

    def anchors(self) -> list[Anchor]:
        """Return nothing: there is one clock."""
        return []

    @property
    def pending_ns(self) -> int:
        """Return the start of the step being executed, 0 for none."""
        return self._open[1] if self._open else 0


class EventSource(Protocol):
    """The four calls of a device's timing events; `TorchEvents` is the real one."""

    def new(self) -> Any:
        """Make an event that records time."""

    def record(self, event: Any) -> None:
        """Put the event on the current stream."""

    def is_done(self, event: Any) -> bool:
        """Ask, without waiting, whether the device has passed the event."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the time between two passed events; float32 on CUDA."""


class TorchEvents:
    """CUDA events by way of torch, which the observed process has loaded already."""

    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event

    def new(self) -> Any:
        """Make a timing event."""
        return self._event(enable_timing=True)

    def record(self, event: Any) -> None:
        """Record on the current stream."""
        event.record()

    def is_done(self, event: Any) -> bool:
        """Query; never synchronises."""
        return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return milliseconds between two passed events."""
        return float(start.elapsed_time(end))


ANCHOR_NS = 2_000_000_000
"""Between anchors. `elapsed_time` is a float32 of milliseconds: at 2 s it still resolves 0.12 µs,
after an hour 0.25 ms, so offsets are always taken from an anchor a few seconds old."""


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

    def __init__(self, events: EventSource, *, pool_steps: int = 64) -> None:
        """Take the event source; events are made as they are needed, up to the pool's size."""
        self._events = events
        self._limit = 2 * pool_steps + 2
        self._made = 0
        self._free: list[Any] = []
        self._flights: deque[_Flight] = deque()
        self._open: _Flight | None = None
        self.dropped = 0
        self._anchor: Any = None
        self._anchor_offset_ns = 0
        self._anchor_next: tuple[Any, int, int] | None = None
        self._anchor_due_ns = 0
        self._anchors: list[Anchor] = []

    def start(self, step: int, now_ns: int, *, mode: str, cold: bool, dummy: bool) -> None:
        """Record the start event; without a free event the step goes untimed, and is counted."""
        self._open = None
        if now_ns >= self._anchor_due_ns and self._anchor_next is None:
            self._drop_anchor(now_ns)
        event = self._take()
        if event is None:
            self.dropped += 1
            return
        self._open = _Flight(step, now_ns, mode, cold, dummy, event)
        self._events.record(event)

    def stop(self, now_ns: int, *, padded_tokens: int) -> None:
        """Record the end event on the same stream."""
        flight, self._open = self._open, None
        if flight is None:
            return
        event = self._take()
        if event is None:
            self._free.append(flight.start)
            self.dropped += 1
            return
        self._events.record(event)
        flight.end, flight.launch_end_ns, flight.padded = event, now_ns, padded_tokens
        self._flights.append(flight)

    def reap(self, now_ns: int) -> list[Span]:
        """Collect the flights that have landed, in order; a failing event costs its own step."""
        self._land_anchor(now_ns)
        spans: list[Span] = []
        flights = self._flights
        while flights:
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

    def anchors(self) -> list[Anchor]:
        """Return the anchors that landed since the last call."""
        landed, self._anchors = self._anchors, []
        return landed

    @property
    def pending_ns(self) -> int:
        """Return the launch of the oldest step in flight, 0 for none."""
        if self._flights:
            return self._flights[0].start_ns
        return self._open.start_ns if self._open else 0

    def _take(self) -> Any:
        if self._free:
            return self._free.pop()
        if self._made >= self._limit:
            return None
        self._made += 1
        return self._events.new()

    def _drop_anchor(self, now_ns: int) -> None:
        event = self._take()
        if event is not None:
            self._events.record(event)
            self._anchor_next = (event, now_ns, now_ns)
            self._anchor_due_ns = now_ns + ANCHOR_NS

    def _land_anchor(self, now_ns: int) -> None:
        """Take the anchor in flight, if the device has passed it.

        The device passed it between the recording and the first query that says so: the middle is
        the estimate, half the width its error. The width shrinks with every query that still says
        no, so an idle device gives microseconds and a busy one the age of its queue.
        """
        if self._anchor_next is None:
            return
        event, recorded_ns, not_yet_ns = self._anchor_next
        try:
            if not self._events.is_done(event):
                self._anchor_next = (event, recorded_ns, now_ns)
                return
            if self._anchor is not None:
                elapsed_ms = self._events.elapsed_ms(self._anchor, event)
                self._anchor_offset_ns += round(1e6 * elapsed_ms)
        except RuntimeError:
            self._anchor_next = None
            self._made -= 1
            return
        if self._anchor is not None:
            self._free.append(self._anchor)
        self._anchor, self._anchor_next = event, None
        error_ns = (now_ns - not_yet_ns) // 2
        self._anchors.append(Anchor(not_yet_ns + error_ns, self._anchor_offset_ns, error_ns))

    def _offset_ns(self, event: Any) -> int:
        """Return an event's offset since the first anchor (which is the first event of all)."""
        if self._anchor is None:
            raise RuntimeError("no anchor has landed")
        return self._anchor_offset_ns + round(1e6 * self._events.elapsed_ms(self._anchor, event))
