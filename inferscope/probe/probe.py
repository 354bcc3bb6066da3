"""The probe: what an engine calls, per step and per request, and all it has to know of InferScope.

    probe = Probe.open(EngineInfo(t_ns=0, engine="mine", model="tiny"))
    index = probe.queued("request-1", prompt_tokens=12)
    probe.plan(...); probe.start(step); ...run...; probe.stop(step)
    probe.slices(...); probe.emitted(...); probe.finished(index, "stop")

Every method may be called at any time from the engine's loop. None raises, waits or grows without
bound: the first failure inside switches the probe off for good and says so once. Switched off, a
call is one attribute test. Budget: 15 µs per step at batch 64 for all calls together, 1 µs when
off (benchmarks/probe_cost.py).

A probe belongs to one process and one writing thread. A daemon thread beside it beats the heart
and, when no step has run for 50 ms, takes the ring's lock (if it is free) to reap and to restate.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inferscope.errors import InferScopeError
from inferscope.probe.clock import Clock as TimeSource
from inferscope.probe.clock import SystemClock
from inferscope.probe.identity import identity
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
from inferscope.ring import control, layout
from inferscope.ring.discovery import make_private, remove_old_rings, ring_directory
from inferscope.ring.writer import RingWriter

logger = logging.getLogger(__name__)

DEFAULT_RING_MB = 64
KEYFRAME_NS = 10_000_000_000
HEALTH_NS = 100_000_000
IDLE_NS = 50_000_000
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
        switch: mmap.mmap | None,
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
        self._cost_ns = 0
        self._errors = 0
        self._state = ON if ring is not None else FAILED
        self._message = ""
        self._last_step_ns = 0
        self._next_keyframe_ns = 0
        self._next_health_ns = 0
        self._frames_at_health = -1
        self._stopping = threading.Event()
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
        try:
            ring = _make_ring(role, rank)
            probe = cls(ring, control.open_control(ring.path), info, timer=timer, clock=clock)
            threading.Thread(
                target=probe._keep, name=f"inferscope-{role}-{rank}", daemon=True
            ).start()
        except Exception as error:
            logger.warning("inferscope: not recording: %s", error)
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
        if self._switch is not None and (self._switch[0] == control.SWITCHED_ON) != self.on:
            self._follow_switch()
        if not self.on:
            return
        try:
            t_ns = self._now()
            column = array("I", preempted).tobytes() if preempted else b""
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
                        column,
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
        if not self.on:
            return
        try:
            t_ns = self._now()
            with self._lock:
                if self._timer.pending_ns:
                    self._reap(t_ns)
                self._timer.start(step, t_ns, mode=mode, cold=cold, dummy=dummy)
                if self._ring is not None:
                    self._ring.set_pending(self._timer.pending_ns)
            self._last_step_ns = t_ns
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
            self._last_step_ns = t_ns
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
        means zeros.

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
        if not self.on:
            return
        try:
            t_ns = self._now()
            indices = array("I", requests).tobytes()
            counts = array("I", tokens).tobytes()
            digest = digest64(indices, counts)
            record = StepSlices(
                t_ns,
                step,
                digest,
                indices,
                bytes(phases),
                counts,
                array("I", contexts).tobytes(),
                bytes(flags),
                array("H", sampled).tobytes(),
                array("H", proposed).tobytes(),
                array("H", accepted).tobytes(),
            )
            with self._lock:
                self._digest = digest
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
            record = Emitted(
                t_ns, array("I", requests).tobytes(), array("I", tokens).tobytes(), step
            )
            with self._lock:
                self._write(record)
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    # --- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the last word and leave the ring on disk. Safe to call twice."""
        if self._ring is None or self._state == CLOSED:
            return
        self._stopping.set()
        try:
            with self._lock:
                if self.on:
                    self._reap(self._now())
                self._state = CLOSED
                self._report(self._now())
                self._ring.beat(0)
        except Exception as error:
            self._fail(error)
        self.on = False

    # --- inside; the lock is held -------------------------------------------------------------

    def _write(self, record: Record, *, flags: int = 0) -> None:
        ring = self._ring
        if ring is None:
            return
        ring.write(record.CODE, encode(record), flags=flags)
        if ring.bytes_since_keyframe * 4 > ring.capacity or record.t_ns >= self._next_keyframe_ns:
            self._restate(record.t_ns)

    def _restate(self, now_ns: int) -> None:
        """Write a keyframe: all that a reader who starts here must know."""
        ring = self._ring
        if ring is None:
            return
        # Set first: the records below come through `write`, never through `_write`.
        self._next_keyframe_ns = now_ns + KEYFRAME_NS
        ring.write(
            Keyframe.CODE,
            encode(Keyframe(now_ns, self._state, ring.last_keyframe)),
            flags=layout.STARTS_KEYFRAME,
        )
        info = msgspec.structs.replace(self._info, t_ns=now_ns)
        ring.write(EngineInfo.CODE, encode(info))
        for live in self._requests.live(now_ns):
            ring.write(live.CODE, encode(live))
        clock = Clock(now_ns, self.clock.real_ns())
        ring.write(clock.CODE, encode(clock))

    def _reap(self, now_ns: int) -> None:
        for anchor in self._timer.anchors():
            real_ns = self.clock.real_ns() - (self.clock.monotonic_ns() - anchor.host_ns)
            self._write(Clock(now_ns, real_ns, anchor.device_ns, anchor.error_ns, anchor.host_ns))
        for span in self._timer.reap(now_ns):
            self._write(
                StepSpan(
                    now_ns,
                    span.step,
                    self._digest if span.device_end_ns is None else 0,
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
            self._ring.set_pending(self._timer.pending_ns)

    def _report(self, now_ns: int) -> None:
        ring = self._ring
        if ring is None:
            return
        self._next_health_ns = now_ns + HEALTH_NS
        self._frames_at_health = ring.sequence + 1
        health = ProbeHealth(
            now_ns,
            self._state,
            ring.sequence,
            self._errors,
            self._cost_ns,
            self._timer.pending_ns or now_ns,
            self._timer.dropped,
            self._message,
        )
        ring.write(health.CODE, encode(health))

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
            if external_id is not None:
                external_id = external_id[:128]
            arrived_ns = t_ns if at_ns is None else at_ns
            with self._lock:
                index = self._requests.enter(request_id, arrived_ns, prompt_tokens or 0)
                self._write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        arrived_ns,
                        request_id,
                        external_id,
                        prompt_tokens,
                        None,
                        "",
                        parent,
                        trace,
                        attributes,
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
        if leaves and index != NO_REQUEST:
            self._requests.leave(index)
        if not self.on or index == NO_REQUEST:
            return
        try:
            t_ns = self._now()
            with self._lock:
                if not leaves:
                    self._requests.change(index, state, prompt_tokens, cached_tokens)
                self._write(
                    RequestEvent(
                        t_ns,
                        index,
                        kind,
                        t_ns if at_ns is None else at_ns,
                        "",
                        None,
                        prompt_tokens,
                        cached_tokens,
                        reason,
                    )
                )
            self._cost_ns += self._now() - t_ns
        except Exception as error:
            self._fail(error)

    # --- the thread beside, the switch, the end -----------------------------------------------

    def _keep(self) -> None:
        """Beat the heart; when the engine idles, reap and restate on its behalf."""
        while not self._stopping.wait(HEALTH_NS / 1e9):
            try:
                now_ns = self._now()
                if self._ring is None or self._state == CLOSED:
                    return
                self._ring.beat(now_ns)
                if self._switch is not None and (self._switch[0] == 1) != self.on:
                    self._follow_switch()
                if not self.on or now_ns - self._last_step_ns < IDLE_NS:
                    continue
                if not self._lock.acquire(blocking=False):
                    continue
                try:
                    self._reap(now_ns)
                    if self._ring.sequence != self._frames_at_health or self._requests.num_live:
                        self._report(now_ns)
                    if now_ns >= self._next_keyframe_ns:
                        self._restate(now_ns)
                finally:
                    self._lock.release()
            except Exception as error:
                self._fail(error)
                return

    def _follow_switch(self) -> None:
        """Stop or resume as the control byte says; the state is restated either way."""
        if self._state not in (ON, OFF) or self._switch is None:
            return
        try:
            with self._lock:
                wanted = self._switch[0] == control.SWITCHED_ON
                if wanted == self.on:
                    return
                self._state = ON if wanted else OFF
                self._timer.reap(self._now())  # spans from before the pause belong to no plan
                self._restate(self._now())
                self._report(self._now())
                self.on = wanted
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Switch off for good, say so once, and never let anything out."""
        if self._state == FAILED:
            return
        self.on = False
        self._state = FAILED
        self._errors += 1
        self._message = f"{type(error).__name__}: {error}"[:200]
        try:
            logger.warning("inferscope: the probe failed and is off: %s", self._message)
            if self._lock.acquire(blocking=False):
                try:
                    self._report(self._now())
                finally:
                    self._lock.release()
        except Exception:
            logger.debug("inferscope: the failure could not be recorded", exc_info=True)

    def _forked(self) -> None:
        """Leave the parent's ring alone: a forked child opens its own or stays silent."""
        self.on = False
        self._ring = self._switch = None
        self._state = FAILED
        self._lock = threading.Lock()


def digest64(requests: bytes, tokens: bytes) -> int:
    """Return the digest by which a span and its slices recognise each other."""
    return int.from_bytes(hashlib.blake2b(requests + tokens, digest_size=8).digest(), "little")


def _make_ring(role: str, rank: int) -> RingWriter:
    """Make the ring file in this engine's folder, smaller if the disk is nearly full.

    Raises:
        RingUnavailable: there is no room even for a small one, or no permission.
    """
    if not layout.IS_LITTLE_ENDIAN:
        raise InferScopeError("columns are little-endian and this machine is not")
    folder = ring_directory()
    make_private(folder)
    remove_old_rings(folder)
    me = identity(role, rank)
    make_private(folder / me.engine_id)
    name = f"{role}-{rank}-{me.pid}"
    path = folder / me.engine_id / f"{name}.ring"
    number = 2
    while path.exists():
        path = path.with_name(f"{name}.{number}.ring")
        number += 1
    capacity = int(float(os.environ.get("INFERSCOPE_RING_MB", DEFAULT_RING_MB)) * (1 << 20))
    try:
        return RingWriter(path, me, capacity=capacity)
    except InferScopeError:
        if capacity <= 1 << 20:
            raise
        logger.warning("inferscope: no room for a ring of %d MB, trying 1 MB", capacity >> 20)
        return RingWriter(path, me, capacity=1 << 20)


def _after_fork() -> None:
    for probe in list(_probes):
        probe._forked()


os.register_at_fork(after_in_child=_after_fork)
