"""Running steps in another process: the step loop's side, and what the two say to each other.

step loop ── Work ──> worker        who was seated, which slices, the blocks that are new
step loop <── Done ── worker        the tokens chosen
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
from inferscope.engine.request import Request, Sampling
from inferscope.engine.runner import Launched, Ran
from inferscope.engine.scheduler import Plan, Slice
from inferscope.engine.weights import DTYPES
from inferscope.errors import BadInput, InferScopeError
from inferscope.probe import Probe

_GRACE_S = 10.0
_STDERR = 2


class WorkerLost(InferScopeError):
    """The worker's process has ended."""


class StepFailed(InferScopeError):
    """A step raised in the worker, which goes on."""


class Setting(msgspec.Struct, frozen=True):
    """What a worker is to run."""

    model: str
    options: EngineOptions


class Ready(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """The model is loaded."""

    config: ModelConfig
    dtype: DtypeName
    device: str
    num_positions: int
    num_blocks: int


class Refused(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The model could not be loaded, or a step could not be run."""

    message: str


class Seated(msgspec.Struct, frozen=True, array_like=True):
    """A request that has taken a seat, with all that it brings."""

    seat: int
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    stop_ids: list[int]
    seed: int


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slice of a step."""

    seat: int
    context: int
    num_tokens: int
    is_sampled: bool
    blocks: list[int]
    """That the request has taken since its last slice."""


class Work(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """A step to run."""

    step: int
    seated: list[Seated]
    parts: list[Part]


class Done(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """A step's tokens, by the places of their slices in the work."""

    places: list[int]
    tokens: list[int]


_FromWorker: TypeAlias = Ready | Refused | Done
encode = msgspec.msgpack.encode
decode_work = msgspec.msgpack.Decoder(Work).decode
_decode_word = msgspec.msgpack.Decoder(_FromWorker).decode


class RemoteRunner:
    """Runs steps in a worker's process, which lives as long as this."""

    is_asynchronous = True

    def __init__(self, model: str, options: EngineOptions) -> None:
        """Start the worker and wait until it has loaded the model.

        Raises:
            BadInput: The model cannot be loaded.
            WorkerLost: The process ended before.
        """
        ours, theirs = socket.socketpair()
        setting = msgspec.json.encode(Setting(model, options)).decode()
        with ours, theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "inferscope.engine.start", "inferscope.engine.worker"),
                    *(str(theirs.fileno()), setting),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # ours may be a pipe on which somebody reads our words
            )
            self._pipe = Connection(ours.detach())
        self._num_told = [0] * options.max_running
        word = self._hear()
        if isinstance(word, Refused):
            self.close()
            raise BadInput(word.message)
        assert isinstance(word, Ready)
        self.num_blocks = word.num_blocks
        self.outline = Outline(
            word.config,
            DTYPES[word.dtype],
            torch.device(word.device),
            word.num_positions,
        )

    @property
    def pid(self) -> int:
        """The worker's."""
        return self._process.pid

    def run(self, step: int, plan: Plan, probe: Probe, launched: Launched) -> Ran:
        """Run a step; the worker's own probe times it.

        Raises:
            WorkerLost: The process has ended.
            StepFailed: The step raised.
        """
        for request in plan.admitted:
            self._num_told[request.seat] = 0
        work = Work(step, [_seated(r) for r in plan.admitted], [self._part(s) for s in plan.slices])
        try:
            self._pipe.send_bytes(encode(work))
        except OSError as error:
            raise self._lost() from error
        launched()
        done = self._hear()
        if isinstance(done, Refused):
            raise StepFailed(done.message)
        assert isinstance(done, Done)
        return [plan.slices[place] for place in done.places], done.tokens

    def close(self) -> None:
        """End the worker; safe to call twice."""
        self._pipe.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _part(self, part: Slice) -> Part:
        request = part.request
        new = request.blocks[self._num_told[request.seat] :]
        self._num_told[request.seat] += len(new)
        return Part(request.seat, part.context, part.num_tokens, part.is_sampled, new)

    def _hear(self) -> _FromWorker:
        try:
            word: _FromWorker = _decode_word(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        return word

    def _lost(self) -> WorkerLost:
        self.close()
        return WorkerLost(f"the worker's process has ended (exit code {self._process.returncode}).")


def _seated(request: Request) -> Seated:
    return Seated(
        request.seat,
        request.index,
        request.tokens,
        request.num_prompt,
        request.sampling,
        sorted(request.stop_ids),
        request.seed,
    )
