"""The worker: a process that holds the weights and the KV pool, and runs the step loop's plans.

With tensor or pipeline parallelism there are several, each with its part of both; all get the same
plans and sample the same tokens.

It mirrors the admitted requests and uses the same `Runner` as an in-process engine. Its ring holds
the step spans; the step loop's ring holds all other records. The step number in each message and
the digest of the computed slices join the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec
import torch

from inferscope.engine.capacity import pool_blocks
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe_model, load_model
from inferscope.engine.model import Model, outline_of
from inferscope.engine.parallel import Place, RankGroup
from inferscope.engine.remote import (
    AdmittedRequest,
    Done,
    Ready,
    SliceSpec,
    StepWork,
    WorkerFailure,
    WorkerSettings,
    decode_work,
    encode,
)
from inferscope.engine.request import Request
from inferscope.engine.runner import Runner
from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.segments import draft_columns
from inferscope.engine.weights import dtype_name
from inferscope.errors import InferScopeError
from inferscope.probe import Probe
from inferscope.records import RequestIndex

_LINGER_S = 5.0
"""Seconds to finish a step and close the ring after the step loop has exited."""


class Worker:
    """Executor of step work on a mirror of the admitted requests."""

    def __init__(self, runner: Runner, probe: Probe, *, has_draft_model: bool = False) -> None:
        self._runner = runner
        self._has_draft_model = has_draft_model
        self._probe = probe
        self._by_sequence_slot: dict[int, Request] = {}
        self._prefill_end: dict[int, int] = {}
        """Position of the first decode by sequence slot, counted anew after a preemption."""

    def run(self, work: StepWork) -> Done:
        """Run one step and return its sampled tokens."""
        admitted = [self._admit(admitted) for admitted in work.admitted]
        slices = [self._slice(part) for part in work.slices]
        plan = Plan(
            slices=slices,
            num_tokens=sum(part.num_tokens for part in slices),
            admitted=admitted,
            preempted=[],
            binding="none",
        )
        if self._has_draft_model:  # signed ahead: the step's start writes the span before it
            draft = draft_columns(slices)
            self._probe.sign(
                work.step - 1, requests=draft.requests, tokens=draft.tokens, prefill_tokens=0
            )
        collect = self._runner.launch(work.step, plan, self._probe)
        self._probe.sign(
            work.step,
            requests=[part.request.index for part in slices],
            tokens=[part.num_tokens for part in slices],
            prefill_tokens=sum(map(self._prefill_tokens, slices)),
            waited_ns=self._runner.waited_ns,
        )
        sampled, tokens = collect()
        index_of = {part.request.sequence_slot: place for place, part in enumerate(slices)}
        for part, added in zip(sampled, tokens, strict=True):
            part.request.tokens += added
        indices = [index_of[part.request.sequence_slot] for part in sampled]
        logprobs = {
            index: part.request.logprobs[: len(added)]
            for index, part, added in zip(indices, sampled, tokens, strict=True)
            if part.request.logprobs
        }
        return Done(indices, tokens, logprobs)

    def _prefill_tokens(self, part: Slice) -> int:
        left = self._prefill_end[part.request.sequence_slot] - part.context
        return max(0, min(part.num_tokens, left))

    def _admit(self, admitted: AdmittedRequest) -> Request:
        # A resumed request had computed all tokens but the last.
        self._prefill_end[admitted.sequence_slot] = max(
            admitted.num_prompt, len(admitted.tokens) - 1
        )
        request = self._by_sequence_slot[admitted.sequence_slot] = Request(
            index=RequestIndex(admitted.index),
            request_id="",
            tokens=admitted.tokens,
            num_prompt=admitted.num_prompt,
            max_tokens=admitted.sampling.max_tokens,
            sampling=admitted.sampling,
            stop_ids=frozenset(admitted.stop_ids),
            seed=admitted.seed,
            sequence_slot=admitted.sequence_slot,
        )
        return request

    def _slice(self, part: SliceSpec) -> Slice:
        request = self._by_sequence_slot[part.sequence_slot]
        request.blocks += part.blocks
        request.draft = part.draft
        # With overlap the step before may have failed: its request has ended, and any token serves.
        num_known = part.context + part.num_tokens - len(part.draft)
        request.tokens += [0] * (num_known - len(request.tokens))
        return Slice(
            request=request,
            context=part.context,
            num_tokens=part.num_tokens,
            is_sampled=part.is_sampled,
            num_drafts=len(part.draft),
        )


def main() -> int:
    """Run until the step loop closes its end of the pipe; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by the pipe
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=_exit_after, args=(pipe.fileno(),), daemon=True).start()
    settings = msgspec.json.decode(sys.argv[2], type=WorkerSettings)
    options = settings.options
    torch.set_num_threads(options.num_threads)
    place = Place.of(settings.rank, options)
    try:
        model = load_model(settings.model, options, place)
        num_blocks = pool_blocks(model, options)
        if place.num_ranks > 1:
            group = RankGroup(place, settings.meeting)
            model, num_blocks = replace(model, group=group), group.least(num_blocks)
    except InferScopeError as error:
        pipe.send_bytes(encode(WorkerFailure(str(error))))
        return error.exit_code
    runner = Runner.of(model, options, num_blocks=num_blocks)
    options = replace(options, num_blocks=num_blocks)  # as in the step loop's own description
    info = describe_model(
        outline_of(model), options, name=settings.model, num_blocks=num_blocks, place=place
    )
    probe = Probe.open(info, role="worker", rank=place.rank, timer=step_timer(model.device))
    serve(pipe, model, runner, probe, num_blocks=num_blocks)
    probe.close()
    return 0


def _exit_after(handle: int) -> None:
    """Exit some time after the step loop has, even from a collective without the other ranks."""
    hangup = select.poll()
    hangup.register(handle, select.POLLRDHUP)
    hangup.poll()
    time.sleep(_LINGER_S)
    os._exit(1)


def serve(pipe: Connection, model: Model, runner: Runner, probe: Probe, *, num_blocks: int) -> None:
    """Report a loaded model and run the step loop's work, until its end of the pipe is closed."""
    outline = outline_of(model)
    ready = Ready(
        outline.config,
        dtype_name(outline.dtype),
        str(outline.device),
        outline.num_positions,
        outline.kv_token_bytes,
        num_blocks,
    )
    worker = Worker(runner, probe, has_draft_model=model.draft is not None)
    with contextlib.suppress(EOFError, OSError):  # the step loop has exited
        pipe.send_bytes(encode(ready))
        while True:
            work = decode_work(pipe.recv_bytes())
            try:
                done: Done | WorkerFailure = worker.run(work)
            except Exception as error:  # only the requests of the step end
                done = WorkerFailure(f"{type(error).__name__}: {error}")
            pipe.send_bytes(encode(done))


if __name__ == "__main__":
    sys.exit(main())
