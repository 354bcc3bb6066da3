"""The probe: what an engine calls, per step and per request, and all it has to know of InferScope.

    probe = Probe.open(EngineInfo(t_ns=0, engine="mine", model="tiny"))
    index = probe.queued("request-1", prompt_tokens=12)
    probe.plan(...); probe.start(step); ...run...; probe.stop(step)
    probe.slices(...); probe.emitted(...); probe.finished(index, "stop")

A step of the same rows as the one before may be stated by `same_step` instead of `plan` and
`slices`.

Every method may be called at any time and from anywhere: from other threads, from a signal handler
or finaliser that interrupts another call. None raises or grows without bound. None waits, but for
its own write where the ring's file system blocks; in memory (tmpfs) none does:

    an argument that no record can hold   is clamped or left out, or its call is; `odd_values`
    a call within a call of its thread    is queued, and written before the outer one returns;
                                          of too many the last are left out: `lost_calls`
    a record too large for its ring       is left out, and readers know that they miss it
    any other exception, a fault of ours  switches the probe off for good, logged once

Exceptions that are not `Exception`, such as KeyboardInterrupt, and those of the host's signal
handlers pass through. A call without a required argument is a TypeError, as everywhere in Python.
Switched off, a call is one attribute test: 1 µs per step for all calls together. Switched on they
take 28 µs at batch 64, of which five system calls are half, and 31 µs with the ring on a disk
(benchmarks/probe_cost.py; the aim is 15); within a running engine, whose weights have pushed our
code out of the cache, several times that (benchmarks/probe_overhead.py).

A probe belongs to one process and one writing thread. Beneath it:

    probe ┬► events ┐
          └► keeper ┴► life ─► spans ─► log ─► ring     `log` alone writes; its lock is around all
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from inferscope.host_signals import pass_on, suppressed
from inferscope.probe.cache_records import CacheRecords
from inferscope.probe.clock import Clock as TimeSource
from inferscope.probe.clock import SystemClock
from inferscope.probe.columns import (
    LARGEST_INT64,
    LARGEST_U32,
    LARGEST_U64,
    LEAST_INT64,
    OddValues,
    PlanNumbers,
    column,
    digest64,
    index_column,
    plan_numbers,
    same_rows,
    slice_columns,
    text_or_empty,
    time_or,
    whole,
    whole_or,
)
from inferscope.probe.columns import name as ring_name
from inferscope.probe.engine_info import fit_info
from inferscope.probe.events import RequestEvents
from inferscope.probe.expert_load import expert_load
from inferscope.probe.host_log import warn
from inferscope.probe.housekeeping import Keeper
from inferscope.probe.lifecycle import Life
from inferscope.probe.log import Hidden, Log
from inferscope.probe.marks import Marks
from inferscope.probe.opening import (
    PATIENCE_S,
    away_from_signals,
    discard,
    make_ring,
    open_switch,
)
from inferscope.probe.part_labels import Parts
from inferscope.probe.repeats import NO_STEP
from inferscope.probe.spans import Signature, Spans
from inferscope.probe.timers import EventTimer, HostTimer, StepTimer
from inferscope.records import (
    ADMITTED,
    BINDINGS,
    FINISHED,
    FIRST_BYTE,
    HELD,
    LAST_BYTE,
    PREEMPTED,
    QUEUED,
    RECEIVED,
    RESUMED,
    RUNNING,
    TOKENISED,
    CostTable,
    Emitted,
    EngineInfo,
    RequestIndex,
    StepPlan,
    StepSame,
    StepSlices,
)
from inferscope.ring import ControlByte, RingWriter

_BINDING_CODES: dict[str, int] = {binding: code for code, binding in enumerate(BINDINGS)}
_MOST_MODE = 64
LEAST_BLOCKED_NS = 1_000_000
"""Shorter waits for a connection are not worth a column."""
_Same: TypeAlias = tuple[int, PlanNumbers, int, int, int]
"""When it was given; numbers and binding of the plan; steps back to the one that emitted tokens, 0
for none, and when they left."""
_Signature: TypeAlias = tuple[int, int, Signature]
"""When it was given, and of which step."""


class Probe:
    """Writes what an engine does into its ring.

    Attributes:
        clock: the two clocks.
        hidden: the context of calls that are made while the device computes: reports say what
            they cost apart from what a step waits for.
    """

    def __init__(
        self,
        ring: RingWriter | None,
        switch: ControlByte | None,
        info: EngineInfo,
        *,
        timer: StepTimer | None = None,
        clock: TimeSource | None = None,
        tables: Sequence[CostTable] = (),
    ) -> None:
        """Prefer `Probe.open`; this takes the parts apart for tests."""
        self.clock = clock or SystemClock()
        self._now = self.clock.monotonic_ns
        self._log = Log(ring, info, self.clock, tables=tables)
        self.hidden = Hidden(self._log)
        self._spans = Spans(timer or HostTimer(), self._log)
        self._life = Life(self._log, self._spans)
        self._events = RequestEvents(self._log, self._life)
        self._cache = CacheRecords(self._log, self._life)
        self._keeper = Keeper(self._log, self._spans, self._life, switch)
        if ring is not None:
            ring.beat(self._now())
            self._log.restate(self._now())

    @property
    def on(self) -> bool:
        """Recording now. Cheap; an engine may skip building columns when it is False."""
        life = self._life
        return life.on and life.is_ours()

    @property
    def is_shedding(self) -> bool:
        """Whether the probe has cost more than it may, and leaves out plans and cache forensics."""
        return not self._life.writes_plans

    @property
    def path(self) -> Path | None:
        """The ring file, None when there is none."""
        self._life.is_ours()
        return self._log.path

    @property
    def live_requests(self) -> list[RequestIndex]:
        """Return the requests that were queued or received and have not finished; none when off."""
        life = self._life
        try:
            return self._log.requests.indices if life.on else []
        except Exception as error:
            life.caught(error)
            return []

    @classmethod
    def open(
        cls,
        info: EngineInfo,
        *,
        role: str = "core",
        rank: int = 0,
        timer: StepTimer | None = None,
        clock: TimeSource | None = None,
        engine_id: str | None = None,
    ) -> Probe:
        """Make this process's ring and start observing. Raises what a signal handler raises only.

        Where no ring can be made (no space, no permission, `INFERSCOPE=0`), or not within half a
        minute, the probe comes back switched off, after one line in the log. `engine_id` is for one
        of several engines in this process; without it the ring belongs to the process's own.
        """
        if os.environ.get("INFERSCOPE") == "0" or sys.is_finalizing():  # no thread runs any longer
            return cls.disabled()
        try:
            return away_from_signals(
                lambda: cls._made(
                    info, role=role, rank=rank, timer=timer, clock=clock, engine_id=engine_id
                ),
                cls._discard,
                lambda: cls._not_made(
                    f"no ring could be opened within {PATIENCE_S:g} s. Does its file system answer?"
                ),
            )
        except RuntimeError as error:  # the system gives no more threads
            pass_on(error)
            why = str(error)
        return cls._not_made(why)

    @classmethod
    def _not_made(cls, why: str) -> Probe:
        """Return a disabled probe, after a line in the log."""
        with suppressed(Exception):
            warn("not recording: %s", why)
        return cls.disabled()

    @classmethod
    def _made(
        cls,
        info: EngineInfo,
        *,
        role: str,
        rank: int,
        timer: StepTimer | None,
        clock: TimeSource | None,
        engine_id: str | None,
    ) -> Probe:
        """Return a probe that records, or a disabled one; not on the main thread."""
        ring = switch = None
        try:
            rank = whole(rank, 0, LARGEST_U32, OddValues())
            # A host program may name an engine by a path: too long for a ring, or not UTF-8.
            named = None if engine_id is None else ring_name(engine_id)
            ring = make_ring(ring_name(role), rank, clock or SystemClock(), engine_id=named)
            info = fit_info(info)
            tables = _cost_tables(info, role)
            switch = open_switch(ring)
            probe = cls(ring, switch, info, timer=timer, clock=clock, tables=tables)
            probe._keeper.begin(f"inferscope-{role}-{rank}")
        except BaseException as error:
            with suppress(Exception):
                if switch is not None:
                    switch.close()
                if ring is not None:
                    ring.close()
                    discard(ring.path)
            with suppress(Exception):
                warn("not recording: %s: %s", type(error).__name__, error)
            return cls.disabled()
        return probe

    def _discard(self) -> None:
        """Stop for good and leave no file."""
        self.close()
        if self._log.path is not None:
            discard(self._log.path)

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
        parent: str = "",
        prompt_parts: Parts = (),
        adapter: str = "",
    ) -> RequestIndex:
        """Note that a front end received a request; the first event of its life.

        `prompt_parts` are names and numbers of tokens in the order of the prompt, where the client
        says so (`probe.parts`); `adapter` is the LoRA adapter that the request asks for.
        """
        return self._events.enter(
            RECEIVED,
            request_id,
            at_ns,
            external_id=external_id,
            trace=trace,
            attributes=attributes,
            parent=parent,
            prompt_parts=prompt_parts,
            adapter=adapter,
        )

    def tokenised(
        self,
        index: RequestIndex,
        prompt_tokens: int,
        *,
        at_ns: int | None = None,
        prompt_parts: Parts = (),
    ) -> None:
        """Note that the prompt is tokens now, and its parts where the server knows them."""
        self._events.note(
            index, TOKENISED, at_ns, prompt_tokens=prompt_tokens, prompt_parts=prompt_parts
        )

    def queued(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        external_id: str | None = None,
        at_ns: int | None = None,
        parent: str = "",
        trace: str = "",
        adapter: str = "",
        attributes: dict[str, str] | None = None,
    ) -> RequestIndex:
        """Note that a request enters the engine's queue, for the base model or a LoRA adapter."""
        return self._events.enter(
            QUEUED,
            request_id,
            at_ns,
            prompt_tokens=prompt_tokens,
            external_id=external_id,
            parent=parent,
            trace=trace,
            adapter=adapter,
            attributes=attributes,
        )

    def admitted(
        self, index: RequestIndex, *, cached_tokens: int = 0, at_ns: int | None = None
    ) -> None:
        """Note that a request leaves the queue, with this many prompt tokens from the cache."""
        self._events.note(index, ADMITTED, at_ns, state=RUNNING, cached_tokens=cached_tokens)

    def preempted(
        self, index: RequestIndex, *, reason: str = "blocks", at_ns: int | None = None
    ) -> None:
        """Note that a running request lost its blocks."""
        self._events.note(index, PREEMPTED, at_ns, state=HELD, reason=reason)

    def resumed(
        self, index: RequestIndex, *, cached_tokens: int = 0, at_ns: int | None = None
    ) -> None:
        """Note that a preempted request is scheduled again."""
        self._events.note(index, RESUMED, at_ns, state=RUNNING, cached_tokens=cached_tokens)

    def transferred(
        self,
        index: RequestIndex,
        num_bytes: int,
        *,
        start_ns: int,
        end_ns: int,
        peer: str,
        peer_request_id: str = "",
    ) -> None:
        """Note that a request's KV blocks came from another worker, once they are there.

        Args:
            index: whose they are; it waited for them in the queue.
            num_bytes: moved.
            start_ns: by the monotonic clock, when the first of them was asked for.
            end_ns: when the last one was there.
            peer: the other worker: its engine's id where that is known, else its address.
            peer_request_id: what that engine calls the request, so that their traces are linked.
        """
        self._events.transferred(
            index,
            num_bytes,
            start_ns=start_ns,
            end_ns=end_ns,
            peer=peer,
            peer_request_id=peer_request_id,
        )

    def cache_lookup(
        self,
        index: RequestIndex,
        *,
        tokens: Mapping[str, int],
        evictor: RequestIndex | None = None,
        evicted_ns: int | None = None,
        twin: RequestIndex | None = None,
        num_evictors: int = 0,
        evictors: Sequence[RequestIndex] = (),
        is_inferred: bool = False,
        off_reason: str = "",
        since_ns: int | None = None,
    ) -> None:
        """Record why the prompt's tokens were or were not taken from the prefix cache.

        Args:
            index: the request, at its first admission.
            tokens: the prompt's tokens by class, of `LOOKUP_CLASSES`; absent classes are 0.
            evictor: the request that the first evicted block made room for.
            evicted_ns: when that was, or the reset of the cache.
            twin: the request that is computing the pending tokens.
            num_evictors: how many requests may be the evictor.
            evictors: the likeliest of them; the first 8 are recorded.
            is_inferred: whether evictions were derived, not seen block by block.
            off_reason: why the cache was not asked.
            since_ns: when the caller began to compute this; the probe's cost is counted from then.
        """
        self._cache.lookup(
            index,
            tokens,
            evictor=evictor,
            evicted_ns=evicted_ns,
            twin=twin,
            num_evictors=num_evictors,
            evictors=evictors,
            is_inferred=is_inferred,
            off_reason=off_reason,
            since_ns=since_ns,
        )

    def prompt_likeness(
        self,
        index: RequestIndex,
        earlier: RequestIndex,
        *,
        diverged_at: int,
        equal_again_at: int | None = None,
        shift: int = 0,
        spans: Sequence[tuple[int, int]] = (),
        differs: int = 0,
        since_ns: int | None = None,
    ) -> None:
        """Record where a prompt differs from an earlier one, in positions; see `PromptLikeness`.

        `since_ns` is as in `cache_lookup`.
        """
        self._cache.likeness(
            index,
            earlier,
            diverged_at=diverged_at,
            equal_again_at=equal_again_at,
            shift=shift,
            spans=spans,
            differs=differs,
            since_ns=since_ns,
        )

    def compare_prompt(
        self,
        index: RequestIndex,
        prompt: Sequence[int],
        *,
        salt: object = None,
        adapter: object = None,
        multimodal: object = None,
    ) -> None:
        """Compare a prompt with earlier ones of this process, and record where they differ.

        The tokens are held in memory for the comparison, 4 million at most, unless
        INFERSCOPE_PREFIX_CACHE says otherwise; only positions are recorded (`PromptLikeness`).

        Args:
            index: the request.
            prompt: its tokens.
            salt: what separates its cached blocks from those of other clients, hashable.
            adapter: its LoRA adapter.
            multimodal: its images and the like: hashes of them.
        """
        self._cache.compare(index, prompt, salt=salt, adapter=adapter, multimodal=multimodal)

    def cache_sample(
        self,
        index: RequestIndex,
        *,
        block_tokens: int,
        num_blocks: int,
        rate: float,
        digests: Sequence[int] | bytes,
        since_ns: int | None = None,
    ) -> None:
        """Record keyed digests of a sample of the prompt's blocks; see `CacheSample`.

        `since_ns` is as in `cache_lookup`.
        """
        self._cache.sample(
            index,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            rate=rate,
            digests=digests,
            since_ns=since_ns,
        )

    def first_byte(self, index: RequestIndex, *, at_ns: int | None = None) -> None:
        """Note that a front end has written the first token to the client."""
        self._events.note(index, FIRST_BYTE, at_ns)

    def last_byte(self, index: RequestIndex, *, at_ns: int | None = None) -> None:
        """Note that a front end has written the last byte; it is through with the request."""
        self._events.note(index, LAST_BYTE, at_ns, leaves=True)

    def finished(
        self,
        index: RequestIndex,
        reason: str,
        *,
        at_ns: int | None = None,
        reasoning_tokens: int | None = None,
    ) -> None:
        """Note that the engine is through with a request; `reason` is one of `FINISHES`."""
        self._events.note(
            index, FINISHED, at_ns, reason=reason, leaves=True, reasoning_tokens=reasoning_tokens
        )

    # --- the engine ---------------------------------------------------------------------------

    def paused(self) -> None:
        """Record that the engine is paused: it admits no request until `unpaused`.

        Requests in flight may still be computed to their end. A second call changes nothing.
        """
        self._hold(is_paused=True)

    def unpaused(self) -> None:
        """Record that the engine resumes."""
        self._hold(is_paused=False)

    def _hold(self, *, is_paused: bool) -> None:
        life = self._life
        try:
            t_ns = self._now()
            life.perform(t_ns, self._set_paused, self._set_paused, (t_ns, is_paused))
        except Exception as error:
            life.caught(error)

    def _set_paused(self, change: tuple[int, bool]) -> None:
        t_ns, is_paused = change
        log = self._log
        if is_paused is (log.paused_ns is not None):
            return
        # Noted while switched off too: the keyframe of switching on has it.
        log.paused_ns = t_ns if is_paused else None
        if self._life.on:
            log.restate(t_ns)

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
        life = self._life
        if life.wants_on is life.on and not (life.on and life.writes_plans):
            return
        try:
            t_ns, log = self._now(), self._log
            try:
                given = (
                    step,
                    start_ns,
                    end_ns,
                    waiting,
                    running,
                    blocks_used,
                    blocks_cached,
                    blocks_total,
                )
                numbers = plan_numbers(given, log.odd)
                held = index_column(preempted, log.odd) if len(preempted) else b""
                if type(binding) is not str or binding not in _BINDING_CODES:
                    binding = text_or_empty(binding, log.odd)
            except Exception as error:
                life.refuse("plan", error)
                return
            if life.wants_on is not life.on:
                life.follow(numbers[0])
            if life.on:
                record = StepPlan(t_ns, *numbers, held, binding)
                life.perform(t_ns, log.write, log.write, record)
        except Exception as error:
            life.caught(error)

    def start(
        self,
        step: int,
        *,
        mode: str = "eager",
        cold: bool = False,
        dummy: bool = False,
        reaps: bool = True,
    ) -> None:
        """Begin timing a step, right before its first launch.

        Args:
            step: the step's number.
            mode: how it is launched; `sign` may state it later.
            cold: the first of its kind, which takes longer.
            dummy: computes nothing for any request.
            reaps: spans of earlier steps are written now. Without it `sign` or `slices` has to be
                called behind each launch: that writes them while the device computes.
        """
        life = self._life
        if not life.on and not life.wants_on:
            return
        try:
            t_ns, odd = self._now(), self._log.odd
            try:
                # `whole` and the others, only where they are needed: 0.15 µs
                if type(step) is not int or not LEAST_INT64 <= step <= LARGEST_INT64:
                    step = whole(step, LEAST_INT64, LARGEST_INT64, odd)
                if type(mode) is not str or not mode.isascii() or len(mode) > _MOST_MODE:
                    mode = text_or_empty(mode, odd)
                if type(cold) is not bool or type(dummy) is not bool:
                    cold, dummy = bool(cold), bool(dummy)
            except Exception as error:
                life.refuse("start", error)
                return
            if life.wants_on is not life.on:
                life.follow(step)
            if step < life.first_step and not dummy:
                life.first_step = step  # the engine counts its steps anew
            if life.on:
                # Later it would be timed wrong.
                begun = (step, t_ns, mode, cold, dummy)
                spans = self._spans
                life.perform(t_ns, None, spans.begin if reaps is False else spans.start, begun)
        except Exception as error:
            life.caught(error)

    def marks(self) -> Marks | None:
        """Return what takes the place of `start` to `stop` where a device computes beside the host.

        It takes no lock. None where this host computes the steps.
        """
        spans = self._spans
        if not isinstance(spans.timer, EventTimer):
            return None
        return Marks(self, self._life, spans, spans.timer, self._log, self._now)

    def device_start(self) -> None:
        """Move the start of the open step's device span here, right before its first kernel.

        Optional: without it the span starts at `start`. Host times stay as they are.
        """
        self._move_span(self._spans.device_start)

    def device_end(self) -> None:
        """Set the end of the open step's device span here, before the host waits for its outputs.

        Optional: without it the span ends at `stop`.
        """
        self._move_span(self._spans.device_end)

    def _move_span(self, action: Callable[[int], None]) -> None:
        life = self._life
        if not life.on:
            return
        try:
            t_ns = self._now()
            life.perform(t_ns, None, action, t_ns)
        except Exception as error:
            life.caught(error)

    def stop(self, step: int, *, padded_tokens: int = 0) -> None:
        """End timing the step begun last; with a host timer its outputs must be ready.

        A step that was not begun last has no span.
        """
        life = self._life
        if not life.on:
            return
        try:
            t_ns, odd = self._now(), self._log.odd
            try:
                if type(step) is not int or not LEAST_INT64 <= step <= LARGEST_INT64:
                    step = whole(step, LEAST_INT64, LARGEST_INT64, odd)
                if type(padded_tokens) is not int or not 0 <= padded_tokens <= LARGEST_U32:
                    padded_tokens = whole_or(padded_tokens, 0, 0, LARGEST_U32, odd)
            except Exception as error:
                life.refuse("stop", error)
                return
            life.perform(t_ns, None, self._spans.stop, (step, t_ns, padded_tokens))
        except Exception as error:
            life.caught(error)

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
        digest: int | None = None,
    ) -> None:
        """Note which part of the step is whose, once for each step.

        Call it when the step's outputs are known, or from its dispatch on if it verifies no drafts:
        before `start`, between `start` and `stop`, or after them.

        All sequences have one entry per row, a row being one phase of one request; an empty one
        means zeros. `bytes` and `bytearray` are taken to be little-endian columns of `COLUMNS`'s
        dtypes already.

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
            digest: by which ranks recognise the step, where they know no indices; None for that of
                `requests` and `tokens`.
        """
        life = self._life
        if not life.on:
            return
        try:
            t_ns, log = self._now(), self._log
            try:
                if type(step) is not int or not LEAST_INT64 <= step <= LARGEST_INT64:
                    step = whole(step, LEAST_INT64, LARGEST_INT64, log.odd)
                if step < life.first_step:
                    return
                made = slice_columns(requests, phases, tokens, contexts, flags, sampled, log.odd)
                if digest is None:
                    digest = digest64(made[0], made[2])
                elif type(digest) is not int or not 0 <= digest <= LARGEST_U64:
                    digest = whole(digest, 0, LARGEST_U64, log.odd)
                drafted = verified = b""
                if len(proposed) or len(accepted):
                    drafted = column("H", proposed, log.odd)
                    verified = column("H", accepted, log.odd)
                    same_rows(len(made[0]) // 4, ("H", drafted), ("H", verified))
            except Exception as error:
                life.refuse("slices", error)
                return
            record = StepSlices(t_ns, step, digest, *made, drafted, verified)
            life.perform(t_ns, self._sign_and_write, self._write_step_slices, record)
        except Exception as error:
            life.caught(error)

    def _sign_and_write(self, record: StepSlices) -> None:
        self._spans.sign(record.step, Signature(record.digest))
        self._write_slices(record)

    def _write_step_slices(self, record: StepSlices) -> None:
        life, log, spans = self._life, self._log, self._spans
        spans.sign(record.step, Signature(record.digest))
        spans.reap(record.t_ns)
        self._write_slices(record)
        if record.t_ns >= log.health_due_ns:
            life.report(record.t_ns)

    def _write_slices(self, record: StepSlices) -> None:
        log = self._log
        ring, repeats = log.ring, log.repeats
        if ring is not None:
            repeats.begin(record, ring.next_sequence)
            log.write(record)
            repeats.last_step = record.step

    def same_step(
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
        binding: str = "none",
        emitted_step: int | None = None,
        emitted_ns: int | None = None,
    ) -> bool:
        """Note a step of exactly the rows of the step stated before it, one decoded token each.

        In place of `plan` and `slices`, and of `emitted` for an earlier step of the same rows: 80
        bytes of the ring whatever the batch. Whether the rows are the same is for the caller to
        know; call this from the step's dispatch on, in the order of the steps.

        Args:
            step: the step's number, one more than that of the step stated before.
            start_ns: when the scheduler began.
            end_ns: when it ended.
            waiting: requests in the queue.
            running: requests being served.
            blocks_used: KV blocks in use.
            blocks_cached: KV blocks that are free and hold a cached prefix.
            blocks_total: KV blocks.
            binding: as in `plan`.
            emitted_step: an earlier step of the same rows; each row emitted one token of it. None
                if `emitted` is called for it, or nothing was emitted.
            emitted_ns: when these tokens left; now where that is None.

        Returns:
            True if this is all there is to be stated of the step. False if nothing was noted: call
            `plan`, `slices`, and `emitted` for the earlier step. So it is for the first step after
            a keyframe, a refused record, a change of rows, and every `MOST_SAME` steps.
        """
        life, log = self._life, self._log
        if not life.on or not life.wants_on:
            return False
        try:
            t_ns = self._now()
            try:
                if not log.repeats.can_state(step, emitted_step):
                    return False
                given = (
                    step,
                    start_ns,
                    end_ns,
                    waiting,
                    running,
                    blocks_used,
                    blocks_cached,
                    blocks_total,
                )
                numbers = plan_numbers(given, log.odd)
                code = _BINDING_CODES[binding]
                back = left_ns = 0
                if emitted_step is not None:
                    back = numbers[0] - operator.index(emitted_step)
                    left_ns = time_or(emitted_ns, t_ns, log.odd)
                if numbers[1] < 0 or numbers[2] < 0 or left_ns < 0:
                    return False  # their differences may be more than a record can hold
            except Exception as error:
                pass_on(error)
                return False  # `plan` reports what is wrong with the arguments
            same = (t_ns, numbers, code, back, left_ns)
            return life.perform(t_ns, _state_in_full, self._write_same_step, same) is True
        except Exception as error:
            life.caught(error)
            return False

    def _write_same_step(self, same: _Same) -> bool:
        t_ns, numbers, code, back, left_ns = same
        life, log, spans = self._life, self._log, self._spans
        step, start_ns, end_ns, waiting, running, used, cached, total = numbers
        repeats = log.repeats
        spans.sign(step, Signature(repeats.digest))
        spans.reap(t_ns)
        ring = log.ring
        # Only now: with the spans a keyframe may have been written.
        if ring is None or not repeats.can_state(step, step - back if back else None):
            return False
        record = StepSame(
            t_ns,
            step,
            ring.next_sequence - repeats.sequence,
            start_ns,
            end_ns - start_ns,
            waiting,
            running,
            used,
            cached,
            total,
            code,
            back,
            start_ns - left_ns if back else 0,
        )
        repeats.last_step = NO_STEP  # until it is written: a signal handler may raise
        if not log.write(record):
            return False
        repeats.last_step = step
        if t_ns >= log.health_due_ns:
            life.report(t_ns)
        return True

    def sign(
        self,
        step: int,
        *,
        requests: Sequence[int] = (),
        tokens: Sequence[int],
        prefill_tokens: int | None = None,
        digest: int | None = None,
        mode: str | None = None,
        padded_tokens: int | None = None,
        waited_ns: int = 0,
    ) -> None:
        """Note what the step stopped last computed, on a rank whose slices the core records.

        By the digest of these its span and the core's slices recognise each other.

        Args:
            step: the step's number, the same as the core's.
            requests: the core's indices, one per row, in the order of its slices.
            tokens: tokens computed, likewise.
            prefill_tokens: how many of these are prefills': where the core is on another host, a
                reader here knows the phases by nothing else.
            digest: of the step where core and ranks have one of their own; `requests` is not read.
            mode: how the step was launched; None for what `start` was given.
            padded_tokens: that it was padded to; None for what `stop` was given.
            waited_ns: time within the step that this rank waited for others in collectives; its
                measured time excludes it.
        """
        life = self._life
        if not life.on:
            return
        try:
            t_ns, odd = self._now(), self._log.odd
            try:
                step = whole(step, LEAST_INT64, LARGEST_INT64, odd)
                if step < life.first_step:
                    return
                counts = column("I", tokens, odd)
                if digest is None:
                    indices = index_column(requests, odd)
                    same_rows(len(indices) // 4, ("I", counts))
                    digest = digest64(indices, counts)
                elif type(digest) is not int or not 0 <= digest <= LARGEST_U64:
                    digest = whole(digest, 0, LARGEST_U64, odd)
                if mode is not None:
                    mode = text_or_empty(mode, odd)
                if padded_tokens is not None:
                    padded_tokens = whole_or(padded_tokens, 0, 0, LARGEST_U32, odd)
                signed: tuple[int | None, int] = (None, 0)
                if prefill_tokens is not None:
                    computed = sum(memoryview(counts).cast("I"))
                    prefills = whole(prefill_tokens, 0, computed, odd)
                    signed = prefills, computed - prefills
                waited_ns = whole_or(waited_ns, 0, 0, LARGEST_INT64, odd)
            except Exception as error:
                life.refuse("sign", error)
                return
            signature = (t_ns, step, Signature(digest, signed, mode, padded_tokens, waited_ns))
            life.perform(t_ns, self._keep_signature, self._write_signature, signature)
        except Exception as error:
            life.caught(error)

    def _keep_signature(self, signature: _Signature) -> None:
        _, step, signed = signature
        self._spans.sign(step, signed)

    def _write_signature(self, signature: _Signature) -> None:
        t_ns = signature[0]
        self._keep_signature(signature)
        self._spans.reap(t_ns)
        if t_ns >= self._log.health_due_ns:
            self._life.report(t_ns)

    def emitted(
        self,
        requests: Sequence[int],
        tokens: Sequence[int],
        *,
        step: int = -1,
        at_ns: int | None = None,
        blocked_ns: Sequence[int] = (),
    ) -> None:
        """Note that tokens leave the engine's loop, or (in a front end) were written to clients.

        Args:
            requests: indices from `queued` or `received`, each once.
            tokens: of each.
            step: that computed them, -1 where that is not known.
            at_ns: when they left; now where that is None.
            blocked_ns: in a front end, for how long before that each request's connection took
                nothing more; empty where none was blocked for `LEAST_BLOCKED_NS`. A request whose
                connection was blocked may have 0 tokens.
        """
        life = self._life
        if not life.on:
            return
        try:
            t_ns, log = self._now(), self._log
            odd = log.odd
            try:
                indices, counts = index_column(requests, odd), column("I", tokens, odd)
                if len(indices) != len(counts):
                    same_rows(len(indices) // 4, ("I", counts))
                if type(step) is not int or not LEAST_INT64 <= step <= LARGEST_INT64:
                    step = whole(step, LEAST_INT64, LARGEST_INT64, odd)
                if at_ns is not None:
                    at_ns = time_or(at_ns, t_ns, odd)
                blocked = b""
                if len(blocked_ns):
                    blocked = column("q", blocked_ns, odd)
                    same_rows(len(indices) // 4, ("q", blocked))
            except Exception as error:
                life.refuse("emitted", error)
                return
            record = Emitted(t_ns, indices, counts, step, at_ns, blocked)
            life.perform(t_ns, log.write, log.write, record)
        except Exception as error:
            life.caught(error)

    def routed(
        self,
        step: int,
        counts: Sequence[Sequence[int]],
        *,
        per_token: int,
        first_layer: int = 0,
    ) -> None:
        """Record how a step's tokens were routed to the experts of a mixture.

        Args:
            step: the step's number.
            counts: number of tokens routed to each expert, by layer.
            per_token: number of experts of each token in each layer.
            first_layer: index of the first of these layers, on a later pipeline stage.
        """
        life = self._life
        if not life.on:
            return
        try:
            t_ns, log = self._now(), self._log
            try:
                record = expert_load(t_ns, step, counts, per_token, first_layer, log.odd)
            except Exception as error:
                life.refuse("routed", error)
                return
            life.perform(t_ns, log.write, log.write, record)
        except Exception as error:
            life.caught(error)

    # --- what cannot be observed --------------------------------------------------------------

    def unsupported(self, feature: str, *, is_everything: bool = False) -> None:
        """Report a feature of the engine that cannot be observed, with the reason.

        With `is_everything` the probe records nothing from now on, and its ring is marked so.
        """
        life, log = self._life, self._log
        if log.ring is None:
            return
        try:
            t_ns = self._now()
            noted = t_ns, text_or_empty(feature, log.odd), is_everything is True
            life.perform(t_ns, life.note_unsupported, life.note_unsupported, noted)
        except Exception as error:
            life.caught(error)

    # --- facts that the engine's hooks keep for later ---------------------------------------------

    def defer(self, since_ns: int) -> None:
        """Note from when on facts are kept and not written yet; 0: none are.

        Reports say that this ring is complete up to then.
        """
        if type(since_ns) is int and 0 <= since_ns <= LARGEST_INT64:
            self._spans.deferred_ns = since_ns

    def look_after(self, write_overdue: Callable[[int], object]) -> None:
        """Write facts that are kept for too long, because the engine's thread hangs.

        Args:
            write_overdue: called every 100 ms with the time, on the probe's own thread, beside the
                engine's; raises nothing.
        """
        if callable(write_overdue):
            self._keeper.write_overdue = write_overdue

    # --- the end ------------------------------------------------------------------------------

    def warn(self, line: str) -> None:
        """Write a line to the host's log, later and on another thread: that log may block."""
        if type(line) is str:
            self._life.queue_message(line)

    def fail(self, error: Exception) -> None:
        """Disable the probe permanently and report it: its caller's facts are unreliable."""
        self._life.fail(error)

    def close(self) -> None:
        """Write the last word and leave the ring on disk. Safe to call twice.

        From a signal handler within another call of the probe, it is that call that does it, before
        it returns or an exception of the handler's goes through it.
        """
        self._leave(self._life.close)

    def abandon(self) -> None:
        """Leave the ring without a shutdown record, as if the process had died.

        For a front end whose core has died: its shutdown record would say that it stopped the core.
        """
        self._leave(self._life.abandon)

    def _leave(self, leave: Callable[[int], None]) -> None:
        life = self._life
        if self._log.ring is None or not life.is_ours():
            return
        try:
            self._keeper.stop()
            t_ns = self._now()
            life.perform(t_ns, leave, leave, t_ns)
            self._keeper.close()
        except Exception as error:
            life.caught(error)


def _state_in_full(_: _Same) -> None:
    """Do nothing in place of a queued `same_step`: its caller has been asked for the whole step."""


def _cost_tables(info: EngineInfo, role: str) -> Sequence[CostTable]:
    """Return what `inferscope calibrate` has measured for an engine; a front end computes not."""
    if role == "frontend" or info.shape is None:
        return ()
    from inferscope.calibration import cost_tables  # not worth its modules at import

    return cost_tables(info)
