"""Continuous batching of transformers: what its loop plans, runs and brings back.

    prepare_next_batch ─┬─ BackgroundThreadStatus.pause_and_wait
                        ├─ Scheduler.add_waiting_request, clear_cancelled_requests
                        └─ prepare_batch_tensors         the plan: who computes which positions
    _generation_step                                     the step
    update_batch                                         its outcome, which may be an earlier step's

With asynchronous batching a step is launched before the last one's outcome is known: plans wait in
a queue, and what was computed for a request that turns out to have ended is the step's padding.

On a device, plans and outcomes are recorded behind the next launch, while it computes, and at once
where nothing is launched. On a CPU a plan is recorded before its step, an outcome as it is known.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.recorder import Recorder
from inferscope.adapters.sampling_attributes import asked
from inferscope.adapters.slice_builder import SliceBuilder
from inferscope.probe import Deferred
from inferscope.records import RequestIndex

_MOST_PLANNED = 8
"""Planned steps without an outcome; asynchronous batching has two."""
_FINISHED = 3
"""`RequestStatus.FINISHED`."""


class Track:
    """A request that is not finished.

    Attributes:
        seen: tokens that were ever computed.
        state: what the engine keeps of it; a reset request gets a new one.
    """

    __slots__ = ("index", "is_held", "is_running", "num_prompt", "seen", "state")

    def __init__(self, index: RequestIndex, num_prompt: int, state: Any) -> None:
        self.index = index
        self.num_prompt = num_prompt
        self.seen = 0
        self.state = state
        self.is_running = False
        self.is_held = False


class Part:
    """What one request computes in a planned step."""

    __slots__ = ("end", "has_new_token", "is_over", "num_generated", "start", "state", "track")

    def __init__(
        self, track: Track, state: Any, start: int, end: int, *, has_new_token: bool
    ) -> None:
        self.track = track
        self.state = state
        self.start = start
        self.end = end
        self.has_new_token = has_new_token
        self.num_generated = 0
        self.is_over = False


class PlannedStep:
    """A step from its plan to its outcome."""

    def __init__(self, step: int, parts: list[Part], num_tokens: int) -> None:
        self.step = step
        self.parts = parts
        self.num_tokens = num_tokens


class Batcher:
    """One continuous batching loop, on its own thread.

    Attributes:
        recorder: recorder of the loop's model.
        deferred: facts that are noted and not recorded yet.
        is_closed: whether the loop's end is recorded.
    """

    def __init__(self, recorder: Recorder, processor: Any, *, is_deferring: bool = False) -> None:
        """Prepare to record one loop.

        Args:
            recorder: recorder of the loop's model.
            processor: the loop's `ContinuousBatchProcessor`.
            is_deferring: whether to record behind launches, while a device computes.
        """
        self.recorder = recorder
        self.deferred = recorder.deferred = Deferred(recorder.probe)
        self.is_closed = False
        self._is_deferring = is_deferring
        self._processor_ref = weakref.ref(processor)
        self._tracks: LiveTable[Track] = LiveTable(recorder.probe)
        self._planned: deque[PlannedStep] = deque()
        self._parts: list[Part] | None = None
        self._updated: PlannedStep | None = None
        """The step whose outcome is being processed, until it is recorded."""
        self._plan_start_ns = 0
        self._preempted: list[RequestIndex] = []

    # --- the plan -----------------------------------------------------------------------------

    def plan_begins(self) -> None:
        """Note the start of scheduling."""
        self._plan_start_ns = time.monotonic_ns()
        self._parts = []
        self._preempted = []

    def pauses(self) -> None:
        """Record a pause: another thread uses the model until `goes_on`."""
        self.deferred.flush()
        self.recorder.probe.paused()

    def goes_on(self) -> None:
        """Record the end of a pause; the plan starts here, for the loop has waited until now."""
        self.recorder.probe.unpaused()
        self._plan_start_ns = time.monotonic_ns()

    def waits(self, state: Any) -> None:
        """Record a request that enters the queue: a new one, or one that lost its blocks."""
        track = self._tracks.get(state.request_id)
        if track is None:
            self._enter(state, at_ns=round(state.created_time * 1e9))
            return
        track.state = state
        if track.is_running:
            track.is_running, track.is_held = False, True
            self._preempted.append(track.index)
            self.deferred.flush()
            self.recorder.probe.preempted(track.index, reason="blocks")

    def batch_chosen(self, chosen: list[Any]) -> None:
        """The requests of the next step are known, and not yet counted as computed."""
        if self._parts is None or self._parts:
            return
        for future in chosen:
            state = future.state
            track = self._tracks.get(state.request_id)
            if track is None and self._tracks.num_dropped:  # it would come back as a new request
                continue
            if track is None:  # a fork: it begins behind its parent's prompt
                track = self._enter(state, at_ns=None)
            track.state = state
            start = state.position_offset
            if not track.is_running:
                self._admit(track, start)
            end = start + future.query_length
            part = Part(track, state, start, end, has_new_token=future.has_new_token)
            self._parts.append(part)

    def plan_ends(self, is_planned: bool | None) -> None:
        """The scheduler is through: there is a step to run, or there is nothing to do."""
        parts, self._parts = self._parts, None
        if not parts or not is_planned:
            self.deferred.flush()
            return
        recorder = self.recorder
        num_tokens = sum(part.end - part.start for part in parts)
        planned = PlannedStep(recorder.next_step(), parts, num_tokens)
        self._planned.append(planned)
        if len(self._planned) > _MOST_PLANNED:
            raise RuntimeError(f"{len(self._planned)} planned steps without an outcome")
        times_ns = self._plan_start_ns, time.monotonic_ns()
        preempted, self._preempted = self._preempted, []
        self._defer(times_ns[0], self._record_plan, planned, times_ns, preempted)

    def _record_plan(
        self, planned: PlannedStep, times_ns: tuple[int, int], preempted: list[RequestIndex]
    ) -> None:
        processor = self._processor
        if processor is None:  # dropped by a stop that does not wait for the loop
            return
        scheduler, num_tokens = processor.scheduler, planned.num_tokens
        used, total = self._blocks()
        self.recorder.probe.plan(
            planned.step,
            start_ns=times_ns[0],
            end_ns=times_ns[1],
            waiting=len(scheduler.waiting_requests),
            running=len(scheduler.active_requests),
            blocks_used=used,
            blocks_total=total,
            preempted=preempted,
            binding=self._binding(len(planned.parts), num_tokens),
        )

    # --- the step -----------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The planned step is launched."""
        if not self._planned:
            return
        planned, mode = self._planned[-1], self._mode()
        is_cold = self.recorder.is_cold(mode, planned.num_tokens)
        self.recorder.probe.start(
            planned.step, mode=mode, cold=is_cold, reaps=not self._is_deferring
        )

    def step_ends(self) -> None:
        """It is launched, and on a CPU done."""
        if not self._planned:
            return
        planned = self._planned[-1]
        computed = self._computed_tokens()
        padded_tokens = computed if computed > planned.num_tokens else 0
        self.recorder.probe.stop(planned.step, padded_tokens=padded_tokens)
        self.deferred.flush_hidden()  # if anything is deferred, this is a device

    # --- the outcome --------------------------------------------------------------------------

    def update_begins(self) -> None:
        """Note the state of the oldest step's requests before its outcome is processed."""
        if not self._planned:
            return
        planned = self._updated = self._planned.popleft()
        for part in planned.parts:
            # The request was reset, or has ended, since the step was planned.
            part.is_over = part.track.state is not part.state or _has_ended(part.state)
            part.num_generated = len(part.state.generated_tokens)

    def update_ends(self) -> None:
        """Record the step's slices, its tokens, and the requests that finished.

        This comes before the outputs are handed on: a front end, in its own thread, may write the
        last byte before the update returns.
        """
        planned, self._updated = self._updated, None
        if planned is None:
            return
        is_new: list[bool] = []
        ended: list[tuple[Track, str]] = []
        for part in planned.parts:
            state = part.state
            is_new.append(len(state.generated_tokens) > part.num_generated)
            if not part.is_over and _has_ended(state):
                track = self._tracks.pop(state.request_id, None)
                if track is not None:
                    ended.append((track, _reason(state)))
        at_ns = time.monotonic_ns()
        self._defer(at_ns, self._record_outcome, planned, is_new, ended, at_ns)

    def _record_outcome(
        self,
        planned: PlannedStep,
        is_new: list[bool],
        ended: list[tuple[Track, str]],
        at_ns: int,
    ) -> None:
        probe = self.recorder.probe
        slices = SliceBuilder()
        emitted: list[int] = []
        for part, has_token in zip(planned.parts, is_new, strict=True):
            track = part.track
            if part.is_over:
                continue
            slices.add(
                track.index,
                part.start,
                part.end,
                num_prompt=track.num_prompt,
                seen=track.seen,
                is_sampled=part.has_new_token,
            )
            track.seen = max(track.seen, part.end)
            if has_token:
                emitted.append(track.index)
        slices.write_to(probe, planned.step)
        if emitted:
            probe.emitted(emitted, [1] * len(emitted), step=planned.step, at_ns=at_ns)
        for track, reason in ended:
            probe.finished(track.index, reason, at_ns=at_ns)

    def _defer(self, at_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        if self._is_deferring:
            self.deferred.add(at_ns, action, *arguments)
        else:
            action(*arguments)

    def cancelled(self, states: list[Any]) -> None:
        """Record requests that their clients have cancelled."""
        self.deferred.flush()
        for state in states:
            self._finish(state, "client_cancel")

    def failed(self, state: Any) -> None:
        """Record a request that ended with an error."""
        self.deferred.flush()
        self._finish(state, "error")

    def close(self) -> None:
        """Record the loop's end: the remaining requests are aborted."""
        self.is_closed = True
        self.deferred.flush()
        for track in list(self._tracks.values()):
            self._finish(track.state, "server_abort")

    # --- inside -------------------------------------------------------------------------------

    @property
    def _processor(self) -> Any:
        """Return the loop's processor; only the hooks of a running loop read it."""
        return self._processor_ref()

    def _enter(self, state: Any, *, at_ns: int | None) -> Track:
        name = state.request_id
        num_prompt = state._true_initial_tokens or len(state.initial_tokens)
        parent, _, child = name.rpartition("__child#")
        index = self.recorder.probe.queued(
            name,
            prompt_tokens=num_prompt,
            at_ns=at_ns,
            parent=parent if child.isdigit() else "",
            attributes=asked({"max_tokens": state.max_new_tokens}),
        )
        track = Track(index, num_prompt, state)
        self._tracks.put(name, track)
        return track

    def _admit(self, track: Track, cached_tokens: int) -> None:
        track.is_running = True
        if track.is_held:
            track.is_held = False
            self.recorder.probe.resumed(track.index, cached_tokens=cached_tokens)
        else:
            track.seen = cached_tokens
            self.recorder.probe.admitted(track.index, cached_tokens=cached_tokens)

    def _finish(self, state: Any, reason: str) -> None:
        track = self._tracks.pop(state.request_id, None)
        if track is not None:
            self.recorder.probe.finished(track.index, reason)

    def _blocks(self) -> tuple[int, int]:
        """Return the blocks in use, rounded to the cache's sectors, and the total."""
        cache = self._processor.cache
        total = getattr(cache, "num_blocks", 0)
        free = getattr(cache, "compute_free_capacity", None)
        return (round(total * (1 - free())) if callable(free) else 0), total

    def _binding(self, num_requests: int, num_tokens: int) -> str:
        scheduler = self._processor.scheduler
        if not scheduler.waiting_requests:
            return "none"
        if num_requests >= getattr(scheduler, "max_requests_per_batch", num_requests + 1):
            return "slots"
        return "budget" if num_tokens >= self._processor.max_batch_tokens else "blocks"

    def _mode(self) -> str:
        runner = getattr(self._processor, "model_runner", None)
        is_decode = bool(getattr(self._processor.inputs_and_outputs, "use_block_table", False))
        graphs = "use_cuda_graph_decode" if is_decode else "use_cuda_graph_varlen"
        compiled = "_compiled_decode" if is_decode else "_compiled_varlen"
        has_graph = getattr(runner, graphs, False) or getattr(runner, compiled, None) is not None
        return "graph" if has_graph else "eager"

    def _computed_tokens(self) -> int:
        runner = getattr(self._processor, "model_runner", None)
        if not getattr(runner, "pad_inputs", False):
            return 0
        outer = self._processor.inputs_and_outputs
        pairs = getattr(outer, "io_pairs", None)
        inner = outer if pairs is None else pairs[outer.current_pair].host_io
        return int(getattr(inner, "num_q_tokens", 0))


def _has_ended(state: Any) -> bool:
    return int(state.status) >= _FINISHED


def _reason(state: Any) -> str:
    tokens = state.generated_tokens
    return "stop" if tokens and tokens[-1] in state._eos_token_ids else "length"
