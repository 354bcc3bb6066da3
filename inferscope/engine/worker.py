"""A worker: a process that holds the weights and the KV pool, and runs what another one plans.

It keeps its own picture of the seated requests and runs the same `Runner` as an engine in one
process. Its ring holds the spans of the steps, the loop's all else; they meet by the number of the
step, which rides on the message, and by the digest of what was computed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec
import torch

from inferscope.engine.capacity import pool_blocks
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe_model, load_model
from inferscope.engine.remote import (
    Done,
    Part,
    Ready,
    Refused,
    Seated,
    Setting,
    Work,
    decode_work,
    encode,
)
from inferscope.engine.request import Request
from inferscope.engine.runner import Runner
from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.weights import dtype_name
from inferscope.errors import InferScopeError
from inferscope.probe import Probe
from inferscope.records import RequestIndex


class Worker:
    """Runs the work that comes, on its own picture of the seated requests."""

    def __init__(self, runner: Runner, probe: Probe) -> None:
        self._runner = runner
        self._probe = probe
        self._by_seat: dict[int, Request] = {}
        self._prefill_end: dict[int, int] = {}
        """By seat: where decoding begins, or goes on after a preemption."""

    def run(self, work: Work) -> Done:
        """Run one step."""
        admitted = [self._seat(seated) for seated in work.seated]
        slices = [self._slice(part) for part in work.parts]
        plan = Plan(
            slices=slices,
            num_tokens=sum(part.num_tokens for part in slices),
            admitted=admitted,
            preempted=[],
            binding="none",
        )

        def launched() -> None:
            self._probe.sign(
                work.step,
                requests=[part.request.index for part in slices],
                tokens=[part.num_tokens for part in slices],
                prefill_tokens=sum(map(self._prefill_tokens, slices)),
            )

        sampled, tokens = self._runner.run(work.step, plan, self._probe, launched)
        place_of = {part.request.seat: place for place, part in enumerate(slices)}
        for part, token in zip(sampled, tokens, strict=True):
            part.request.tokens.append(token)
        return Done([place_of[part.request.seat] for part in sampled], tokens)

    def _prefill_tokens(self, part: Slice) -> int:
        left = self._prefill_end[part.request.seat] - part.context
        return max(0, min(part.num_tokens, left))

    def _seat(self, seated: Seated) -> Request:
        # Who comes back has computed all but the last token before.
        self._prefill_end[seated.seat] = max(seated.num_prompt, len(seated.tokens) - 1)
        request = self._by_seat[seated.seat] = Request(
            index=RequestIndex(seated.index),
            request_id="",
            tokens=seated.tokens,
            num_prompt=seated.num_prompt,
            max_tokens=seated.sampling.max_tokens,
            sampling=seated.sampling,
            stop_ids=frozenset(seated.stop_ids),
            seed=seated.seed,
            seat=seated.seat,
        )
        return request

    def _slice(self, part: Part) -> Slice:
        request = self._by_seat[part.seat]
        request.blocks += part.blocks
        return Slice(
            request=request,
            context=part.context,
            num_tokens=part.num_tokens,
            is_sampled=part.is_sampled,
        )


def main() -> int:
    """Run until the step loop's end of the pipe is closed; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us by the pipe
    pipe = Connection(int(sys.argv[1]))
    setting = msgspec.json.decode(sys.argv[2], type=Setting)
    options = setting.options
    torch.set_num_threads(options.num_threads)
    try:
        model = load_model(setting.model, options)
        num_blocks = pool_blocks(model, options)
    except InferScopeError as error:
        pipe.send_bytes(encode(Refused(str(error))))
        return error.exit_code
    runner = Runner.of(model, options, num_blocks=num_blocks)
    options = replace(options, num_blocks=num_blocks)  # as the step loop describes it
    info = describe_model(model, options, name=setting.model, num_blocks=num_blocks)
    probe = Probe.open(info, role="worker", timer=step_timer(model.device))
    ready = Ready(
        model.config, dtype_name(model.dtype), str(model.device), model.num_positions, num_blocks
    )
    pipe.send_bytes(encode(ready))
    worker = Worker(runner, probe)
    with contextlib.suppress(EOFError, OSError):  # the step loop is gone
        while True:
            work = decode_work(pipe.recv_bytes())
            try:
                done: Done | Refused = worker.run(work)
            except Exception as error:  # it costs the requests of the step, not the worker
                done = Refused(f"{type(error).__name__}: {error}")
            pipe.send_bytes(encode(done))
    probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
