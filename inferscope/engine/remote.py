"""Runner of steps in another process: the step loop's side and the messages of both sides.

step loop ── StepWork ──> worker    admitted requests, slices, new blocks, drafts
step loop <── Done ── worker        sampled tokens, log probabilities
"""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TypeAlias

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
_STDERR = 2


class WorkerLost(InferScopeError):
    """Error: the worker's process has exited."""


class StepFailed(InferScopeError):
    """Error: a step raised in the worker, which continues."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """Model and options of a worker."""

    model: str
    options: EngineOptions


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


class RemoteRunner:
    """Runner of steps in a worker process that it starts and ends."""

    is_asynchronous = True

    def __init__(self, model: str, options: EngineOptions) -> None:
        """Start the worker and wait until the model is loaded.

        Raises:
            BadInput: The model cannot be loaded.
            WorkerLost: The process exited first.
        """
        own_end, worker_end = socket.socketpair()
        settings = msgspec.json.encode(WorkerSettings(model, options)).decode()
        with own_end, worker_end:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "inferscope.engine.start", "inferscope.engine.worker"),
                    *(str(worker_end.fileno()), settings),
                ],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # our own stdout may be a pipe with messages to the parent
            )
            self._pipe = Connection(own_end.detach())
        self._num_sent_blocks = [0] * options.max_running
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
    def pid(self) -> int:
        """Process ID of the worker."""
        return self._process.pid

    def launch(self, step: int, plan: Plan, probe: Probe) -> Collect:
        """Launch a step in the worker, whose own probe times it.

        Raises:
            WorkerLost: The process has exited; collecting raises it too.
            StepFailed: The step raised; only collecting raises it.
        """
        for request in plan.admitted:
            self._num_sent_blocks[request.sequence_slot] = 0
        work = StepWork(
            step,
            [_admitted_request(r) for r in plan.admitted],
            [self._slice_spec(s) for s in plan.slices],
        )
        try:
            self._pipe.send_bytes(encode(work))
        except OSError as error:
            raise self._worker_lost() from error
        return lambda: self._collect(plan)

    def close(self) -> None:
        """Stop the worker; safe to call twice."""
        self._pipe.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

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
        try:
            message: _FromWorker = _decode_message(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._worker_lost() from error
        return message

    def _worker_lost(self) -> WorkerLost:
        self.close()
        return WorkerLost(
            f"the worker's process has ended (exit code {self._process.returncode}). "
            "Start the engine again."
        )


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
