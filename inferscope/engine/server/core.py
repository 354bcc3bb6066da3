"""The engine's process: model, step loop, and the way to the API servers.

The main thread takes requests in; the step loop's thread sends outputs out, itself, so that a step
never waits for another thread. An API server that does not read for `MOST_UNREAD_STEPS` is given
up: the loop drops what it cannot send, cancels its requests, and the parent ends it.
"""

from __future__ import annotations

import logging
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
from inferscope.engine.load import describe, load_engine
from inferscope.engine.request import BadRequest, QueueFull
from inferscope.engine.server.parent import STOP, Failed, Ready, Stuck, listen_to_parent, say
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

_LOOK_MS = 100
"""Between looks at what other threads have decided."""
_WELCOME_S = 5.0
_WELCOME_LOOK_MS = 2


class CoreSettings(msgspec.Struct, frozen=True):
    """What the parent wants."""

    model: str
    served_name: str
    folder: str
    options: EngineOptions
    in_worker: bool


class _Link:
    """The way down to one API server."""

    __slots__ = ("_lock", "_socket", "is_broken", "is_told", "name")

    def __init__(self, name: str, socket: zmq.Socket[bytes]) -> None:
        self.name = name
        self.is_broken = False
        self.is_told = False
        self._socket = socket
        # Of a socket that the loop's thread sends on and the main thread closes. Nobody waits
        # while holding it.
        self._lock = threading.Lock()

    def send(self, message: bytes) -> bool:
        """Send if there is room."""
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
    """Serves API servers on an engine."""

    def __init__(self, engine: Engine, info: EngineInfo, folder: Path) -> None:
        """Listen in a folder; the engine has not been started."""
        self._engine = engine
        self._welcome = encode(Welcome(info, engine.max_model_tokens, engine.model.config.vocab))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.linger = LINGER_MS
        # A ROUTER at its limit drops what it sends; each API server bounds it by what it submits.
        self._inbox.sndhwm = 0
        self._inbox.bind(core_address(folder))
        self._links: dict[bytes, _Link] = {}
        """By the identity that ZeroMQ gave the API server."""
        self._link_of: dict[str, _Link] = {}
        """By request. The main thread adds, the loop's thread removes."""
        self._unwelcomed: dict[_Link, float] = {}
        """Until when each may take to accept our connection."""

    def serve(self, words: SimpleQueue[str]) -> None:
        """Serve until a word from the parent says stop.

        Raises:
            InferScopeError: the engine's loop has failed.
        """
        self._engine.start(self._deliver)
        while self._obeys(words) and self._engine.failure is None:
            if self._inbox.poll(_WELCOME_LOOK_MS if self._unwelcomed else _LOOK_MS):
                self._receive(self._inbox.recv_multipart())
            self._greet()
            self._tell_of_stuck()
        self._engine.close()
        for link in self._links.values():
            link.close(linger_ms=LINGER_MS)
        self._inbox.close()
        self._context.term()
        if self._engine.failure is not None:
            raise InferScopeError(f"the engine's loop failed: {self._engine.failure}")

    def _obeys(self, words: SimpleQueue[str]) -> bool:
        """Forget the API servers that the parent names; False when it says stop."""
        while not words.empty():
            word = words.get()
            if word == STOP:
                return False
            self._forget(word)
        return True

    def _tell_of_stuck(self) -> None:
        for link in self._links.values():
            if link.is_broken and not link.is_told:
                link.is_told = True
                say(Stuck(link.name))

    def _receive(self, frames: list[bytes]) -> None:
        try:
            identity, content = frames
            message = decode_from_server(content)
        except (ValueError, msgspec.MsgspecError):
            logger.warning("a message to the engine is malformed, and was dropped")
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
        # What is sent to a process that is gone must fail, not wait for its return.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(hello.address)
        return _Link(hello.name, socket)

    def _greet(self) -> None:
        """Welcome those who have accepted our connection."""
        now_s = time.monotonic()
        for link, deadline_s in list(self._unwelcomed.items()):
            if link.is_broken or link.send(self._welcome):
                del self._unwelcomed[link]
            elif now_s > deadline_s:
                link.is_broken = True

    def _submit(self, identity: bytes, asked: Submit) -> None:
        link = self._links.get(identity)
        if link is None:
            self._refuse(identity, asked, "stopped", "this API server is not known to the engine.")
            return
        if link.is_broken:
            return
        # Before the engine has it: the first output may come before `submit` returns.
        self._link_of[asked.request_id] = link
        try:
            self._engine.submit(
                asked.prompt,
                asked.sampling,
                request_id=asked.request_id,
                external_id=asked.external_id,
                parent=asked.parent,
            )
        except InferScopeError as error:
            self._link_of.pop(asked.request_id, None)
            self._refuse(identity, asked, _kind_of(error), str(error))
        if link.is_broken:  # by the loop's thread, which may not have seen this one
            self._engine.cancel(asked.request_id, "server_abort")

    def _refuse(self, identity: bytes, asked: Submit, kind: Refusal, message: str) -> None:
        self._inbox.send_multipart([identity, encode(Refused(asked.request_id, kind, message))])

    def _deliver(self, outputs: list[Output]) -> None:
        """Send what a step did to the API servers; runs in the loop's thread."""
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
                step = steps[link] = Step([], [], {}, {})
            step.request_ids.append(request_id)
            step.tokens.append(output.tokens)
            if output.finish is not None:
                step.ends[request_id] = output.finish
                del link_of[request_id]
            if request.cached_tokens and request.num_output <= len(output.tokens):
                step.cached_tokens[request_id] = request.cached_tokens
        for link, step in steps.items():
            if link.is_broken:
                continue
            if not link.send(encode(step)):
                link.is_broken = True
                self._cancel_all(link)

    def _forget(self, name: str) -> None:
        """Give up an API server that is gone."""
        for identity, link in list(self._links.items()):
            if link.name == name:
                link.is_broken = True
                del self._links[identity]
                self._cancel_all(link)
                link.close()

    def _cancel_all(self, gone: _Link) -> None:
        """Cancel the requests of an API server that is gone; either thread."""
        for request_id, link in list(self._link_of.items()):
            if link is gone:
                self._engine.cancel(request_id, "server_abort")


def _kind_of(error: InferScopeError) -> Refusal:
    if isinstance(error, QueueFull):
        return "queue_full"
    return "bad_request" if isinstance(error, BadRequest) else "stopped"


def main() -> int:
    """Run until the parent says stop or is gone; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C and tells us by the pipe
    settings = msgspec.json.decode(sys.argv[1], type=CoreSettings)
    words: SimpleQueue[str] = SimpleQueue()
    # The parent's folder of sockets is removed by whoever is left.
    listen_to_parent(words.put, on_loss=lambda: shutil.rmtree(settings.folder, ignore_errors=True))
    probes: list[Probe] = []
    try:
        engine = load_engine(settings.model, settings.options, in_worker=settings.in_worker)
        check_length(engine.model, settings.options, engine.pool.num_blocks)
        info = describe(engine, name=settings.model)
        info = msgspec.structs.replace(info, served_name=settings.served_name)
        engine.probe = Probe.open(info, timer=step_timer(engine.model.device))
        probes.append(engine.probe)
        core = Core(engine, info, Path(settings.folder))
        say(Ready(describe_pool(engine.model, engine.options, engine.pool.num_blocks)))
        core.serve(words)
    except InferScopeError as error:
        say(Failed(str(error), error.exit_code))
        return error.exit_code
    finally:
        for probe in probes:
            probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
