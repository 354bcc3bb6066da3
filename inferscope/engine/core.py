"""The step loop: read submissions, plan, run and commit steps, record them.

    front-end threads ──submit, cancel──> inbox ──┐
                                                  v
    deliver(outputs) <── commit <── run <── plan <── step()

All state belongs to the thread that calls `step`: the engine's own thread after `start`, or the
caller's. Only the inbox is shared, under one condition on which the thread sleeps while it has no
work. Goal: 150 us per step of 32 decodes for everything except the forward pass, sampling and the
probe. It is missed (benchmarks/engine_host_cost.py).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from inferscope.engine.capacity import max_model_tokens, pool_blocks
from inferscope.engine.config import EngineOptions
from inferscope.engine.disagg import KvHandle, Outbox, ReceivedKv
from inferscope.engine.forensics import CacheForensics
from inferscope.engine.kv import ROOT, BlockPool, Chain
from inferscope.engine.model import Model, Outline
from inferscope.engine.remote import WorkerLost
from inferscope.engine.request import (
    BadRequest,
    Finish,
    PromptKeys,
    QueueFull,
    Request,
    Sampling,
    Submission,
    TokenLogprobs,
    check_prompt,
    check_stop_ids,
)
from inferscope.engine.runner import Collect, Runner, StepRunner
from inferscope.engine.scheduler import Plan, Scheduler
from inferscope.engine.segments import StepColumns, draft_columns, step_columns
from inferscope.engine.speculative import UNKNOWN, NgramIndex
from inferscope.engine.stats import EngineStats
from inferscope.errors import InferScopeError
from inferscope.probe import Deferred, Probe
from inferscope.records import RequestIndex

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 10
"""Number of consecutive failed steps after which the loop ends: the engine is at fault."""
_SWEEP_S = 0.1
"""Seconds between looks for shared KV that was read, while the loop has no work."""
_STALLED_S = 0.005
"""Seconds between those looks while prompts wait for shared memory."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """Result of one step for one request; `finish` is set on its last step.

    A prefill engine also sets `kv` then: the shared memory that holds the prompt's KV.
    `logprobs` has an entry for each token if the request asks for log probabilities, else none.
    """

    request: Request
    tokens: list[int]
    finish: Finish | None
    kv: KvHandle | None = None
    logprobs: list[TokenLogprobs] = []


Deliver: TypeAlias = Callable[[list[Output]], None]


class _Rejection(msgspec.Struct, frozen=True, gc=False):
    """A rejected submission, without its prompt, whose size is not bounded."""

    request_id: str
    num_prompt: int
    external_id: str | None
    parent: str
    arrived_ns: int
    finish: Finish


class _Cancellation(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    reason: Finish


class _Flight(msgspec.Struct, frozen=True, gc=False):
    """A launched step whose outputs are not committed."""

    step: int
    plan: Plan
    collect: Collect


class Engine:
    """Engine that serves requests on one model."""

    def __init__(
        self,
        model: Model | Outline,
        options: EngineOptions,
        *,
        probe: Probe | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """Set up the engine on a model, or on an outline and a runner.

        Args:
            model: Model to run, or outline of the runner's model.
            options: Options of the engine.
            probe: Probe that records the loop; it can be set until the first step.
            runner: Runner of the steps, with a pool of `options.num_blocks`; None runs `model` in
                this thread.
        """
        self.model = model
        self.options = options
        self.probe = Probe.disabled() if probe is None else probe
        self._deferred = Deferred(Probe.disabled())
        num_blocks = options.num_blocks if runner is not None else pool_blocks(model, options)
        assert num_blocks is not None, "a runner has a pool of its own"
        self.max_model_tokens = max_model_tokens(model, options, num_blocks)
        self.pool = BlockPool(num_blocks, block_tokens=options.block_tokens)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=options.token_budget,
            max_running=options.max_running,
            prefix_cache=options.prefix_cache,
        )
        if runner is None:
            assert isinstance(model, Model), "an outline cannot be run here"
            runner = Runner.of(model, options, num_blocks=num_blocks)
        self._runner = runner
        self.outbox: Outbox | None = None
        self._is_stalled = False
        if options.role == "prefill":
            assert isinstance(runner, Runner), "a worker's KV cannot be shared"
            self.outbox = Outbox(
                runner.read_kv,
                token_bytes=model.kv_token_bytes,
                capacity_bytes=num_blocks * options.block_tokens * model.kv_token_bytes,
            )
            self.scheduler.may_admit = self._can_share
        self._end_of_thinking = options.end_of_thinking
        if self._end_of_thinking is None:
            self._end_of_thinking = model.config.end_of_thinking
        self._requests: dict[str, Request] = {}
        self._has_draft_model = options.speculative == "draft"
        self._step = int(self._has_draft_model)
        self._flights: deque[_Flight] = deque()
        self._num_failed = 0
        self._totals = EngineStats()
        self._ids = itertools.count()
        self._wake = threading.Condition()
        self._inbox: list[Submission | _Rejection | _Cancellation] = []
        self._num_submitted = 0
        self._num_enqueued = 0
        self._live_ids: set[str] = set()
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    # --- from any thread ----------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        *,
        request_id: str | None = None,
        external_id: str | None = None,
        parent: str = "",
        trace: str = "",
        received: ReceivedKv | None = None,
        cache_salt: str = "",
    ) -> str:
        """Submit a prompt and return the request's id; safe from any thread.

        Args:
            prompt: tokens of the prompt.
            sampling: sampling parameters; None is the default.
            request_id: id that no running request has; None generates one.
            external_id: the client's name of the request.
            parent: id of the first request of the same client call.
            trace: W3C trace context, if no front end records it.
            received: KV of the prompt from a prefill engine, without the last token's.
            cache_salt: text that a request must have in common to share its cached blocks; it is
                not recorded.

        Raises:
            BadRequest: the prompt is empty or too long, it or the stop tokens hold an id outside
                the vocabulary, or the request's id is in use.
            QueueFull: `max_waiting` requests are waiting.
            InferScopeError: the engine is closed or has failed.
        """
        arrived_ns = time.monotonic_ns()
        sampling = sampling or Sampling()
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        # Before the lock, for which the step loop may wait.
        block_keys = self._block_keys(prompt, cache_salt or ROOT)
        with self._wake:
            if self._failure is not None or self._is_closing:
                raise InferScopeError(
                    f"the engine is stopped ({self._failure or 'closed'}). Start it again."
                )
            if request_id in self._live_ids:
                # Not recorded: a rejection under this id would end the running request in the
                # records.
                raise BadRequest(f"request id {request_id!r} is in use. Choose another.")
            self._wake.notify()
            try:
                self._check(prompt, sampling)
            # No `as error`: an error referenced by its own frame stays until garbage collection.
            except QueueFull:
                self._inbox.append(
                    _Rejection(request_id, len(prompt), external_id, parent, arrived_ns, "shed")
                )
                raise
            except InferScopeError:
                self._inbox.append(
                    _Rejection(request_id, len(prompt), external_id, parent, arrived_ns, "rejected")
                )
                raise
            self._num_submitted += 1
            self._live_ids.add(request_id)
            self._inbox.append(
                Submission(
                    request_id=request_id,
                    prompt=list(prompt),
                    sampling=sampling,
                    external_id=external_id,
                    parent=parent,
                    trace=trace,
                    received=received,
                    arrived_ns=arrived_ns,
                    cache_salt=cache_salt,
                    block_keys=block_keys,
                )
            )
        return request_id

    def cancel(self, request_id: str, reason: Finish = "client_cancel") -> None:
        """End a request early; safe from any thread, and without effect after its end."""
        with self._wake:
            self._inbox.append(_Cancellation(request_id, reason))
            self._wake.notify()

    def start(self, deliver: Deliver) -> None:
        """Start the loop in a thread that calls `deliver` once per step with outputs."""
        assert self._thread is None, "start() called twice"
        self._thread = threading.Thread(
            target=self._loop, args=(deliver,), name="inferscope-engine", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the loop and abort unfinished requests; safe to call twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is None:
            self._abort("server_abort")
        else:
            self._thread.join()
        if self.outbox is not None:
            self.outbox.close()
        self._runner.close()

    def stats(self) -> EngineStats:
        """Return the engine's counters; safe from any thread."""
        return msgspec.structs.replace(
            self._totals,
            finished=dict(self._totals.finished),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + self._num_submitted,
            blocks_used=self.pool.num_used,
            blocks_cached=self.pool.num_cached,
            blocks_total=self.pool.num_blocks,
            block_tokens=self.pool.block_tokens,
        )

    @property
    def failure(self) -> Exception | None:
        """Error that ended the loop; None before, and after `close`."""
        return self._failure

    # --- from the loop ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a message, a request or a launched step is pending."""
        return bool(self._inbox or self._requests or self._flights)

    def step(self) -> list[Output]:
        """Run one step and return the outputs of its requests.

        With overlap, launch one step and return the outputs of the one before. If a step raises,
        its requests end with an error. A prefill engine runs none while shared memory has no room.

        Raises:
            WorkerLost: the worker has exited; no further step can run.
            InferScopeError: too many steps in a row have failed.
        """
        if self._deferred.probe is not self.probe:
            self._begin_recording()
        outputs = self._take_inbox()
        if self.outbox is not None:
            self.outbox.sweep()
        if self._flights and not self.scheduler.has_room:
            outputs += self._commit()
        start_ns = time.monotonic_ns()
        plan = self.scheduler.schedule()
        end_ns = time.monotonic_ns()
        self._is_stalled = bool(self._requests) and not (self._flights or plan.slices)
        assert not self._is_stalled or self.outbox is not None, (
            "requests are waiting and none can run"
        )
        if plan.slices:
            self._deferred.add(start_ns, self._record_plan, self._step, plan, start_ns, end_ns)
            if not self._runner.is_asynchronous:
                self._deferred.flush()
            outputs += self._launch(plan)
            self._step += 1 + self._has_draft_model
        # With overlap the step just launched is committed after the next launch.
        while len(self._flights) > (self.options.overlap and bool(plan.slices)):
            outputs += self._commit()
        if not (
            self._runner.is_asynchronous and self.has_work
        ):  # else flushed after the next launch
            self._deferred.flush()
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Serve prompts to completion in this thread; return the output tokens of each.

        Raises:
            InferScopeError: a step failed.
        """
        assert self._thread is None, "generate() beside a running loop"
        request_ids = [self.submit(prompt, sampling) for prompt in prompts]
        tokens_by_id: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        while self.has_work:
            for output in self.step():
                if output.finish == "error":
                    self._abort("error")
                    raise InferScopeError("a step failed. See its error in the log.")
                tokens_by_id[output.request.request_id] += output.tokens
        return [tokens_by_id[request_id] for request_id in request_ids]

    # --- internals ----------------------------------------------------------------------------

    def _can_share(self, request: Request) -> bool:
        """Return whether shared memory has room for a prompt's KV beside that of running ones."""
        assert self.outbox is not None
        prompts = [each.num_prompt for each in self.scheduler.running]
        return self.outbox.has_room([*prompts, request.num_prompt])

    def _begin_recording(self) -> None:
        """Record by the probe that is set now."""
        self._deferred.probe = self.probe
        self.probe.look_after(self._deferred.flush_overdue)
        self.scheduler.forensics = self.pool.observer = CacheForensics.of(
            self.probe,
            block_tokens=self.pool.block_tokens,
            num_blocks=self.pool.num_blocks,
            is_enabled=self.options.prefix_cache,
        )

    def _block_keys(self, prompt: Sequence[int], root: Chain) -> PromptKeys | None:
        """Return the keys of a prompt's blocks; None if they are not needed, or it is rejected."""
        forensics = self.scheduler.forensics
        if forensics is None or len(prompt) >= self.max_model_tokens:
            return None
        try:
            return forensics.keys_of(prompt, root=root)
        except (TypeError, ValueError, OverflowError):  # no token IDs
            return None

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        vocab = self.model.config.vocab
        check_prompt(prompt, max_model_tokens=self.max_model_tokens, vocab=vocab)
        check_stop_ids(sampling, vocab=vocab)
        if self.outbox is not None and len(prompt) == 1:
            raise BadRequest(
                "a prefill engine hands over the KV of all tokens but the last, and this prompt "
                "has 1 token. Send it to the decode engine."
            )
        if self._num_submitted + len(self.scheduler.waiting) >= self.options.max_waiting:
            raise QueueFull(
                f"{self.options.max_waiting} requests are waiting. Try again later, or raise "
                "max_waiting."
            )

    def _take_inbox(self) -> list[Output]:
        if not self._inbox:
            return []
        with self._wake:
            messages, self._inbox = self._inbox, []
            self._num_submitted = 0
        outputs: list[Output] = []
        for message in messages:
            if isinstance(message, Submission):
                self._enqueue(message)
            elif isinstance(message, _Rejection):
                self._record_rejection(message)
            elif message.request_id in self._requests:
                request = self._requests[message.request_id]
                self._finish(request, message.reason)
                outputs.append(Output(request, [], message.reason))
        return outputs

    def _enqueue(self, submission: Submission) -> None:
        sampling, config = submission.sampling, self.model.config
        index = self.probe.queued(
            submission.request_id,
            prompt_tokens=len(submission.prompt),
            external_id=submission.external_id,
            parent=submission.parent,
            trace=submission.trace,
            at_ns=submission.arrived_ns,
        )
        if (received := submission.received) is not None:
            self.probe.transferred(
                index,
                received.handle.num_bytes,
                start_ns=received.handle.asked_ns,
                end_ns=received.end_ns,
                peer=received.handle.engine_id,
                peer_request_id=received.handle.request_id,
            )
        own_stops = () if sampling.ignore_eos else config.eos_token_ids
        seed = self.options.seed + self._num_enqueued if sampling.seed is None else sampling.seed
        self._num_enqueued += 1
        request = Request(
            index=index,
            request_id=submission.request_id,
            num_prompt=len(submission.prompt),
            tokens=submission.prompt,
            max_tokens=min(sampling.max_tokens, self.max_model_tokens - len(submission.prompt)),
            sampling=sampling,
            stop_ids=frozenset(sampling.stop_token_ids).union(own_stops),
            seed=seed,
            ngrams=NgramIndex() if self.options.speculative == "ngram" else None,
            received=submission.received,
            root=submission.cache_salt or ROOT,
            block_keys=submission.block_keys,
        )
        self._requests[request.request_id] = request
        self.scheduler.enqueue(request)

    def _record_rejection(self, rejection: _Rejection) -> None:
        index = self.probe.queued(
            rejection.request_id,
            prompt_tokens=rejection.num_prompt,
            external_id=rejection.external_id,
            parent=rejection.parent,
            at_ns=rejection.arrived_ns,
        )
        self.probe.finished(index, rejection.finish)
        self._totals.finished[rejection.finish] += 1

    def _record_plan(self, step: int, plan: Plan, start_ns: int, end_ns: int) -> None:
        probe, pool, totals = self.probe, self.pool, self._totals
        totals.steps += 1
        totals.preemptions += len(plan.preempted)
        for request in plan.preempted:
            probe.preempted(request.index, reason="blocks", at_ns=end_ns)
        for request in plan.admitted:
            if request.has_run:
                probe.resumed(request.index, cached_tokens=request.computed, at_ns=end_ns)
            else:
                request.has_run = True
                totals.prompt_tokens += request.num_prompt
                totals.cached_tokens += request.cached_tokens
                cached = request.cached_tokens
                probe.admitted(request.index, cached_tokens=cached, at_ns=end_ns)
                if self.scheduler.forensics is not None:
                    self.scheduler.forensics.admitted(request)
        probe.plan(
            step,
            start_ns=start_ns,
            end_ns=end_ns,
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_total=pool.num_blocks,
            preempted=[request.index for request in plan.preempted],
            binding=plan.binding,
        )
        if self._has_draft_model and probe.on:
            self._record_columns(step - 1, draft_columns(plan.slices))

    def _record_slices(self, step: int, plan: Plan) -> None:
        if self.probe.on:
            self._record_columns(step, step_columns(plan.slices))

    def _record_columns(self, step: int, columns: StepColumns) -> None:
        self.probe.slices(
            step,
            requests=columns.requests,
            phases=columns.phases,
            tokens=columns.tokens,
            contexts=columns.contexts,
            flags=columns.flags,
            sampled=columns.sampled,
            proposed=columns.proposed,
            accepted=columns.accepted,
            digest=columns.digest,
        )

    def _record_emitted(
        self, step: int, indices: list[RequestIndex], tokens: list[int], at_ns: int
    ) -> None:
        self.probe.emitted(indices, tokens, step=step, at_ns=at_ns)

    def _record_finished(self, request: Request, reason: Finish, at_ns: int) -> None:
        end = self._end_of_thinking
        reasoning = None if end is None else request.reasoning_tokens(end)
        self.probe.finished(request.index, reason, at_ns=at_ns, reasoning_tokens=reasoning)

    def _launch(self, plan: Plan) -> list[Output]:
        """Launch a step; return the outputs of its requests if that failed."""
        step = self._step
        try:
            collect = self._runner.launch(step, plan, self.probe)
        except WorkerLost:
            raise
        except Exception as error:
            return self._fail(step, plan, error)
        self._flights.append(_Flight(step, plan, collect))
        if not plan.has_drafts:  # else recorded when it is known which are accepted
            self._deferred.add(time.monotonic_ns(), self._record_slices, step, plan)
        if self._runner.is_asynchronous:
            self._deferred.flush_hidden()
        else:
            self._deferred.flush()
        if self.options.overlap:
            for part in plan.slices:
                self.scheduler.assume(part)
        return []

    def _commit(self) -> list[Output]:
        """Wait for the oldest launched step and return the outputs of its requests."""
        flight = self._flights.popleft()
        step, plan = flight.step, flight.plan
        try:
            sampled, tokens = flight.collect()
        except WorkerLost:
            raise
        except Exception as error:
            return self._fail(step, plan, error)
        self._num_failed = 0
        outputs = [
            _append(part.request, added)
            for part, added in zip(sampled, tokens, strict=True)
            if not part.request.has_ended  # else its tokens are discarded
        ]
        if plan.has_drafts and self.probe.on:  # before the requests advance
            columns = step_columns(plan.slices)
            self._deferred.add(time.monotonic_ns(), self._record_columns, step, columns)
        for part in plan.slices:
            if not part.request.has_ended:
                self.scheduler.advance(part)
        if self.outbox is not None:
            outputs = [_with_kv(output, self.outbox) for output in outputs]
        if outputs:
            indices = [output.request.index for output in outputs]
            counts = [len(output.tokens) for output in outputs]
            self._totals.generated_tokens += sum(counts)
            at_ns = time.monotonic_ns()
            self._deferred.add(at_ns, self._record_emitted, step, indices, counts, at_ns)
        for output in outputs:
            if output.finish is not None:
                self._finish(output.request, output.finish)
            elif self.options.speculative is not None:
                self._propose(output.request)
        return outputs

    def _propose(self, request: Request) -> None:
        """Set a request's draft, which ends one token before its output does."""
        num_left = request.max_tokens - request.num_output - 1
        num = min(self.options.num_speculative_tokens, num_left)
        if request.ngrams is not None:
            request.draft = request.ngrams.propose(request.tokens, num)
        elif self._has_draft_model:
            request.draft = [UNKNOWN] * num  # until the plan has given them blocks

    def _fail(self, step: int, plan: Plan, error: Exception) -> list[Output]:
        """End the requests of a failed step; the other requests continue.

        Raises:
            InferScopeError: too many steps in a row have failed.
        """
        requests = [part.request for part in plan.slices if not part.request.has_ended]
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._num_failed += 1
        self._totals.failed_steps += 1
        logger.error(
            "step %d failed; its %d requests end with an error: %s",
            step, len(requests), reason, exc_info=logger.isEnabledFor(logging.DEBUG),
        )  # fmt: skip
        if self._num_failed == _MOST_FAILED_STEPS:
            raise InferScopeError(
                f"{_MOST_FAILED_STEPS} steps in a row failed, the last one with {reason}. "
                "Start the server again."
            ) from error
        for request in requests:
            self._finish(request, "error")
        return [Output(request, [], "error") for request in requests]

    def _finish(self, request: Request, reason: Finish) -> None:
        self.scheduler.remove(request)
        request.has_ended = True
        if request.received is not None:
            request.received.discard()
        del self._requests[request.request_id]
        self._live_ids.discard(request.request_id)
        self._totals.finished[reason] += 1
        at_ns = time.monotonic_ns()
        self._deferred.add(at_ns, self._record_finished, request, reason, at_ns)

    def _abort(self, reason: Finish) -> list[Output]:
        outputs = self._take_inbox()
        for request in list(self._requests.values()):
            self._finish(request, reason)
            outputs.append(Output(request, [], reason))
        self._deferred.flush()
        return outputs

    def _loop(self, deliver: Deliver) -> None:
        reason: Finish = "server_abort"
        try:
            while self._wait_for_work():
                outputs = self.step()
                if outputs:
                    deliver(outputs)
        except Exception as error:
            logger.error(
                "the engine's loop failed; it accepts no further requests: %s", error,
                exc_info=not isinstance(error, InferScopeError),
            )  # fmt: skip
            with self._wake:
                self._failure = error
            reason = "error"
        try:
            deliver(self._abort(reason))
        except Exception:
            logger.exception("the last outputs could not be delivered")

    def _wait_for_work(self) -> bool:
        """Wait for work; return False when the engine is closing."""
        if self.has_work and not self._is_stalled and not self._is_closing:
            return True
        with self._wake:
            if self._is_stalled:
                self._wake.wait(_STALLED_S)
            while not (self.has_work or self._is_closing):
                shared = self.outbox is not None and self.outbox.num_bytes
                self._wake.wait(_SWEEP_S if shared else None)
                if self.outbox is not None:
                    self.outbox.sweep()
            return not self._is_closing


def _append(request: Request, tokens: list[int]) -> Output:
    """Append a step's tokens to a request, up to the one that ends it."""
    for num, token in enumerate(tokens, 1):
        request.take_token(token)
        finish = request.finish_after(token)
        if finish is not None:
            return Output(request, tokens[:num], finish, logprobs=request.logprobs[:num])
    return Output(request, tokens, None, logprobs=request.logprobs[: len(tokens)])


def _with_kv(output: Output, outbox: Outbox) -> Output:
    """Share the prompt's KV of a request that has finished; it fails alone without memory."""
    request = output.request
    if output.finish is None:
        return output
    # The receiver computes the last token itself: the next one is sampled from its logits.
    kv = outbox.share(request.request_id, request.blocks, request.num_prompt - 1)
    return Output(request, output.tokens, "error" if kv is None else output.finish, kv)
