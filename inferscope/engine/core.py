"""The step loop: take what front ends handed in, plan, run, commit, tell the probe.

    front-end threads ──submit, cancel──> inbox ──┐
                                                  v
    deliver(outputs) <── commit <── run <── plan <── step()

All state belongs to whoever calls `step`: the engine's own thread after `start`, or the caller
itself. Only the inbox is shared, under one condition on which the thread sleeps when there is
nothing to do. Budget: 300 us per step of 64 decodes for all that is not the forward pass, the probe
left out.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from inferscope.engine.capacity import max_model_tokens, pool_blocks
from inferscope.engine.config import EngineOptions
from inferscope.engine.kv import BlockPool
from inferscope.engine.model import Model, Outline
from inferscope.engine.remote import WorkerLost
from inferscope.engine.request import (
    BadRequest,
    Finish,
    QueueFull,
    Request,
    Sampling,
    Submission,
    check_prompt,
    check_stop_ids,
)
from inferscope.engine.runner import Runner, StepRunner
from inferscope.engine.scheduler import Plan, Scheduler
from inferscope.engine.segments import rows_of
from inferscope.engine.stats import EngineStats
from inferscope.errors import InferScopeError
from inferscope.probe import Probe
from inferscope.probe.deferred import Deferred
from inferscope.records import RequestIndex

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 10
"""Consecutive failed steps after which the loop ends: the engine is broken, not a request."""


class Output(msgspec.Struct, frozen=True, gc=False):
    """What one step did for one request; `finish` says that it was the last."""

    request: Request
    tokens: list[int]
    finish: Finish | None


Deliver: TypeAlias = Callable[[list[Output]], None]


class _Rejection(msgspec.Struct, frozen=True, gc=False):
    """A submission that was refused, without its prompt, which may be as large as one likes."""

    request_id: str
    num_prompt: int
    external_id: str | None
    parent: str
    arrived_ns: int
    finish: Finish


class _Cancellation(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    reason: Finish


class Engine:
    """Serves requests on one model."""

    def __init__(
        self,
        model: Model | Outline,
        options: EngineOptions,
        *,
        probe: Probe | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """Take the model, or its outline and who runs it elsewhere.

        Args:
            model: What is run.
            options: How.
            probe: Observes the loop; it can be set until the first step.
            runner: Runs the steps, on a pool of `options.num_blocks`; None runs `model` in this
                thread.
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
        self._requests: dict[str, Request] = {}
        self._step = 0
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
    ) -> str:
        """Hand in a prompt and return the request's id; safe from any thread.

        Args:
            prompt: its tokens.
            sampling: how to choose the output.
            request_id: unique among those under way; None has one made.
            external_id: the client's own name for it.
            parent: the id of the request that this one was asked for together with.

        Raises:
            BadRequest: If the prompt is empty or too long, if it or the stop tokens hold an id
                outside the vocabulary, or if the request's id is in use.
            QueueFull: If `max_waiting` requests are waiting already.
            InferScopeError: If the engine is closed or has failed.
        """
        arrived_ns = time.monotonic_ns()
        sampling = sampling or Sampling()
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        with self._wake:
            if self._failure is not None or self._is_closing:
                raise InferScopeError(f"the engine is stopped ({self._failure or 'closed'}).")
            if request_id in self._live_ids:
                # Not recorded as rejected: the records would take it for the one that is running.
                raise BadRequest(f"request id {request_id!r} is in use. Choose another.")
            self._wake.notify()
            try:
                self._check(prompt, sampling)
            # Not by a name: an error that its own frame holds stays until a collection.
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
                    arrived_ns=arrived_ns,
                )
            )
        return request_id

    def cancel(self, request_id: str, reason: Finish = "client_cancel") -> None:
        """End a request early; safe from any thread, and harmless for one that has ended."""
        with self._wake:
            self._inbox.append(_Cancellation(request_id, reason))
            self._wake.notify()

    def start(self, deliver: Deliver) -> None:
        """Run the loop in a thread, which calls `deliver` once per step that has outputs."""
        assert self._thread is None, "start() called twice"
        self._thread = threading.Thread(
            target=self._loop, args=(deliver,), name="inferscope-engine", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the loop and abort what is unfinished. Safe to call twice."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is None:
            self._abort("server_abort")
        else:
            self._thread.join()
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
        )

    @property
    def failure(self) -> Exception | None:
        """What ended the loop, if it was not `close`."""
        return self._failure

    # --- from the loop ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._requests)

    def step(self) -> list[Output]:
        """Do one step and return what became of the requests in it.

        A step that raises costs the requests in it.

        Raises:
            WorkerLost: no step can be run any more.
            InferScopeError: too many steps in a row have failed.
        """
        if self._deferred.probe is not self.probe:
            self._deferred.probe = self.probe
            self.probe.look_after(self._deferred.flush_overdue)
        outputs = self._take_inbox()
        start_ns = time.monotonic_ns()
        plan = self.scheduler.schedule()
        end_ns = time.monotonic_ns()
        assert plan.slices or not self._requests, "requests are waiting and none can run"
        if plan.slices:
            self._deferred.add(start_ns, self._tell_plan, self._step, plan, start_ns, end_ns)
            if not self._runner.is_asynchronous:
                self._deferred.flush()
            try:
                outputs += self._run(plan)
                self._num_failed = 0
            except WorkerLost:
                raise
            except Exception as error:
                outputs += self._fail(plan, error)
            self._step += 1
        if not (self._runner.is_asynchronous and self.has_work):  # else behind the next launch
            self._deferred.flush()
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Serve prompts to their end in this thread; return each one's output tokens.

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
                    raise InferScopeError("a step failed; the log has its error.")
                tokens_by_id[output.request.request_id] += output.tokens
        return [tokens_by_id[request_id] for request_id in request_ids]

    # --- inside -------------------------------------------------------------------------------

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        vocab = self.model.config.vocab
        check_prompt(prompt, max_model_tokens=self.max_model_tokens, vocab=vocab)
        check_stop_ids(sampling, vocab=vocab)
        if self._num_submitted + len(self.scheduler.waiting) >= self.options.max_waiting:
            raise QueueFull(
                f"{self.options.max_waiting} requests are waiting. Try again later, or raise "
                "max_waiting."
            )

    def _take_inbox(self) -> list[Output]:
        if not self._inbox:
            return []
        with self._wake:
            taken, self._inbox = self._inbox, []
            self._num_submitted = 0
        outputs: list[Output] = []
        for message in taken:
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
            at_ns=submission.arrived_ns,
            prompt=submission.prompt,
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

    def _tell_plan(self, step: int, plan: Plan, start_ns: int, end_ns: int) -> None:
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

    def _tell_slices(self, step: int, plan: Plan) -> None:
        if self.probe.on:
            rows = rows_of(plan.slices)
            self.probe.slices(
                step,
                requests=rows.requests,
                phases=rows.phases,
                tokens=rows.tokens,
                contexts=rows.contexts,
                flags=rows.flags,
                sampled=rows.sampled,
            )

    def _tell_emitted(self, step: int, indices: list[RequestIndex], at_ns: int) -> None:
        self.probe.emitted(indices, [1] * len(indices), step=step, at_ns=at_ns)

    def _tell_finished(self, index: RequestIndex, reason: Finish, at_ns: int) -> None:
        self.probe.finished(index, reason, at_ns=at_ns)

    def _run(self, plan: Plan) -> list[Output]:
        step = self._step

        def launched() -> None:
            self._deferred.add(time.monotonic_ns(), self._tell_slices, step, plan)
            if self._runner.is_asynchronous:
                self._deferred.flush_hidden()
            else:
                self._deferred.flush()

        sampled, tokens = self._runner.run(step, plan, self.probe, launched)
        for part in plan.slices:
            self.scheduler.advance(part)
        outputs = []
        for part, token in zip(sampled, tokens, strict=True):
            part.request.tokens.append(token)
            outputs.append(Output(part.request, [token], part.request.finish_after(token)))
        self._totals.generated_tokens += len(outputs)
        if outputs:
            indices = [output.request.index for output in outputs]
            at_ns = time.monotonic_ns()
            self._deferred.add(at_ns, self._tell_emitted, step, indices, at_ns)
        for output in outputs:
            if output.finish is not None:
                self._finish(output.request, output.finish)
        return outputs

    def _fail(self, plan: Plan, error: Exception) -> list[Output]:
        """End the requests of a step that failed; the others go on.

        Raises:
            InferScopeError: too many steps in a row have failed.
        """
        requests = [part.request for part in plan.slices]
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._num_failed += 1
        self._totals.failed_steps += 1
        logger.error(
            "step %d failed and its %d requests end with an error: %s",
            self._step, len(requests), reason, exc_info=logger.isEnabledFor(logging.DEBUG),
        )  # fmt: skip
        if self._num_failed == _MOST_FAILED_STEPS:
            raise InferScopeError(
                f"{_MOST_FAILED_STEPS} steps in a row failed, the last one with {reason}. "
                "Start the server again."
            ) from error
        for request in requests:
            if request.request_id in self._requests:  # it may have ended before the failure
                self._finish(request, "error")
        return [Output(request, [], "error") for request in requests]

    def _finish(self, request: Request, reason: Finish) -> None:
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        self._live_ids.discard(request.request_id)
        self._totals.finished[reason] += 1
        at_ns = time.monotonic_ns()
        self._deferred.add(at_ns, self._tell_finished, request.index, reason, at_ns)

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
                "the engine's loop failed and accepts no more requests: %s", error,
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
        """Sleep until there is something to do; False when the engine is closing."""
        if self.has_work and not self._is_closing:
            return True
        with self._wake:
            self._wake.wait_for(lambda: self.has_work or self._is_closing)
            return not self._is_closing
