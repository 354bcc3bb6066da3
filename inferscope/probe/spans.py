"""The spans: what the timer says of the steps, put into the log beside the slices it belongs to.

A span appears when its step is through, which a device says one or two steps later. Until then the
ring's word `pending` holds the start of the oldest step without one, for readers that must not
take a missing span for an idle device.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident

from inferscope.probe.log import Log
from inferscope.probe.timers import StepTimer
from inferscope.records import Clock, StepSpan

_NOT_TOLD: tuple[None, int] = (None, 0)
_UNSIGNED = (0, _NOT_TOLD)
_MOST_SIGNED = 64
"""Steps that wait for their spans; of ones whose spans never come the oldest are forgotten."""
LONG_STEP_NS = 1_000_000_000
"""A step longer than this is taken for one that will not end, when the probe is switched."""


class Spans:
    """Times the steps. The log's lock stands around every call.

    Attributes:
        timer: who measures.
        last_step: the step begun last.
        last_step_ns: when the engine's thread last began or ended one.
    """

    def __init__(self, timer: StepTimer, log: Log) -> None:
        self.timer = timer
        self.last_step = -1
        self.last_step_ns = 0
        self._log = log
        self._has_stopped = False
        """A step ended since the last `reap`."""
        self._is_open = False
        self._thread = 0
        """The one that began the last step: it alone may ask the device while a step is open."""
        self._pending_ns = 0
        """As published; asking the timer instead costs 0.05 µs more per step."""
        self._endless: deque[int] = deque(maxlen=_MOST_SIGNED)
        """Steps whose spans are left out, until the timer returns them."""
        self._num_endless = 0
        self._signed: dict[int, tuple[int, tuple[int | None, int]]] = {}
        """By step: its digest and its tokens, prefills' and others', until its span is written."""

    def start(self, begun: tuple[int, int, str, bool, bool]) -> None:
        """Begin timing a step: its number, when, its mode, whether it is cold, and a dummy."""
        step, now_ns, mode, cold, dummy = begun
        self._thread = get_ident()
        if self._has_stopped or self._pending_ns:
            self.reap(now_ns)
        self.last_step_ns = now_ns
        timer = self.timer
        self._is_open = True
        timer.start(step, now_ns, mode, cold, dummy)
        self._publish_pending(timer.pending_ns)
        self.last_step = step

    def device_start(self, now_ns: int) -> None:
        """Move the start of the open step's device span here."""
        self.timer.device_start()

    def device_end(self, now_ns: int) -> None:
        """Set the end of the open step's device span here."""
        self.timer.device_end()

    def stop(self, ended: tuple[int, int, int]) -> None:
        """End timing a step: its number, when, and its padded tokens.

        Nothing is done for a step that a later one has replaced. If a later one ends whose `start`
        was lost, the open one's end was lost too: its span is left out, and counted as dropped.
        """
        step, now_ns, padded_tokens = ended
        if step != self.last_step and self._is_open:
            if step < self.last_step:
                return
            self._endless.append(self.last_step)
        self.last_step_ns = now_ns
        self.timer.stop(now_ns, padded_tokens=padded_tokens)
        self._is_open, self._has_stopped = False, True

    def sign(self, step: int, digest: int, tokens: tuple[int | None, int] = _NOT_TOLD) -> None:
        """Remember by which digest the span of a step and its slices recognise each other.

        Args:
            step: its number.
            digest: of its requests and tokens.
            tokens: prefills' and others', where the slices are told elsewhere.
        """
        signed = self._signed
        signed[step] = digest, tokens
        if len(signed) > _MOST_SIGNED:
            del signed[next(iter(signed))]

    def reap(self, now_ns: int) -> None:
        """Write what the timer has completed.

        A thread that does not run the steps leaves the device alone while one is open: the engine
        may be capturing a graph in it.
        """
        log, timer = self._log, self.timer
        if get_ident() == self._thread:
            spans = timer.reap(now_ns)
        elif self._is_open:
            return
        else:
            spans = timer.reap_aside(now_ns)
        self._has_stopped = False
        anchors = timer.anchors()
        for anchor in anchors:  # first: they place the spans
            real_ns = log.clock.real_ns() - (log.clock.monotonic_ns() - anchor.host_ns)
            log.write(Clock(now_ns, real_ns, anchor.device_ns, anchor.error_ns, anchor.host_ns))
        for span in spans:
            digest, tokens = self._signed.pop(span.step, _UNSIGNED)
            if span.step in self._endless:
                self._endless.remove(span.step)
                self._num_endless += 1
                continue
            log.write(
                StepSpan(
                    now_ns,
                    span.step,
                    digest,
                    span.launch_start_ns,
                    span.launch_end_ns,
                    span.ready_ns,
                    span.device_start_ns,
                    span.device_end_ns,
                    (),
                    span.mode,
                    span.padded_tokens,
                    span.cold,
                    span.dummy,
                    False,
                    *tokens,
                )
            )
        self._publish_pending(timer.pending_ns)

    def report(self, now_ns: int) -> None:
        """Write how the probe is, and through when the spans are complete."""
        timer = self.timer
        self._log.report(
            now_ns,
            complete_through_ns=timer.pending_ns or now_ns,
            num_dropped=timer.dropped + self._num_endless,
        )

    def forget(self) -> None:
        """Give up the step under way and all spans still to come."""
        self.timer.forget()
        self._signed.clear()
        self._endless.clear()
        self._has_stopped = False
        self._publish_pending(0)

    def is_between_steps(self, now_ns: int) -> bool:
        """Tell whether no step is under way, or only one that seems never to end."""
        return not self.timer.pending_ns or now_ns - self.last_step_ns > LONG_STEP_NS

    def _publish_pending(self, start_ns: int) -> None:
        self._pending_ns = start_ns
        if self._log.ring is not None:
            self._log.ring.set_pending(start_ns)
