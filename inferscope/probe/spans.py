"""Spans: the timer's times of the steps, written to the log beside the slices they belong to.

A span appears when its step is through, which a device reports one or two steps later. Until then
the ring's word `pending` holds the start of the oldest step without one, for readers that must not
take a missing span for an idle device.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from typing import NamedTuple

from inferscope.probe.log import Log
from inferscope.probe.timers import StepTimer
from inferscope.records import Clock, StepSpan

_NOT_TOLD: tuple[None, int] = (None, 0)


class Signature(NamedTuple):
    """What is known of a step besides its times.

    Attributes:
        digest: by which its span and its slices recognise each other.
        tokens: prefills' and others', where the slices are recorded elsewhere.
        mode: how it was launched; None for what was given as it began.
        padded_tokens: that it was padded to; None for what was given as it ended.
        waited_ns: time within it that this rank waited for others.
    """

    digest: int = 0
    tokens: tuple[int | None, int] = _NOT_TOLD
    mode: str | None = None
    padded_tokens: int | None = None
    waited_ns: int = 0


_UNSIGNED = Signature()
_MOST_SIGNED = 64
"""Steps that wait for their spans; of ones whose spans never come the oldest are forgotten."""
LONG_STEP_NS = 1_000_000_000
"""A step longer than this is taken for one that will not end, when the probe is switched."""


class Spans:
    """Times the steps. The log's lock stands around every call.

    Attributes:
        timer: who measures.
        last_step: the step begun last.
        is_open: a step was begun here and has not ended; `Marks` knows of its own.
        last_step_ns: when the engine's thread last began or ended one.
        thread: that began the last step: it alone may query the device while a step is open.
        pending_ns: start of the oldest step without a span, as published; 0 for none.
        deferred_ns: time of the oldest fact that an adapter keeps and has not written, 0 for none.
    """

    def __init__(self, timer: StepTimer, log: Log) -> None:
        self.timer = timer
        self.last_step = -1
        self.last_step_ns = 0
        self.deferred_ns = 0
        self._log = log
        self._has_stopped = False
        """A step ended since the last `reap`."""
        self.is_open = False
        self.thread = 0
        self.pending_ns = 0
        self._endless: deque[int] = deque(maxlen=_MOST_SIGNED)
        """Steps whose spans are left out, until the timer returns them."""
        self._num_endless = 0
        self._signed: dict[int, Signature] = {}
        """Signatures by step, until its span is written."""

    def start(self, begun: tuple[int, int, str, bool, bool]) -> None:
        """Begin timing a step: its number, when, its mode, whether it is cold, and a dummy."""
        self.thread = get_ident()
        if self._has_stopped or self.pending_ns:
            self.reap(begun[1])
        self.begin(begun)

    def begin(self, begun: tuple[int, int, str, bool, bool]) -> None:
        """Do the same, and leave the spans of earlier steps to the next `reap`."""
        step, now_ns, mode, cold, dummy = begun
        self.thread = get_ident()
        self.last_step_ns = now_ns
        timer = self.timer
        self.is_open = True
        timer.start(step, now_ns, mode, cold, dummy)
        # `publish_pending`, without the call: this is before a launch.
        self.pending_ns = pending_ns = timer.pending_ns
        if self._log.ring is not None:
            self._log.ring.set_pending(pending_ns)
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
        if step != self.last_step and self.is_open:
            if step < self.last_step:
                return
            self._endless.append(self.last_step)
        self.last_step_ns = now_ns
        self.timer.stop(now_ns, padded_tokens=padded_tokens)
        self.is_open, self._has_stopped = False, True

    def sign(self, step: int, signature: Signature) -> None:
        """Remember what is known of a step until its span is written."""
        signed = self._signed
        signed[step] = signature
        if len(signed) > _MOST_SIGNED:
            del signed[next(iter(signed))]

    def reap(self, now_ns: int) -> None:
        """Write what the timer has completed.

        A thread that does not run the steps leaves the device alone while one is open: the engine
        may be capturing a graph in it.
        """
        log, timer = self._log, self.timer
        if get_ident() == self.thread:
            spans = timer.reap(now_ns)
        elif self.is_open or timer.is_marking:
            return
        else:
            spans = timer.reap_aside(now_ns)
        self._has_stopped = False
        anchors = timer.anchors()
        for anchor in anchors:  # first: they place the spans
            real_ns = log.clock.real_ns() - (log.clock.monotonic_ns() - anchor.host_ns)
            log.write(Clock(now_ns, real_ns, anchor.device_ns, anchor.error_ns, anchor.host_ns))
        for span in spans:
            digest, tokens, mode, padded, waited_ns = self._signed.pop(span.step, _UNSIGNED)
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
                    (waited_ns,) if waited_ns else (),
                    span.mode if mode is None else mode,
                    span.padded_tokens if padded is None else padded,
                    span.cold,
                    span.dummy,
                    False,
                    *tokens,
                )
            )
        self.publish_pending()

    def report(self, now_ns: int) -> None:
        """Write the probe's health, and the time through which its spans are complete."""
        timer = self.timer
        pending_ns, deferred_ns = timer.pending_ns or now_ns, self.deferred_ns or now_ns
        self._log.report(
            now_ns,
            complete_through_ns=min(pending_ns, deferred_ns),
            num_dropped=timer.dropped + self._num_endless,
        )

    def forget(self) -> None:
        """Discard the step in flight and all outstanding spans."""
        self.timer.forget()
        self._signed.clear()
        self._endless.clear()
        self._has_stopped = False
        self.publish_pending()

    def is_between_steps(self, now_ns: int) -> bool:
        """Return whether no step is in flight, or only one that seems never to end."""
        return not self.timer.pending_ns or now_ns - self.last_step_ns > LONG_STEP_NS

    def publish_pending(self) -> None:
        """Write the start of the oldest step without a span where readers look for it.

        `Marks` begins a step first and then looks at `pending_ns`, beside a thread that has found
        no step and is about to publish that. So a thread that publishes none looks again.
        """
        timer, ring = self.timer, self._log.ring
        while True:
            self.pending_ns = start_ns = timer.pending_ns
            if ring is not None:
                ring.set_pending(start_ns)
            if start_ns or not timer.pending_ns:
                return
