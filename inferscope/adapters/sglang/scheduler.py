"""Recorder of SGLang's scheduler process: requests, batches, outputs.

Scheduler and model worker share a process. The scheduler of the first tensor, context and pipeline
rank records everything of its requests (in a ring of role `core`); the others run the same loop on
the same batches and record only their spans (role `worker`).

    _add_request_to_queue   queued, or preempted: a retracted request comes back this way
    run_batch, before       references to what the batch holds now, for it is replaced later
      forward_batch_...     the span
    run_batch, after        what was deferred; admitted, resumed; the plan; the slices, those of a
                            speculative batch only with its result
    stream_output, after    emitted, finished, at the time before the client could have them
    process_batch_result    which step the outputs belong to (with overlap, one is launched between)
    send_abort_output       finished, of those that end outside of any batch

Where a device computes asynchronously, what is recorded of a step before `run_batch` and of a
result is only noted, and recorded behind the next launch, while the device is busy. It is recorded
at once where there is no next launch, and before the launch of a batch of a kind that has not run
yet: that may take seconds. Where the model runs within `run_batch`, a plan is recorded before it.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from inferscope.adapters.sglang.cache import CacheRecorder
from inferscope.adapters.sglang.phases import (
    HEALTH_CHECK,
    Part,
    Rows,
    binding,
    finish_of_json,
    has_forward,
    rows_of,
)
from inferscope.adapters.sglang.results import Results
from inferscope.adapters.sglang.state import MARK, Followed, Launch, Team
from inferscope.probe import MAX_LIVE, Clock, Deferred, Probe, SystemClock, digest64
from inferscope.records import VERIFY, RequestIndex


class SchedulerWatch:
    """Recorder of one scheduler. Its methods may raise: callers guard them.

    Attributes:
        probe: probe of this process.
        deferred: facts that are noted and not recorded yet.
        now_ns: function that returns the time, for `scheduled` and `streamed`.
        cache: recorder of the radix cache; None if nothing is recorded of it.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        is_core: bool,
        pool: Callable[[], tuple[int, int]] = lambda: (0, 0),
        block_tokens: int = 1,
        total_tokens: int = 0,
        max_running: int = 0,
        graph_sizes: Sequence[int] = (),
        adapter_of: Callable[[str], str] = str,
        end_left: str = "client_cancel",
        is_deferring: bool = False,
        counts_at_once: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Take the probe and what does not change.

        Args:
            probe: of this process.
            is_core: whether it records requests and batches, not only spans.
            pool: returns the KV pool's free tokens, and those that only the cache holds.
            block_tokens: SGLang's page size.
            total_tokens: of the KV pool.
            max_running: the most requests at a time.
            graph_sizes: batch sizes that were captured as graphs.
            adapter_of: returns the name of a LoRA adapter by SGLang's id of it.
            end_left: how a request ended, one of `FINISHES`, that SGLang dropped without a hook.
            is_deferring: the device computes while `run_batch` returns: record behind launches.
            counts_at_once: tokens that have left may be taken back before the next launch.
            clock: source of times.
        """
        self.probe = probe
        self._is_core = is_core
        self._pool = pool
        self._block_tokens = max(1, block_tokens)
        self._total_tokens = total_tokens
        self._max_running = max_running
        self._graph_sizes = sorted(graph_sizes)
        self._adapter_of = adapter_of
        self.now_ns = (clock or SystemClock()).monotonic_ns
        self._end_reason = end_left
        self.cache: CacheRecorder | None = None
        self.deferred = Deferred(probe)
        self._is_deferring = is_deferring
        self._marks = probe.marks() if is_deferring else None
        """Notes the steps; None where this host computes them."""
        self._scheduled_ns = (0, 0)
        self._has_launched = False
        self._preempted: list[int] = []
        self._left: deque[RequestIndex] = deque(maxlen=MAX_LIVE)
        """Requests that SGLang has dropped, and of whose end no hook was called."""
        self._numbers = itertools.count()
        self._has_own_indices = False
        """The probe was off as a request came: its indices are not the numbers any more."""
        self._launch: Launch | None = None
        self._depth = 0
        self._seen_kinds: set[tuple[str, bool]] = set()
        self._team: Team | None = None
        self._results = Results(
            probe,
            self.deferred,
            is_core=is_core,
            is_deferring=is_deferring,
            counts_at_once=counts_at_once,
            record_rows=self._write_rows,
            finish=self._finish,
        )

    # --- requests -----------------------------------------------------------------------------

    def enqueued(self, _: Any, /, req: Any, *__: Any, **___: Any) -> None:
        """Take a request that comes into the queue: newly, or again after it lost its KV."""
        if req.rid.startswith(HEALTH_CHECK):
            return
        followed = getattr(req, MARK, None)
        if followed is None:
            setattr(req, MARK, self._enter(req))
            # A retraction clears the tokens of a prompt that was given as embeddings.
            self._results.counts_at_once |= getattr(req, "input_embeds", None) is not None
        elif req.is_retracted and not followed.is_held:
            self.flush()
            followed.is_held = True
            self._break_up_team()
            if self._is_core:
                self.probe.preempted(followed.index, reason="blocks")
                self._preempted.append(followed.index)

    def aborted(self, _: Any, /, abort_req: Any, req: Any, *__: Any, **___: Any) -> None:
        """Take the end of a request outside of any batch: in the queue, between chunks, refused."""
        followed = getattr(req, MARK, None)
        if followed is not None:
            self.flush()
            reason = finish_of_json(abort_req.finished_reason, has_run=followed.has_run)
            self._finish(followed, reason, None)

    def _enter(self, request: Any) -> Followed:
        number = next(self._numbers)  # all ranks see the same requests in the same order
        if not self._is_core:
            return Followed(number, self._left)
        num_prompt = len(request.origin_input_ids)
        lora_id = getattr(request, "lora_id", None)
        adapter = self._adapter_of(lora_id) if lora_id else ""
        index = self.probe.queued(request.rid, prompt_tokens=num_prompt, adapter=adapter)
        self._has_own_indices |= index != number
        return Followed(index, self._left, number=number)

    def _finish(self, followed: Followed, reason: str, at_ns: int | None) -> None:
        if not followed.has_ended:
            followed.has_ended = True
            self._break_up_team()  # it holds the engine's own objects
            if self._is_core:
                self._end(followed.index, reason, at_ns)

    def _end_left(self) -> None:
        """Report the ends that no hook saw: with all hooks, of clients that left in the queue."""
        left = self._left
        while left:
            index = left.popleft()
            if self._is_core:
                self._end(index, self._end_reason, None)

    def _end(self, index: RequestIndex, reason: str, at_ns: int | None) -> None:
        self.probe.finished(index, reason, at_ns=at_ns)
        if self.cache is not None:
            self.cache.ended(index)

    # --- batches ------------------------------------------------------------------------------

    def scheduled(self, start_ns: int, plan: Any) -> None:
        """Note when the scheduler was at work on the batch that comes next, and whether it comes.

        Args:
            start_ns: by `now_ns`.
            plan: what the scheduler returned: a batch or None, or an object that has it.
        """
        self._scheduled_ns = (start_ns, self.now_ns())
        if not self._has_launched:  # nothing came of the last one: an idle engine keeps no team
            with self.deferred.lock:
                self._break_up_team()
        self._has_launched = False
        if self.deferred.facts and getattr(plan, "batch_to_run", plan) is None:
            self.flush()
        self._end_left()

    def launching(self, scheduler: Any, /, batch: Any, *_: Any, **__: Any) -> None:
        """Note what a batch holds, before it runs."""
        self._has_launched = True
        self._end_left()
        mode, step = batch.forward_mode.name, scheduler.forward_ct + 1
        launch = Launch(batch, step, mode, at_ns=self.now_ns(), scheduled_ns=self._scheduled_ns)
        if not has_forward(mode):
            self._launch = None
            self._parts(launch)
            return
        self._launch = launch
        launch.preempted, self._preempted = self._preempted, []
        num_rows = len(launch.requests)
        if launch.tail is not None:
            num_rows += launch.tail.entries[-1].end
        launch.padded_tokens = padded = self._padded(mode, num_rows) if self._graph_sizes else 0
        launch.is_dummy = _has_none_followed(launch.requests)
        launch.kind = kind = mode, padded > 0
        launch.is_cold = is_cold = kind not in self._seen_kinds
        if self._is_deferring and not is_cold:
            self.deferred.add(launch.at_ns, self._record_launch, scheduler, launch)
        else:
            self.flush()
            self._prepare(scheduler, launch)

    def launched(self) -> None:
        """Record what was deferred, and a batch's rows: its span is over, or queued."""
        launch, self._launch = self._launch, None
        if self._marks is not None:
            self._marks.book()
        with self.probe.hidden if self._is_deferring else nullcontext():
            self.flush()
            if launch is not None:
                self._record_rows(launch)

    def flush(self) -> None:
        """Record what was deferred."""
        if self.deferred.facts:
            with self.deferred.lock:
                self.deferred.flush()
                self._results.settle()

    def flush_overdue(self, now_ns: int) -> None:
        """Record what was deferred for too long; on the probe's own thread."""
        if not self.deferred.lock.acquire(blocking=False):
            return  # the engine's thread is recording
        try:
            self.deferred.flush_overdue(now_ns)
            if not self.deferred.facts:
                self._results.settle()
        finally:
            self.deferred.lock.release()

    def forget(self) -> None:
        """Drop the engine's objects that are kept: no hook is called any more."""
        self.deferred.facts.clear()
        self._launch = self._team = None
        self._results.forget()

    def _record_launch(self, scheduler: Any, launch: Launch) -> None:
        """Record a batch behind its launch, or during one that takes long."""
        self._prepare(scheduler, launch)
        self._record_rows(launch)

    def _prepare(self, scheduler: Any, launch: Launch) -> None:
        """Record a batch's plan and who runs now and did not; make its rows."""
        if self._is_core:
            if self._repeats(launch) and self._record_plan(scheduler, launch, repeats=True):
                return
            self._results.settle()
            self._record_plan(scheduler, launch)  # here a probe follows its switch
        if launch.mode == "DECODE" and not launch.is_speculative and launch.tail is None:
            if self.probe.on:
                launch.rows = self._decoding_rows(launch)
            return
        self._break_up_team()
        parts = self._parts(launch)
        if launch.is_speculative:
            self._results.expect_verified(launch.step, launch.mode)
        else:
            launch.rows = rows_of(launch.mode, parts)

    def _repeats(self, launch: Launch) -> bool:
        """Return whether a batch repeats the last one's decode rows, one position further on."""
        team = self._team
        if (
            team is None
            or launch.mode != "DECODE"
            or launch.tail is not None
            or launch.lengths is None
            or launch.preempted
            or team.requests != launch.requests
            or launch.is_speculative
        ):
            return False
        lengths = launch.lengths.tolist()
        # A context is one less than the length: equal to the last length where it moved by one.
        if [length - 2 for length in lengths] != team.contexts:
            return False
        launch.contexts = [length - 1 for length in lengths]
        return True

    def _record_rows(self, launch: Launch) -> None:
        rows, launch.rows = launch.rows, None
        if rows is not None:
            self._write_rows(launch.step, rows)

    def _decoding_rows(self, launch: Launch) -> Rows:
        """Return the rows of a batch that decodes; with the team of the last, only contexts move.

        A batch of 64 costs a third of what its parts would.
        """
        team, requests, lengths = self._team, launch.requests, launch.lengths
        if team is None or team.requests != requests or lengths is None:
            self._break_up_team()
            rows = rows_of("DECODE", self._parts(launch))
            followed = [getattr(request, MARK, None) for request in requests]
            members = [one for one in followed if one is not None]
            if len(members) == len(followed):
                self._team = Team(list(requests), members, rows)
            return rows
        num = len(team.requests)
        team.contexts = [length - 1 for length in lengths.tolist()[:num]]
        return msgspec.structs.replace(team.rows, contexts=team.contexts)

    def _break_up_team(self) -> None:
        if self._team is not None:
            self._team.settle()
            self._team = None

    def _parts(self, launch: Launch) -> list[Part]:
        """Return the requests' parts of a batch; record who of them runs now and did not."""
        parts = []
        for request, followed, part in launch.parts():
            if self._is_core:
                self._record_running(request, followed, part.context, launch.at_ns)
            followed.seen = max(followed.seen, part.context + part.tokens)
            parts.append(part)
        return parts

    def _record_running(self, request: Any, followed: Followed, context: int, at_ns: int) -> None:
        if not followed.has_run:
            followed.has_run = True
            self.probe.admitted(followed.index, cached_tokens=context, at_ns=at_ns)
            if self.cache is not None:
                self.cache.arrived(request, followed, context)
        elif followed.is_held:
            followed.is_held = False
            self.probe.resumed(followed.index, cached_tokens=context, at_ns=at_ns)

    def _record_plan(self, scheduler: Any, launch: Launch, *, repeats: bool = False) -> bool:
        """Record a batch's plan; where it repeats the last batch, its rows and their emission too.

        Returns:
            whether it was recorded. As a repetition it may not be, and has to be stated in full.
        """
        start_ns, end_ns = launch.scheduled_ns
        waiting = len(scheduler.waiting_queue)
        running = scheduler.running_batch.reqs
        num_running = len(launch.requests)
        if scheduler.running_batch is not launch.batch and running:
            num_running += len(running)
        free, cached = self._pool()
        numbers: dict[str, Any] = {
            "start_ns": start_ns or launch.at_ns,
            "end_ns": end_ns or launch.at_ns,
            "waiting": waiting,
            "running": num_running,
            "blocks_used": (self._total_tokens - free - cached) // self._block_tokens,
            "blocks_cached": cached // self._block_tokens,
            "blocks_total": self._total_tokens // self._block_tokens,
            "binding": binding(
                waiting=waiting,
                running=num_running,
                max_running=self._max_running,
                is_full=scheduler.running_batch.batch_is_full,
                has_chunk=scheduler.chunked_req is not None,
            ),
        }
        if not repeats:
            self.probe.plan(launch.step, preempted=launch.preempted, **numbers)
            return True
        team, held = self._team, self._results.held
        assert team is not None
        is_of_team = held is not None and held.indices == team.rows.requests
        if held is not None and is_of_team:
            numbers |= {"emitted_step": held.step, "emitted_ns": held.at_ns}
        elif held is not None:
            self._results.settle()
        if not self.probe.same_step(launch.step, **numbers):
            return False
        self._results.held = None
        team.contexts = launch.contexts
        return True

    def _write_rows(self, step: int, rows: Rows) -> None:
        if not rows.requests:
            return
        if not self._is_core:
            self.probe.sign(
                step,
                requests=rows.requests,
                tokens=rows.tokens,
                prefill_tokens=rows.prefill_tokens,
            )
            return
        has_drafts = VERIFY in rows.phases
        self.probe.slices(
            step,
            requests=rows.requests,
            phases=rows.phases,
            tokens=rows.tokens,
            contexts=rows.contexts,
            flags=rows.flags,
            sampled=rows.sampled,
            proposed=rows.proposed if has_drafts else (),
            accepted=rows.accepted if has_drafts else (),
            digest=self._digest(rows) if self._has_own_indices else None,
        )

    @staticmethod
    def _digest(rows: Rows) -> int:
        """Return what the other ranks sign a step with, which have numbers for indices."""
        return digest64(array("I", rows.numbers).tobytes(), array("I", rows.tokens).tobytes())

    # --- the model ----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Begin the span: a speculative worker calls others, whose time is in its own."""
        self._depth += 1
        launch = self._launch
        if self._depth > 1 or launch is None or launch.is_over:
            return
        if launch.is_cold:
            self._seen_kinds.add(launch.kind)
        mode = "graph" if launch.padded_tokens else "eager"
        marks, is_dummy = self._marks, launch.is_dummy
        if marks is not None and not is_dummy:
            marks.begin(launch.step, mode, launch.is_cold, False, True)
        else:  # behind a dummy's launch nothing is recorded that writes spans
            is_reaping = is_dummy or not self._is_deferring
            self.probe.start(
                launch.step, mode=mode, cold=launch.is_cold, dummy=is_dummy, reaps=is_reaping
            )

    def forward_ends(self) -> None:
        """End the span: outputs are there on a CPU, queued on a device."""
        self._depth -= 1
        launch = self._launch
        if self._depth == 0 and launch is not None and not launch.is_over:
            launch.is_over = True
            if self._marks is not None:
                self._marks.end(launch.step, launch.padded_tokens)
            else:
                self.probe.stop(launch.step, padded_tokens=launch.padded_tokens)

    def _padded(self, mode: str, num_rows: int) -> int:
        """Return the captured size that a decoding batch is padded to, 0 where none is used."""
        sizes = self._graph_sizes
        at = bisect_left(sizes, num_rows) if mode == "DECODE" else len(sizes)
        return sizes[at] if at < len(sizes) else 0

    # --- results ------------------------------------------------------------------------------

    def result_begins(self, _: Any, /, batch: Any, *__: Any, **___: Any) -> None:
        """Take in whose result is processed."""
        self.flush()  # what was noted of a result is read before the next one changes it
        self._results.begin(batch)

    def result_ends(self, _: Any, /, batch: Any, result: Any, *__: Any, **___: Any) -> None:
        """Take the result, which is processed."""
        self._results.end(batch, result, self.now_ns())

    def streamed(self, at_ns: int, _: Any, /, reqs: Any, *__: Any, **___: Any) -> None:
        """Take the requests whose tokens have left, since `at_ns`."""
        self._results.stream(reqs, at_ns)


def _has_none_followed(requests: Sequence[Any]) -> bool:
    """Return whether no request of a batch is recorded: it has none, or only health checks."""
    if requests and getattr(requests[0], MARK, None) is not None:
        return False
    return all(getattr(request, MARK, None) is None for request in requests)
