"""The core process: model, step loop, and links to the API servers.

The main thread receives requests. The step loop's thread sends the outputs itself, so that a step
never waits for another thread. If an API server does not read `MOST_UNREAD_STEPS` messages, the
core discards its messages and cancels its requests, and the supervisor kills it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import msgspec
import zmq

from inferscope.engine.capacity import check_length, describe_pool
from inferscope.engine.config import EngineOptions
from inferscope.engine.core import Engine, Output
from inferscope.engine.devices import step_timer
from inferscope.engine.disagg import TransferFailed, receive
from inferscope.engine.load import describe, load_engine
from inferscope.engine.request import BadRequest, QueueFull
from inferscope.engine.server.parent import (
    STOP,
    Failed,
    Ready,
    Stuck,
    listen_to_parent,
    send_to_parent,
)
from inferscope.engine.server.wire import (
    LINGER_MS,
    MOST_UNREAD_STEPS,
    AskStats,
    Cancel,
    FromServer,
    Hello,
    Refusal,
    Refused,
    Stats,
    Step,
    Submit,
    Welcome,
    core_address,
    decode_from_server,
    encode,
)
from inferscope.errors import InferScopeError
from inferscope.probe import EngineInfo, Probe

logger = logging.getLogger(__name__)

_POLL_MS = 100
"""Milliseconds between checks of the state that other threads change."""
_WELCOME_S = 5.0
_WELCOME_POLL_MS = 2


class CoreSettings(msgspec.Struct, frozen=True):
    """Settings of the core, sent by the supervisor."""

    model: str
    served_name: str
    folder: str
    options: EngineOptions
    in_worker: bool


class _Link:
    """Link from the core to one API server."""

    __slots__ = ("_lock", "_socket", "is_broken", "is_reported", "name")

    def __init__(self, name: str, socket: zmq.Socket[bytes]) -> None:
        self.name = name
        self.is_broken = False
        self.is_reported = False
        self._socket = socket
        # Guards the socket: the loop's thread sends, the main thread closes. Neither blocks while
        # it holds the lock.
        self._lock = threading.Lock()

    def send(self, message: bytes) -> bool:
        """Send without blocking; return whether the message was queued."""
        with self._lock:
            if self._socket.closed:
                return False
            try:
                self._socket.send(message, zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            return True

    def close(self, *, linger_ms: int = 0) -> None:
        with self._lock:
            self._socket.close(linger=linger_ms)


class Core:
    """Server of the API servers on an engine."""

    def __init__(self, engine: Engine, info: EngineInfo, folder: Path) -> None:
        """Bind the sockets in a folder; the engine must not be started yet."""
        self._engine = engine
        self._welcome = encode(
            Welcome(
                info,
                engine.max_model_tokens,
                engine.model.config.vocab,
                os.getpid(),
                engine.options.seed,
            )
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.linger = LINGER_MS
        # A ROUTER drops messages at its limit; the submissions of each API server bound them.
        self._inbox.sndhwm = 0
        self._inbox.bind(core_address(folder))
        self._links: dict[bytes, _Link] = {}
        """Link by the API server's ZeroMQ identity."""
        self._link_of: dict[str, _Link] = {}
        """Link by request id; the main thread adds entries, the loop's thread removes them."""
        self._unwelcomed: dict[_Link, float] = {}
        """Deadline in monotonic seconds for a link to connect."""

    def serve(self, commands: SimpleQueue[str]) -> None:
        """Serve until the stop command.

        Raises:
            InferScopeError: the engine's loop has failed.
        """
        self._engine.start(self._deliver)
        while self._apply_commands(commands) and self._engine.failure is None:
            if self._inbox.poll(_WELCOME_POLL_MS if self._unwelcomed else _POLL_MS):
                self._receive(self._inbox.recv_multipart())
            self._send_welcomes()
            self._report_stuck()
        self._engine.close()
        for link in self._links.values():
            link.close(linger_ms=LINGER_MS)
        self._inbox.close()
        self._context.term()
        if self._engine.failure is not None:
            raise InferScopeError(f"the engine's loop failed: {self._engine.failure}")

    def _apply_commands(self, commands: SimpleQueue[str]) -> bool:
        """Drop the API servers named by the supervisor; return False on the stop command."""
        while not commands.empty():
            command = commands.get()
            if command == STOP:
                return False
            self._drop_server(command)
        return True

    def _report_stuck(self) -> None:
        for link in self._links.values():
            if link.is_broken and not link.is_reported:
                link.is_reported = True
                send_to_parent(Stuck(link.name))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            identity, content = frames
            message = decode_from_server(content)
        except (ValueError, msgspec.MsgspecError):
            logger.warning("malformed message to the engine dropped; its sender gets no answer")
            return
        self._take(identity, message)

    def _take(self, identity: bytes, message: FromServer) -> None:
        if isinstance(message, Submit):
            self._submit(identity, message)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.request_id, message.reason)
        elif isinstance(message, AskStats):
            stats = Stats(message.number, self._engine.stats())
            self._inbox.send_multipart([identity, encode(stats)])
        else:
            link = self._links[identity] = self._connect(message)
            self._unwelcomed[link] = time.monotonic() + _WELCOME_S

    def _connect(self, hello: Hello) -> _Link:
        socket = self._context.socket(zmq.PUSH)
        socket.sndhwm = MOST_UNREAD_STEPS
        # Sending to a process that has exited must fail, not wait for a reconnection.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(hello.address)
        return _Link(hello.name, socket)

    def _send_welcomes(self) -> None:
        """Send a welcome on each link that has connected."""
        now_s = time.monotonic()
        for link, deadline_s in list(self._unwelcomed.items()):
            if link.is_broken or link.send(self._welcome):
                del self._unwelcomed[link]
            elif now_s > deadline_s:
                link.is_broken = True

    def _submit(self, identity: bytes, submission: Submit) -> None:
        link = self._links.get(identity)
        if link is None:
            self._refuse(
                identity,
                submission,
                "stopped",
                "the engine does not know this API server. Try again.",
            )
            return
        if link.is_broken:
            return
        received = None
        if submission.kv is not None:
            try:
                received = receive(submission.kv)
            except TransferFailed as error:
                logger.error("request %s failed: %s", submission.request_id, error)
                self._refuse(identity, submission, "no_kv", str(error))
                return
        # Set before `submit`: the first output may arrive before it returns.
        self._link_of[submission.request_id] = link
        try:
            self._engine.submit(
                submission.prompt,
                submission.sampling,
                request_id=submission.request_id,
                external_id=submission.external_id,
                parent=submission.parent,
                trace=submission.trace,
                received=received,
                cache_salt=submission.cache_salt,
            )
        except InferScopeError as error:
            if received is not None:
                received.discard()
            self._link_of.pop(submission.request_id, None)
            self._refuse(identity, submission, _kind_of(error), str(error))
        if link.is_broken:  # the loop's thread may have cancelled before this entry existed
            self._engine.cancel(submission.request_id, "server_abort")

    def _refuse(self, identity: bytes, submission: Submit, kind: Refusal, message: str) -> None:
        self._inbox.send_multipart(
            [identity, encode(Refused(submission.request_id, kind, message))]
        )

    def _deliver(self, outputs: list[Output]) -> None:
        """Send a step's outputs to the API servers; runs in the loop's thread."""
        steps: dict[_Link, Step] = {}
        link_of = self._link_of
        for output in outputs:
            request = output.request
            request_id = request.request_id
            link = link_of.get(request_id)
            if link is None:
                continue
            step = steps.get(link)
            if step is None:
                step = steps[link] = Step([], [], {}, {}, {})
            step.request_ids.append(request_id)
            step.tokens.append(output.tokens)
            if output.logprobs:
                step.logprobs[request_id] = output.logprobs
            if output.finish is not None:
                step.ends[request_id] = output.finish
                del link_of[request_id]
            if output.kv is not None:
                step.kv[request_id] = output.kv
            if request.cached_tokens and request.num_output <= len(output.tokens):
                step.cached_tokens[request_id] = request.cached_tokens
        for link, step in steps.items():
            if link.is_broken:
                continue
            if not link.send(encode(step)):
                link.is_broken = True
                self._cancel_all(link)

    def _drop_server(self, name: str) -> None:
        """Close the link of an API server that has exited and cancel its requests."""
        for identity, link in list(self._links.items()):
            if link.name == name:
                link.is_broken = True
                del self._links[identity]
                self._cancel_all(link)
                link.close()

    def _cancel_all(self, gone: _Link) -> None:
        """Cancel the requests of a lost API server; safe from both threads."""
        for request_id, link in list(self._link_of.items()):
            if link is gone:
                self._engine.cancel(request_id, "server_abort")


def _kind_of(error: InferScopeError) -> Refusal:
    if isinstance(error, QueueFull):
        return "queue_full"
    return "bad_request" if isinstance(error, BadRequest) else "stopped"


def main() -> int:
    """Run until the parent sends stop or exits; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and sends stop
    settings = msgspec.json.decode(sys.argv[1], type=CoreSettings)
    commands: SimpleQueue[str] = SimpleQueue()
    # Every process removes the folder of sockets, in case it exits last.
    listen_to_parent(
        commands.put, on_loss=lambda: shutil.rmtree(settings.folder, ignore_errors=True)
    )
    probes: list[Probe] = []
    try:
        engine = load_engine(settings.model, settings.options, in_worker=settings.in_worker)
        check_length(engine.model, settings.options, engine.pool.num_blocks)
        info = describe(engine, name=settings.model)
        info = msgspec.structs.replace(info, served_name=settings.served_name)
        engine.probe = Probe.open(info, timer=step_timer(engine.model.device))
        probes.append(engine.probe)
        core = Core(engine, info, Path(settings.folder))
        note = describe_pool(engine.model, engine.options, engine.pool.num_blocks)
        role = settings.options.role
        send_to_parent(Ready(note if role == "both" else f"{role} engine: {note}"))
        core.serve(commands)
    except InferScopeError as error:
        send_to_parent(Failed(str(error), error.exit_code))
        return error.exit_code
    finally:
        for probe in probes:
            probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
