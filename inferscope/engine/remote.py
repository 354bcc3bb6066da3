"""Runner of steps in other processes, one for each rank: the step loop's side and the messages.

step loop ── StepWork ──> workers    admitted requests, slices, new blocks, drafts
step loop <── Done ── workers        sampled tokens, log probabilities: the same of each
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from inferscope.engine.config import DtypeName, EngineOptions, ModelConfig
from inferscope.engine.model import Outline
from inferscope.engine.request import Request, Sampling, TokenLogprobs
from inferscope.engine.runner import Collect, Ran
from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.weights import DTYPES
from inferscope.errors import BadInput, InferScopeError
from inferscope.probe import Probe

_GRACE_S = 10.0
_FAILURE_S = 5.0
"""Seconds for the other ranks to report a step that failed on one."""
_STDERR = 2


class WorkerLost(InferScopeError):
    """Error: the worker's process has exited."""


class StepFailed(InferScopeError):
    """Error: a step raised in the worker, which continues."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """Model and options of a worker."""

    model: str
    options: EngineOptions
    rank: int = 0
    meeting: str = ""
    """Path of the file by which the workers of several ranks find each other."""


class Ready(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """Message: the model is loaded."""

    config: ModelConfig
    dtype: DtypeName
    device: str
    num_positions: int
    kv_token_bytes: int
    num_blocks: int


class WorkerFailure(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """Message: loading the model failed, or a step raised."""

    message: str


class AdmittedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request admitted to a sequence slot, with its tokens and sampling."""

    sequence_slot: int
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    stop_ids: list[int]
    seed: int


class SliceSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's slice of a step."""

    sequence_slot: int
    context: int
    num_tokens: int
    is_sampled: bool
    blocks: list[int]
    """Blocks allocated to the request since its last slice."""
    draft: list[int]


class StepWork(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Message: a step to run."""

    step: int
    admitted: list[AdmittedRequest]
    slices: list[SliceSpec]


class Done(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Message: the tokens that a step's slices add, by the indices of the slices in the work."""

    slice_indices: list[int]
    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    """Log probabilities of the tokens by the index of the slice, of requests that ask for them."""


_FromWorker: TypeAlias = Ready | WorkerFailure | Done
encode = msgspec.msgpack.encode
decode_work = msgspec.msgpack.Decoder(StepWork).decode
_decode_message = msgspec.msgpack.Decoder(_FromWorker).decode


class _Worker(NamedTuple):
    """A worker's process and the pipe to it."""

    process: subprocess.Popen[bytes]
    pipe: Connection


class RemoteRunner:
    """Runner of steps in worker processes that it starts and ends."""

    is_asynchronous = True

    def __init__(self, model: str, options: EngineOptions) -> None:
        """Start the workers and wait until the model is loaded.

        Raises:
            BadInput: The model cannot be loaded.
            WorkerLost: A process exited first.
        """
        self._workers: list[_Worker] = []
        self._num_sent_blocks = [0] * options.max_running
        with TemporaryDirectory(prefix="inferscope-ranks-") as folder:
            for rank in range(options.num_ranks):
                settings = WorkerSettings(model, options, rank, f"{folder}/meeting")
                self._workers.append(_start_worker(settings))
            message = self._receive()
        if isinstance(message, WorkerFailure):
            self.close()
            raise BadInput(message.message)
        assert isinstance(message, Ready)
        self.num_blocks = message.num_blocks
        self.outline = Outline(
            message.config,
            DTYPES[message.dtype],
            torch.device(message.device),
            message.num_positions,
            message.kv_token_bytes,
        )

    @property
    def pids(self) -> list[int]:
        """Process IDs of the workers, by rank."""
        return [worker.process.pid for worker in self._workers]

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Launch a step in the workers, whose own probes time it.

        Raises:
            WorkerLost: A process has exited; collecting raises it too.
            StepFailed: The step raised; only collecting raises it.
        """
        for request in plan.admitted:
            self._num_sent_blocks[request.sequence_slot] = 0
        work = StepWork(
            step,
            [_admitted_request(r) for r in plan.admitted],
            [self._slice_spec(s) for s in plan.slices],
        )
        message = encode(work)
        worker = self._workers[0]
        try:
            for worker in self._workers:
                worker.pipe.send_bytes(message)
        except OSError as error:
            raise self._worker_lost(worker) from error
        return lambda: self._collect(plan)

    def close(self) -> None:
        """Stop the workers; safe to call twice."""
        until_s = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.pipe.close()
        for process, _ in self._workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        for process, _ in self._workers:
            process.kill()  # without effect on one that has exited
            process.wait()

    def _collect(self, plan: Plan) -> Ran:
        done = self._receive()
        if isinstance(done, WorkerFailure):
            raise StepFailed(done.message)
        assert isinstance(done, Done)
        for index, logprobs in done.logprobs.items():
            plan.slices[index].request.logprobs = logprobs
        return [plan.slices[index] for index in done.slice_indices], done.tokens

    def _slice_spec(self, part: Slice) -> SliceSpec:
        request = part.request
        new = request.blocks[self._num_sent_blocks[request.sequence_slot] :]
        self._num_sent_blocks[request.sequence_slot] += len(new)
        return SliceSpec(
            request.sequence_slot,
            part.context,
            part.num_tokens,
            part.is_sampled,
            new,
            request.draft,
        )

    def _receive(self) -> _FromWorker:
        """Wait for a message of each worker and return that of the first rank.

        A rank that fails alone leaves the others in a collective: they get a moment to report.

        Raises:
            WorkerLost: A process has exited, or the ranks do not agree.
        """
        awaited = {worker.pipe: worker for worker in self._workers}
        received: set[bytes] = set()
        failures: list[WorkerFailure] = []
        while awaited:
            ready = wait(list(awaited), _FAILURE_S if failures else None)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                content = self._read(awaited.pop(pipe))
                received.add(content)
                message: _FromWorker = _decode_message(content)
                if isinstance(message, WorkerFailure):
                    failures.append(message)
        if len(failures) == len(self._workers):
            return failures[0]
        if len(received) == 1 and not awaited:
            return message
        self._kill()
        if failures:
            raise WorkerLost(f"one rank failed: {failures[0].message}. Start the engine again.")
        raise WorkerLost("the ranks have not sampled the same tokens. Start the engine again.")

    def _read(self, worker: _Worker) -> bytes:
        try:
            return worker.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._worker_lost(worker) from error

    def _kill(self) -> None:
        """Kill the workers, which may wait for each other."""
        for worker in self._workers:
            worker.process.kill()
        self.close()

    def _worker_lost(self, worker: _Worker) -> WorkerLost:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(_GRACE_S)
        which = f" of rank {self._workers.index(worker)}" if len(self._workers) > 1 else ""
        self._kill()
        return WorkerLost(
            f"the worker's process{which} has ended (exit code {worker.process.returncode}). "
            "Start the engine again."
        )


def _start_worker(settings: WorkerSettings) -> _Worker:
    own_end, worker_end = socket.socketpair()
    with own_end, worker_end:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "inferscope.engine.start", "inferscope.engine.worker"),
                *(str(worker_end.fileno()), msgspec.json.encode(settings).decode()),
            ],
            pass_fds=[worker_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # our own stdout may be a pipe with messages to the parent
        )
        return _Worker(process, Connection(own_end.detach()))


def _admitted_request(request: Request) -> AdmittedRequest:
    return AdmittedRequest(
        request.sequence_slot,
        request.index,
        request.tokens,
        request.num_prompt,
        request.sampling,
        sorted(request.stop_ids),
        request.seed,
    )
