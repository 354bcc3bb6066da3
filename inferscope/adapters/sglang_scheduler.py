"""SGLang's scheduler process, as the probe is told of it: requests, batches, outputs.

Scheduler and model worker share a process. The scheduler of the first tensor, context and pipeline
rank tells everything of its requests (a ring of role `core`); the others run the same loop on the
same batches and tell only when they worked (role `worker`).

    _add_request_to_queue   queued, or preempted: a retracted request comes back this way
    run_batch, before       admitted, resumed; the plan; what the batch holds, by value: it mutates
      forward_batch_...     the span
    run_batch, after        the slices; of a speculative batch only with its result
    stream_output, before   emitted, finished: before the client can have them
    process_batch_result    which step the outputs belong to (with overlap, one is launched between)
    send_abort_output       finished, of those that end outside of any batch
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from inferscope.adapters.sglang_followed import MARK, Followed, Forward, Team
from inferscope.adapters.sglang_phases import (
    HEALTH_CHECK,
    Part,
    Rows,
    binding,
    finish_of_json,
    has_forward,
    rows_of,
)
from inferscope.probe import Probe
from inferscope.probe.clock import Clock, SystemClock
from inferscope.probe.requests import MAX_LIVE
from inferscope.records import RequestIndex

_LATE = 8
"""Launched batches kept until their results; overlap has one, a pipeline one per stage."""


class SchedulerWatch:
    """Tells a probe what one scheduler does. Its methods may raise: who calls them answers."""

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
        clock: Clock | None = None,
    ) -> None:
        """Take the probe and what does not change.

        Args:
            probe: of this process.
            is_core: it tells of requests and batches, not only of spans.
            pool: returns the KV pool's free tokens, and those that only the cache holds.
            block_tokens: SGLang's page size.
            total_tokens: of the KV pool.
            max_running: the most requests at a time.
            graph_sizes: batch sizes that were captured as graphs.
            adapter_of: returns the name of a LoRA adapter by SGLang's id of it.
            end_left: how a request ended, one of `FINISHES`, that SGLang dropped without a hook.
            clock: tells the time.
        """
        self.probe = probe
        self._is_core = is_core
        self._pool = pool
        self._block_tokens = max(1, block_tokens)
        self._total_tokens = total_tokens
        self._max_running = max_running
        self._graph_sizes = sorted(graph_sizes)
        self._adapter_of = adapter_of
        self._now = (clock or SystemClock()).monotonic_ns
        self._end = end_left
        self._scheduled_ns = (0, 0)
        self._has_launched = False
        self._preempted: list[int] = []
        self._left: deque[RequestIndex] = deque(maxlen=MAX_LIVE)
        """Requests that SGLang has dropped, and of whose end no hook was called."""
        self._indices = itertools.count()
        self._forward: Forward | None = None
        self._depth = 0
        self._seen_kinds: set[tuple[str, bool]] = set()
        self._verified: dict[int, str] = {}
        """Speculative batches whose result is not in: their mode, by step."""
        self._before: list[tuple[Any, int, int]] = []
        """Their requests, positions computed and tokens put out before the result now looked at."""
        self._rows: Rows | None = None
        self._team: Team | None = None
        self._result_step = -1
        self._has_streamed = False

    # --- requests -----------------------------------------------------------------------------

    def enqueued(self, request: Any) -> None:
        """A request comes into the queue: for the first time, or after it lost its KV."""
        if request.rid.startswith(HEALTH_CHECK):
            return
        followed = getattr(request, MARK, None)
        if followed is None:
            setattr(request, MARK, Followed(self._enter(request), self._left))
        elif request.is_retracted and not followed.is_held:
            followed.is_held = True
            self._break_up_team()
            if self._is_core:
                self.probe.preempted(followed.index, reason="blocks")
                self._preempted.append(followed.index)

    def aborted(self, request: Any, reason: Any) -> None:
        """A request ends outside of any batch: in the queue, between chunks, or refused."""
        followed = getattr(request, MARK, None)
        if followed is not None:
            self._finish(followed, finish_of_json(reason, has_run=followed.has_run))

    def _enter(self, request: Any) -> int:
        if self._is_core:
            num_prompt = len(request.origin_input_ids)
            lora_id = getattr(request, "lora_id", None)
            adapter = self._adapter_of(lora_id) if lora_id else ""
            return self.probe.queued(request.rid, prompt_tokens=num_prompt, adapter=adapter)
        # All ranks see the same requests in the same order: the core gives them these numbers too.
        return next(self._indices)

    def _finish(self, followed: Followed, reason: str) -> None:
        if not followed.has_ended:
            followed.has_ended = True
            self._break_up_team()  # it holds the engine's own objects
            if self._is_core:
                self.probe.finished(followed.index, reason)

    def _end_left(self) -> None:
        """Report the ends that no hook saw: with all hooks, of clients that left in the queue."""
        left = self._left
        while left:
            index = left.popleft()
            if self._is_core:
                self.probe.finished(index, self._end)

    # --- batches ------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time, for `scheduled`."""
        return self._now()

    def scheduled(self, start_ns: int) -> None:
        """Note when the scheduler was at work on the batch that comes next."""
        self._scheduled_ns = (start_ns, self._now())
        if not self._has_launched:  # nothing came of the last one: an idle engine keeps no team
            self._break_up_team()
        self._has_launched = False
        self._end_left()

    def launching(self, scheduler: Any, batch: Any) -> None:
        """Take in what a batch holds, before it runs."""
        self._has_launched = True
        self._end_left()
        self._forward = self._rows = None
        mode, step = batch.forward_mode.name, scheduler.forward_ct + 1
        if not has_forward(mode):
            self._parts(batch)
            return
        if self._is_core:
            self._tell_plan(scheduler, batch, step)  # here a probe follows its switch
        tail = getattr(batch, "beam_tail", None)
        num_rows = len(batch.reqs) + (0 if tail is None else tail.entries[-1].end)
        is_speculative = self._is_speculative(batch)
        if mode == "DECODE" and not is_speculative and tail is None:
            if self.probe.on:
                self._rows = self._decoding_rows(batch)
            # Switched off, the next step may be recorded all the same: its span is asked for.
            is_dummy = self._rows is not None and not self._rows.requests
            self._forward = Forward(step, mode, num_rows, is_dummy)
            return
        self._break_up_team()
        parts = self._parts(batch)
        if is_speculative:
            self._verified[step] = mode
            if len(self._verified) > _LATE:
                del self._verified[next(iter(self._verified))]
        else:
            self._rows = rows_of(mode, parts)
        self._forward = Forward(step, mode, num_rows, not parts)

    def launched(self) -> None:
        """Tell a batch's rows, once it was launched and its span is over or queued."""
        forward, rows, self._forward, self._rows = self._forward, self._rows, None, None
        if forward is not None and rows is not None:
            self._tell_rows(forward.step, rows)

    def _decoding_rows(self, batch: Any) -> Rows:
        """Return the rows of a batch that decodes; with the team of the last, only contexts move.

        A batch of 64 costs a third of what its parts would.
        """
        team = self._team
        if team is None or team.requests != batch.reqs or batch.seq_lens_cpu is None:
            self._break_up_team()
            rows = rows_of("DECODE", self._parts(batch))
            followed = [getattr(request, MARK, None) for request in batch.reqs]
            members = [one for one in followed if one is not None]
            if len(members) == len(followed):
                self._team = Team(list(batch.reqs), members, rows)
            return rows
        num = len(team.requests)
        team.contexts = [length - 1 for length in batch.seq_lens_cpu.tolist()[:num]]
        return msgspec.structs.replace(team.rows, contexts=team.contexts)

    def _break_up_team(self) -> None:
        if self._team is not None:
            self._team.settle()
            self._team = None

    def _parts(self, batch: Any) -> list[Part]:
        """Return the requests' parts of a batch, and tell of those that run now and did not."""
        requests = batch.reqs
        is_extending = batch.forward_mode.is_extend()
        if is_extending or not batch.forward_mode.is_decode():
            tokens = batch.extend_lens or [0] * len(requests)
            contexts = batch.prefix_lens or [0] * len(requests)
            starts = batch.extend_logprob_start_lens if batch.return_logprob else None
        else:
            lengths = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
            tokens, starts = [1] * len(requests), [0] * len(requests)
            tail = getattr(batch, "beam_tail", None)
            for entry in () if tail is None else tail.entries:  # beams beside their request's row
                tokens[entry.leader_idx] += entry.end - entry.start
            contexts = [
                request.seqlen - 1 if lengths is None else length - 1
                for request, length in zip(requests, lengths or tokens, strict=False)
            ]
        decoding = {id(request) for request in (batch.decoding_reqs or ()) if is_extending}
        parts = []
        for at, request in enumerate(requests):
            followed = getattr(request, MARK, None)
            if followed is None:  # a health check, or it came before us
                continue
            context, num = contexts[at], tokens[at]
            if self._is_core:
                self._tell_running(followed, context)
            is_decoding = id(request) in decoding
            parts.append(
                Part(
                    followed.index,
                    context,
                    num,
                    len(request.origin_input_ids),
                    followed.seen,
                    1 if starts is None or is_decoding else max(1, num - starts[at]),
                    is_decoding,
                )
            )
            followed.seen = max(followed.seen, context + num)
        return parts

    def _tell_running(self, followed: Followed, context: int) -> None:
        if not followed.has_run:
            followed.has_run = True
            self.probe.admitted(followed.index, cached_tokens=context)
        elif followed.is_held:
            followed.is_held = False
            self.probe.resumed(followed.index, cached_tokens=context)

    def _tell_plan(self, scheduler: Any, batch: Any, step: int) -> None:
        start_ns, end_ns = self._scheduled_ns
        now_ns = self._now()
        waiting = len(scheduler.waiting_queue)
        running = scheduler.running_batch.reqs
        num_running = len(batch.reqs)
        if scheduler.running_batch is not batch and running:
            num_running += len(running)
        free, cached = self._pool()
        self.probe.plan(
            step,
            start_ns=start_ns or now_ns,
            end_ns=end_ns or now_ns,
            waiting=waiting,
            running=num_running,
            blocks_used=(self._total_tokens - free - cached) // self._block_tokens,
            blocks_cached=cached // self._block_tokens,
            blocks_total=self._total_tokens // self._block_tokens,
            preempted=self._preempted,
            binding=binding(
                waiting=waiting,
                running=num_running,
                max_running=self._max_running,
                is_full=scheduler.running_batch.batch_is_full,
                has_chunk=scheduler.chunked_req is not None,
            ),
        )
        self._preempted = []

    def _tell_rows(self, step: int, rows: Rows) -> None:
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
        self.probe.slices(
            step,
            requests=rows.requests,
            phases=rows.phases,
            tokens=rows.tokens,
            contexts=rows.contexts,
            flags=rows.flags,
            sampled=rows.sampled,
            proposed=rows.proposed,
            accepted=rows.accepted,
        )

    @staticmethod
    def _is_speculative(batch: Any) -> bool:
        """Tell whether a batch decodes by drafts: how far it gets is known with its result."""
        return batch.forward_mode.is_decode() and not batch.spec_algorithm.is_none()

    # --- the model ----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The model worker is called; a speculative one calls others, whose time is in its own."""
        self._depth += 1
        forward = self._forward
        if self._depth > 1 or forward is None or forward.is_over:
            return
        is_graph = self._padded(forward) > 0
        kind = (forward.mode, is_graph)
        is_cold = kind not in self._seen_kinds
        self._seen_kinds.add(kind)
        self.probe.start(
            forward.step,
            mode="graph" if is_graph else "eager",
            cold=is_cold,
            dummy=forward.is_dummy,
        )

    def forward_ends(self) -> None:
        """The model worker returns: outputs are there on a CPU, queued on a device."""
        self._depth -= 1
        forward = self._forward
        if self._depth == 0 and forward is not None and not forward.is_over:
            forward.is_over = True
            self.probe.stop(forward.step, padded_tokens=self._padded(forward))

    def _padded(self, forward: Forward) -> int:
        """Return the captured size that a decoding batch is padded to, 0 where none is used."""
        if forward.mode == "DECODE":
            for size in self._graph_sizes:
                if size >= forward.batch_size:
                    return size
        return 0

    # --- results ------------------------------------------------------------------------------

    def result_begins(self, batch: Any) -> None:
        """The result of a batch is looked at: with overlap, of the one before the last launched."""
        self._result_step = -1 if batch.forward_iter is None else batch.forward_iter
        self._has_streamed = False
        if self._result_step in self._verified:
            self._before = [
                (request, request.seqlen - 1, len(request.output_ids)) for request in batch.reqs
            ]

    def result_ends(self, batch: Any, result: Any) -> None:
        """All of a result's tokens are known; tell what was not streamed, and verified rows."""
        mode = self._verified.pop(self._result_step, None)
        if mode is not None:
            self._tell_rows(
                self._result_step,
                rows_of(mode, self._verified_parts(result), is_verified=True),
            )
        if not self._has_streamed:
            self.emitting(batch.reqs)
        self._result_step, self._before = -1, []

    def _verified_parts(self, result: Any) -> list[Part]:
        stride = result.speculative_output_stride or result.speculative_num_draft_tokens or 1
        parts = []
        for request, context, num_before in self._before:
            followed = getattr(request, MARK, None)
            if followed is not None:
                num_new = len(request.output_ids) - num_before
                parts.append(
                    Part(
                        followed.index,
                        context,
                        stride,
                        len(request.origin_input_ids),
                        sampled=stride,
                        accepted=max(0, num_new - result.num_non_draft_tokens_per_req),
                    )
                )
        return parts

    def emitting(self, requests: Sequence[Any]) -> None:
        """Tell the tokens that are about to leave, and who has ended."""
        self._has_streamed = True
        if not self._is_core:
            return
        indices, counts, ended = [], [], []
        for request in requests:
            followed = getattr(request, MARK, None)
            if followed is None or followed.has_ended:
                continue
            num_out = request.finished_len
            if num_out is None:
                num_out = len(request.output_ids)
            if num_out > followed.num_emitted:
                indices.append(followed.index)
                counts.append(num_out - followed.num_emitted)
                followed.num_emitted = num_out
            if request.finished_reason is not None:
                ended.append((followed, request.finished_reason))
        if indices:
            self.probe.emitted(indices, counts, step=self._result_step)
        for followed, reason in ended:
            self._finish(followed, finish_of_json(reason.to_json(), has_run=followed.has_run))
