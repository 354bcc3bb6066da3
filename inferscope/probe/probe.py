"""The probe: what an engine calls, per step and per request, and all it has to know of InferScope.

    probe = Probe.open(EngineInfo(t_ns=0, engine="mine", model="tiny"))
    index = probe.queued("request-1", prompt_tokens=12)
    probe.plan(...); probe.start(step); ...run...; probe.stop(step)
    probe.slices(...); probe.emitted(...); probe.finished(index, "stop")

Every method may be called at any time from the engine's loop. None raises, waits or grows without
bound: the first failure inside switches the probe off for good and says so once. A record too large
for its ring is no failure: it is left out, counted, and readers know that they miss it. Switched
off, a call is one attribute test. Budget: 15 µs per step at batch 64 for all calls together, 1 µs
when off (benchmarks/probe_cost.py); within a running engine, whose weights have pushed our code out
of the cache, several times that (benchmarks/probe_overhead.py).

A probe belongs to one process and one writing thread. A daemon thread beside it beats the heart,
reads the control byte and makes pages ready; when no step has run for 50 ms it takes the ring's
lock (if it is free) to reap and to restate.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from inferscope.probe.budget import Budget, budget_share
from inferscope.probe.clock import Clock as TimeSource
from inferscope.probe.clock import SystemClock
from inferscope.probe.columns import attributes as bounded
from inferscope.probe.columns import column, digest64, name, text
from inferscope.probe.opening import discard, make_ring
from inferscope.probe.requests import RequestTable
from inferscope.probe.timers import HostTimer, StepTimer
from inferscope.records import (
    ADMITTED,
    CLOSED,
    FAILED,
    FINISHED,
    FIRST_BYTE,
    HELD,
    LAST_BYTE,
    OFF,
    ON,
    OVER_BUDGET,
    PREEMPTED,
    QUEUED,
    RECEIVED,
    RESUMED,
    RUNNING,
    TOKENISED,
    WAITING,
    Clock,
    Emitted,
    EngineInfo,
    Keyframe,
    ProbeHealth,
    Record,
    RequestEvent,
    RequestIndex,
    StepPlan,
    StepSlices,
    StepSpan,
    encode,
)
from inferscope.ring import layout
from inferscope.ring.control import ControlByte, open_control
from inferscope.ring.writer import RingWriter

logger = logging.getLogger(__name__)

KEYFRAME_NS = 10_000_000_000
HEALTH_NS = 100_000_000
IDLE_NS = 50_000_000
LONG_STEP_NS = 1_000_000_000
"""A step longer than this is taken for one that will not end, when the probe is switched."""
NO_REQUEST = RequestIndex(0xFFFFFFFF)
"""What `queued` and `received` return when nothing is being recorded; every call accepts it."""

_probes: weakref.WeakSet[Probe] = weakref.WeakSet()


class Probe:
    """Writes what an engine does into its ring.

    Attributes:
        on: recording now. Cheap to test; an engine may skip building columns when it is False.
        path: the ring file, None when there is none.
    """

    def __init__(
        self,
        ring: RingWriter | None,
        switch: ControlByte | None,
        info: EngineInfo,
        *,
        timer: StepTimer | None = None,
        clock: TimeSource | None = None,
    ) -> None:
        """Prefer `Probe.open`; this takes the parts apart for tests."""
        self.clock = clock or SystemClock()
        self._now = self.clock.monotonic_ns
        self._ring = ring
        self._switch = switch
        self._info = info
        self._timer: StepTimer = timer or HostTimer()
        self._requests = RequestTable()
        self._lock = threading.Lock()
        self._digest = 0
        self._digest_step = -1
        self._first_step = -1
        self._last_step = -1
        self._has_unreaped = False
        self._cost_ns = 0
        self._num_refused = 0
        self._errors = 0
        self._state = ON if ring is not None else FAILED
        self._message = ""
        self._last_t_ns = 0
        self._last_step_ns = 0
        self._next_keyframe_ns = 0
        self._next_health_ns = 0
        self._frames_at_health = -1
        self._stopping = threading.Event()
        self._budget = Budget(budget_share(), self._now())
        self._tells_plans = True
        self._switch_was_on = True
        self._wants_on = ring is not None
        self.on = ring is not None
        self.path: Path | None = ring.path if ring is not None else None
        if ring is not None:
            _probes.add(self)
            ring.beat(self._now())
            self._restate(self._now())

    @classmethod
    def open(
        cls,
        info: EngineInfo,
        *,
        role: str = "core",
        rank: int = 0,
        timer: StepTimer | None = None,
        clock: TimeSource | None = None,
    ) -> Probe:
        """Make this process's ring and start observing. Never raises.

        Where no ring can be made (no space, no permission, `INFERSCOPE=0`) the probe comes back
        switched off, after one line in the log.
        """
        if os.environ.get("INFERSCOPE") == "0":
            return cls.disabled()
        ring = None
        try:
            ring = make_ring(role, rank, clock or SystemClock())
            probe = cls(ring, _switch_of(ring), info, timer=timer, clock=clock)
            threading.Thread(
                target=probe._keep, name=f"inferscope-{role}-{rank}", daemon=True
            ).start()
        except Exception as error:
            logger.warning("inferscope: not recording: %s", error)
            if ring is not None:
                with suppress(Exception):
                    discard(ring)
            return cls.disabled()
        return probe

    @classmethod
    def disabled(cls) -> Probe:
        """Return a probe that records nothing."""
        return cls(None, None, EngineInfo(0, "none"))

    # --- requests -----------------------------------------------------------------------------

    def received(
        self,
        request_id: str,
        *,
        external_id: str | None = None,
        trace: str = "",
        at_ns: int | None = None,
        attributes: dict[str, str] | None = None,
    ) -> RequestIndex:
        """Note that a front end received a request; the first event of its life."""
        return self._enter(
            RECEIVED,
            request_id,
            at_ns,
            external_id=external_id,
            trace=trace,
            attributes=attributes,
        )

    def tokenised(
        self, index: RequestIndex, prompt_tokens: int, *, at_ns: int | None = None
    ) -> None:
        """Note that the prompt is tokens now."""
        self._event(index, TOKENISED, at_ns, prompt_tokens=prompt_tokens)

    def queued(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        external_id: str | None = None,
        at_ns: int | None = None,
        parent: str = "",
        trace: str = "",
    ) -> RequestIndex:
        """Note that a request enters the engine's queue."""
        return self._enter(
            QUEUED,
            request_id,
            at_ns,
            prompt_tokens=prompt_tokens,
            external_id=external_id,
            parent=parent,
            trace=trace,
        )

    def admitted(
        self, index: RequestIndex, *, cached_tokens: int = 0, at_ns: int | None = None
    ) -> None:
        """Note that a request leaves the queue, with this many prompt tokens from the cache."""
        self._event(index, ADMITTED, at_ns, state=RUNNING, cached_tokens=cached_tokens)

    def preempted(
        self, index: RequestIndex, *, reason: str = "blocks", at_ns: int | None = None
    ) -> None:
        """Note that a running request lost its blocks."""
        self._event(index, PREEMPTED, at_ns, state=HELD, reason=reason)

    def resumed(
        self, index: RequestIndex, *, cached_tokens: int = 0, at_ns: int | None = None
    ) -> None:
        """Note that a preempted request is scheduled again."""
        self._event(index, RESUMED, at_ns, state=RUNNING, cached_tokens=cached_tokens)

    def first_byte(self, index: RequestIndex, *, at_ns: int | None = None) -> None:
        """Note that a front end has written the first token to the client."""
        self._event(index, FIRST_BYTE, at_ns)

    def last_byte(self, index: RequestIndex, *, at_ns: int | None = None) -> None:
        """Note that a front end has written the last byte; it is through with the request."""
        self._event(index, LAST_BYTE, at_ns, leaves=True)

    def finished(self, index: RequestIndex, reason: str, *, at_ns: int | None = None) -> None:
        """Note that the engine is through with a request; `reason` is one of `FINISHES`."""
        self._event(index, FINISHED, at_ns, reason=reason, leaves=True)

    # --- steps --------------------------------------------------------------------------------

    def plan(
        self,
        step: int,
        *,
        start_ns: int,
        end_ns: int,
        waiting: int,
        running: int,
        blocks_used: int = 0,
        blocks_cached: int = 0,
        blocks_total: int = 0,
        preempted: Sequence[int] = (),
        binding: str = "none",
    ) -> None:
        """Note what the scheduler decided, before the step is launched."""
        if self._wants_on is not self.on:
            self._follow_switch(step)
        if not self.on or not self._tells_plans:
            return
        try:
            t_ns = self._now()
            held = column("I", preempted) if len(preempted) else b""
            with self._lock:
                self._write(
                    StepPlan(
                        t_ns,
                        step,
                        start_ns,
                        end_ns,
                        waiting,
                        running,
                        blocks_used,
                        blocks_cached,
                        blocks_total,
                        held,
                        binding,
                    )
                )
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    def start(
        self, step: int, *, mode: str = "eager", cold: bool = False, dummy: bool = False
    ) -> None:
        """Begin timing a step, right before its first launch."""
        if self._wants_on is not self.on:
            self._follow_switch(step)
        if not self.on:
            return
        try:
            t_ns = self._now()
            with self._lock:
                timer = self._timer
                if self._has_unreaped or timer.pending_ns:
                    self._reap(t_ns)
                timer.start(step, t_ns, mode=mode, cold=cold, dummy=dummy)
                if self._ring is not None:
                    self._ring.set_pending(timer.pending_ns)
            self._last_step = step
            self._last_step_ns = now_ns = self._now()
            self._cost_ns += now_ns - t_ns
        except Exception as error:
            self._fail(error)

    def stop(self, step: int, *, padded_tokens: int = 0) -> None:
        """End timing the step begun last; with a host timer its outputs must be ready."""
        if not self.on:
            return
        try:
            t_ns = self._now()
            with self._lock:
                self._timer.stop(t_ns, padded_tokens=padded_tokens)
                self._has_unreaped = True
            self._last_step_ns = now_ns = self._now()
            self._cost_ns += now_ns - t_ns
        except Exception as error:
            self._fail(error)

    def slices(
        self,
        step: int,
        *,
        requests: Sequence[int],
        phases: Sequence[int],
        tokens: Sequence[int],
        contexts: Sequence[int],
        flags: Sequence[int] = (),
        sampled: Sequence[int] = (),
        proposed: Sequence[int] = (),
        accepted: Sequence[int] = (),
    ) -> None:
        """Note which part of the step was whose; call it when the step's outputs are known.

        All sequences have one entry per row, a row being one phase of one request; an empty one
        means zeros. `bytes` are taken to be little-endian columns of `COLUMNS`'s dtypes already.

        Args:
            step: the step's number.
            requests: indices from `queued`.
            phases: PREFILL, DECODE, VERIFY or DRAFT of `inferscope.records`.
            tokens: tokens computed.
            contexts: tokens of the request that were in the KV cache before.
            flags: RECOMPUTED, LAST_CHUNK.
            sampled: rows of logits computed.
            proposed: draft tokens verified.
            accepted: draft tokens accepted.
        """
        if not self.on or step < self._first_step:
            return
        try:
            t_ns = self._now()
            indices = column("I", requests)
            counts = column("I", tokens)
            digest = digest64(indices, counts)
            record = StepSlices(
                t_ns,
                step,
                digest,
                indices,
                column("B", phases),
                counts,
                column("I", contexts),
                column("B", flags),
                column("H", sampled),
                column("H", proposed) if len(proposed) else b"",
                column("H", accepted) if len(accepted) else b"",
            )
            with self._lock:
                self._digest, self._digest_step = digest, step
                self._reap(t_ns)
                self._write(record)
                if t_ns >= self._next_health_ns:
                    self._report(t_ns)
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    def emitted(self, requests: Sequence[int], tokens: Sequence[int], *, step: int = -1) -> None:
        """Note that tokens leave the engine's loop, or (in a front end) were written to clients."""
        if not self.on:
            return
        try:
            t_ns = self._now()
            record = Emitted(t_ns, column("I", requests), column("I", tokens), step)
            with self._lock:
                self._write(record)
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    # --- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the last word and leave the ring on disk. Safe to call twice."""
        if self._ring is None:
            return
        self._stopping.set()
        try:
            with self._lock:
                ring, now_ns = self._ring, self._now()
                if ring is None:
                    return
                if self.on:
                    self._reap(now_ns)
                if self._state != FAILED:
                    self._state = CLOSED
                self.on = self._wants_on = False
                ring.set_pending(0)
                self._report(now_ns)
                self._ring = None
                ring.beat(0)
                ring.close()
                if self._switch is not None:
                    self._switch.close()
        except Exception as error:
            self._fail(error)
        self.on = self._wants_on = False

    # --- inside; the lock is held -------------------------------------------------------------

    def _write(self, record: Record) -> None:
        """Write a record, and a keyframe where one is due."""
        ring = self._ring
        if ring is None:
            return
        t_ns = record.t_ns
        if t_ns < self._last_t_ns:
            self._put(ring, record)
        else:
            self._last_t_ns = t_ns
            payload = encode(record)
            if not ring.write(record.CODE, payload):
                self._refuse(ring, record, len(payload))
        if ring.bytes_since_keyframe * 4 > ring.capacity or t_ns >= self._next_keyframe_ns:
            self._restate(self._last_t_ns)

    def _put(self, ring: RingWriter, record: Record, *, flags: int = 0) -> None:
        """Write a record; time never runs backwards in a ring, not even between two threads."""
        if record.t_ns < self._last_t_ns:
            record = msgspec.structs.replace(record, t_ns=self._last_t_ns)
        self._last_t_ns = record.t_ns
        payload = encode(record)
        if not ring.write(record.CODE, payload, flags=flags):
            self._refuse(ring, record, len(payload))

    def _refuse(self, ring: RingWriter, record: Record, num_bytes: int) -> None:
        self._num_refused += 1
        self._message = (
            f"{self._num_refused} records left out: {type(record).__name__} of {num_bytes} bytes, "
            f"this ring takes {ring.largest_bytes}; set a larger INFERSCOPE_RING_MB"
        )

    def _restate(self, now_ns: int) -> None:
        """Write a keyframe: all that a reader who starts here must know.

        It takes at most a good quarter of the ring, and the next one, unless its time has come, is
        due a quarter later: so a whole one is always there.
        """
        ring = self._ring
        if ring is None:
            return
        self._next_keyframe_ns = now_ns + KEYFRAME_NS
        keyframe = Keyframe(now_ns, self._state, ring.last_keyframe)
        self._put(ring, keyframe, flags=layout.STARTS_KEYFRAME)
        self._put(ring, msgspec.structs.replace(self._info, t_ns=now_ns))
        for live in self._requests.live(
            now_ns, record_bytes=ring.largest_bytes - 64, total_bytes=ring.capacity // 4
        ):
            self._put(ring, live)
        self._put(ring, Clock(now_ns, self.clock.real_ns()))
        ring.bytes_since_keyframe = 0

    def _reap(self, now_ns: int) -> None:
        timer = self._timer
        self._has_unreaped = False
        spans = timer.reap(now_ns)
        for anchor in timer.anchors():  # first: they place the spans
            real_ns = self.clock.real_ns() - (self.clock.monotonic_ns() - anchor.host_ns)
            self._write(Clock(now_ns, real_ns, anchor.device_ns, anchor.error_ns, anchor.host_ns))
        for span in spans:
            self._write(
                StepSpan(
                    now_ns,
                    span.step,
                    self._digest if span.step == self._digest_step else 0,
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
                )
            )
        if self._ring is not None:
            self._ring.set_pending(timer.pending_ns)

    def _report(self, now_ns: int) -> None:
        ring = self._ring
        if ring is None:
            return
        self._next_health_ns = now_ns + HEALTH_NS
        self._frames_at_health = ring.sequence + 1
        self._put(
            ring,
            ProbeHealth(
                now_ns,
                self._state,
                ring.sequence,
                self._errors,
                self._cost_ns,
                self._timer.pending_ns or now_ns,
                self._timer.dropped,
                self._message,
            ),
        )
        if self.on:
            self._keep_to_budget(now_ns)

    def _keep_to_budget(self, now_ns: int) -> None:
        """Leave out plans, or stop, when the probe costs its host more than it may."""
        verdict = self._budget.judge(now_ns, self._cost_ns)
        if verdict == "keep":
            return
        self._tells_plans = verdict == "restore"
        cost = f"{self._budget.last_share:.1%} of wall time, more than {self._budget.share:.1%}"
        if verdict == "restore":
            self._message = ""
        elif verdict == "shed":
            self._message = f"the probe took {cost}: step plans are left out"
        else:
            self._message = f"the probe took {cost}, without step plans too: it has stopped"
            self._state = OVER_BUDGET
            self._pause(now_ns)
        if self._message:
            logger.warning("inferscope: %s (INFERSCOPE_BUDGET)", self._message)

    def _pause(self, now_ns: int) -> None:
        """Stop recording and say so: in a keyframe, for those who come, and in a report."""
        self.on = self._wants_on = False
        self._timer.forget()
        self._has_unreaped = False
        if self._ring is not None:
            self._ring.set_pending(0)
        self._restate(now_ns)
        self._report(now_ns)

    def _resume(self, now_ns: int, step: int) -> None:
        """Record again, from this step on: of one under way now, the beginning was not seen."""
        self._state, self._message = ON, ""
        self._first_step = step
        self._budget.restart(now_ns, self._cost_ns)
        self._tells_plans = True
        self._timer.forget()
        self.on = self._wants_on = True
        self._restate(now_ns)
        self._report(now_ns)

    def _enter(
        self,
        kind: int,
        request_id: str,
        at_ns: int | None,
        *,
        external_id: str | None = None,
        prompt_tokens: int | None = None,
        parent: str = "",
        trace: str = "",
        attributes: dict[str, str] | None = None,
    ) -> RequestIndex:
        if not self.on:
            return NO_REQUEST
        try:
            t_ns = self._now()
            request_id = name(request_id)
            arrived_ns = t_ns if at_ns is None else int(at_ns)
            with self._lock:
                index = self._requests.enter(request_id, arrived_ns, prompt_tokens or 0)
                self._write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        arrived_ns,
                        request_id,
                        None if external_id is None else text(external_id),
                        prompt_tokens,
                        None,
                        "",
                        name(parent),
                        text(trace),
                        bounded(attributes),
                    )
                )
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)
            return NO_REQUEST
        return index

    def _event(
        self,
        index: RequestIndex,
        kind: int,
        at_ns: int | None,
        *,
        state: int = WAITING,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        reason: str = "",
        leaves: bool = False,
    ) -> None:
        if index == NO_REQUEST:
            return
        try:
            t_ns = self._now()
            with self._lock:
                # The table is kept while switched off too: the keyframe of switching on needs it.
                if leaves:
                    self._requests.leave(index)
                else:
                    self._requests.change(index, state, prompt_tokens, cached_tokens)
                if not self.on:
                    return
                self._write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        t_ns if at_ns is None else int(at_ns),
                        "",
                        None,
                        prompt_tokens,
                        cached_tokens,
                        text(reason),
                    )
                )
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    # --- the thread beside, the switch, the end -----------------------------------------------

    def _keep(self) -> None:
        while not self._stopping.wait(HEALTH_NS / 1e9):
            self._tend()

    def _tend(self) -> None:
        """Beat the heart, which goes on whatever the probe's state; see to an idle engine."""
        try:
            ring, now_ns = self._ring, self._now()
            if ring is None:
                return
            ring.beat(now_ns)
            if self._switch is not None:
                is_on = self._switch.is_on()
                if is_on != self._switch_was_on:
                    self._switch_was_on = is_on
                    self._wants_on = is_on and self._state != FAILED
            if self.on:
                ring.populate()
            elif not self._wants_on:
                return
            if now_ns - self._last_step_ns < IDLE_NS or not self._lock.acquire(blocking=False):
                return
            try:
                self._see_to(now_ns)
            finally:
                self._lock.release()
        except Exception as error:
            self._fail(error)

    def _see_to(self, now_ns: int) -> None:
        ring, timer = self._ring, self._timer
        if ring is None:
            return
        is_between = not timer.pending_ns or now_ns - self._last_step_ns > LONG_STEP_NS
        if self._wants_on is not self.on and is_between:
            self._turn(now_ns, self._last_step + 1)
        if not self.on:
            return
        self._reap(now_ns)
        if ring.sequence != self._frames_at_health or self._requests.num_live:
            self._report(now_ns)
        if now_ns >= self._next_keyframe_ns:
            self._restate(now_ns)

    def _follow_switch(self, step: int) -> None:
        """Stop or resume as the control byte says, between two steps of the engine."""
        try:
            with self._lock:
                self._turn(self._now(), step)
        except Exception as error:
            self._fail(error)

    def _turn(self, now_ns: int, step: int) -> None:
        if self._ring is None or self._wants_on is self.on:
            return
        if self._wants_on:
            self._resume(now_ns, step)
        else:
            self._state = OFF
            self._reap(now_ns)
            self._pause(now_ns)

    def _fail(self, error: Exception) -> None:
        """Switch off for good, say so once, and never let anything out."""
        self.on = self._wants_on = False
        if self._state in (FAILED, CLOSED):
            return
        self._state = FAILED
        self._errors += 1
        self._message = f"{type(error).__name__}: {error}"[:200]
        try:
            logger.warning("inferscope: the probe failed and is off: %s", self._message)
            if self._lock.acquire(blocking=False):
                try:
                    if self._ring is not None:
                        self._ring.set_pending(0)
                    self._report(self._now())
                finally:
                    self._lock.release()
        except Exception:
            logger.debug("inferscope: the failure could not be recorded", exc_info=True)

    def _forked(self) -> None:
        """Leave the parent's ring alone: a forked child opens its own or stays silent."""
        ring, switch = self._ring, self._switch
        self.on = self._wants_on = False
        self._ring = self._switch = self.path = None
        self._state = FAILED
        self._lock = threading.Lock()
        with suppress(Exception):  # its lock on the ring must die with the parent
            if ring is not None:
                ring.close()
            if switch is not None:
                switch.close()


def _switch_of(ring: RingWriter) -> ControlByte | None:
    try:
        return open_control(ring.path)
    except OSError as error:
        logger.warning("inferscope: %s cannot be switched: %s", ring.path, error)
        return None


def _after_fork() -> None:
    for probe in list(_probes):
        probe._forked()


os.register_at_fork(after_in_child=_after_fork)
