"""The supervisor: starts the engine's process and the API servers, and ends them.

Everything that happens to it is an event in one queue: a child's word, a child's end, a signal. An
API server that dies is replaced; one that dies while starting, or the engine's process, ends
everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from inferscope.engine.config import EngineOptions
from inferscope.engine.server.parent import CORE_GONE, STOP, Failed, Ready, Stuck
from inferscope.errors import BadInput, InferScopeError
from inferscope.probe.identity import engine_id

_CORE = "engine"
_LAST_WORDS_S = 1.0
"""For which API servers answer 503 after the engine's process has gone."""
_CORE_GRACE_S = 5.0
_API_GRACE_S = 4.0
"""Beyond the time that requests under way are given."""
_LOOK_S = 0.2
"""Between looks at a child whose pipe is open."""
_SEND_BUFFER_BYTES = 16 << 10
_UNSENT_BYTES = 8 << 10
"""Small, so that a client that does not read is seen before a whole answer is in flight to it."""
_LONGEST_ADDRESS = 100
"""The kernel's limit for the path of a local socket is 107."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What to serve, and how."""

    model: str
    served_name: str
    host: str
    port: int
    num_api_servers: int
    drain_s: float
    client_timeout_s: float
    max_connections: int = 2048
    options: EngineOptions = field(default_factory=EngineOptions)
    in_worker: bool = False


@dataclass
class _Child:
    """A process of ours."""

    name: str
    process: asyncio.subprocess.Process
    rank: int = -1
    is_ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, word: str) -> None:
        """Send a line; the child may be gone."""
        pipe = self.process.stdin
        if pipe is not None and not pipe.is_closing():
            with contextlib.suppress(OSError):
                pipe.write(word.encode() + b"\n")


@dataclass(frozen=True)
class _Ended:
    child: _Child
    code: int


@dataclass(frozen=True)
class _Said:
    child: _Child
    word: Ready | Failed | Stuck


@dataclass(frozen=True)
class _Signal:
    number: int


_Event: TypeAlias = _Ended | _Said | _Signal
_decode_word = msgspec.json.Decoder(Ready | Failed | Stuck).decode


class _Refused(InferScopeError):
    """A child could not begin."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Asked(Exception):
    """Somebody asked us to stop before all was ready."""


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket that all API servers share.

    Raises:
        BadInput: nobody can listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInput(
            f"cannot listen on {host}: {error.strerror}. Choose another --host."
        ) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise BadInput(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port; 0 takes a "
            "free one."
        ) from None
    return listening


class Supervisor:
    """The processes of one server."""

    def __init__(
        self, settings: ServeSettings, listening: socket.socket, say: Callable[[str], object]
    ) -> None:
        """Take the listening socket and what says a line to the user."""
        self._settings = settings
        self._listening = listening
        self._say = say
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._core: _Child | None = None
        self._servers: list[_Child] = []
        self._watchers: set[asyncio.Task[None]] = set()
        self._num_started = 0

    async def run(self, on_ready: Callable[[], object]) -> bool:
        """Serve until a signal says stop; False if that was before anybody was served.

        Args:
            on_ready: called when all processes are ready.

        Raises:
            InferScopeError: a process could not begin, or has died.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._events.put_nowait, _Signal(number))
        folder = Path(tempfile.mkdtemp(prefix="inferscope-serve-"))
        if len(str(folder)) > _LONGEST_ADDRESS - len("/api-00.000"):
            shutil.rmtree(folder)
            raise BadInput(f"{folder} is too long for local sockets. Set TMPDIR to a shorter path.")
        try:
            await self._serve(folder, on_ready)
            await self._stop_servers()
            await self._stop_core()
            return True
        except _Asked:
            return False
        finally:
            await self._kill_all()
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve(self, folder: Path, on_ready: Callable[[], object]) -> None:
        self._core = await self._start_core(folder)
        for rank in range(self._settings.num_api_servers):
            self._servers.append(await self._start_server(folder, rank))
        while not all(child.is_ready for child in (self._core, *self._servers)):
            event = await self._events.get()
            if isinstance(event, _Signal):
                raise _Asked
            if isinstance(event, _Ended):
                raise _cannot_start(event)
            self._take_word(event)
        on_ready()
        while True:
            event = await self._events.get()
            if isinstance(event, _Signal):
                return
            if isinstance(event, _Said):
                self._take_word(event)
            elif event.child is self._core:
                await self._say_last_words(event)
            else:
                await self._replace(event, folder)

    def _take_word(self, said: _Said) -> None:
        word = said.word
        if isinstance(word, Ready):
            said.child.is_ready = True
            if word.note:
                self._say(word.note)
        elif isinstance(word, Failed):
            raise _Refused(word.message, word.exit_code)
        else:
            for child in self._servers:
                if child.name == word.name:
                    self._say(f"{_title(child)} has stopped reading; ending it.")
                    _kill(child)

    async def _say_last_words(self, ended: _Ended) -> None:
        """Let the API servers tell their clients that the engine is gone."""
        for child in self._servers:
            child.say(CORE_GONE)
        await asyncio.sleep(_LAST_WORDS_S)
        await self._stop_servers()
        raise InferScopeError(
            f"the engine's process {_how(ended.code)}. Its requests are lost; its records are not: "
            f"inferscope attach {engine_id()}"
        )

    async def _replace(self, ended: _Ended, folder: Path) -> None:
        """Start another API server in the place of one that has died."""
        child = ended.child
        assert self._core is not None
        self._core.say(child.name)
        self._servers.remove(child)
        if not child.is_ready:
            raise _cannot_start(ended)
        self._say(
            f"{_title(child)} {_how(ended.code)}; its requests are cancelled, another one starts."
        )
        self._servers.append(await self._start_server(folder, child.rank))

    # --- children -----------------------------------------------------------------------------

    async def _start_core(self, folder: Path) -> _Child:
        settings = self._settings
        told = {
            "model": settings.model,
            "served_name": settings.served_name,
            "folder": str(folder),
            "options": settings.options,
            "in_worker": settings.in_worker,
        }
        modules = ("inferscope.engine.start", "inferscope.engine.server.core")
        return await self._start(_CORE, *modules, told=told)

    async def _start_server(self, folder: Path, rank: int) -> _Child:
        settings = self._settings
        name = f"api-{self._num_started}"
        self._num_started += 1
        told = {
            "name": name,
            "rank": rank,
            "handle": self._listening.fileno(),
            "folder": str(folder),
            "model": settings.model,
            "served_name": settings.served_name,
            "drain_s": settings.drain_s,
            "client_timeout_s": settings.client_timeout_s,
            "max_connections": settings.max_connections,
        }
        child = await self._start(name, "inferscope.engine.server.api", told=told)
        child.rank = rank
        return child

    async def _start(self, name: str, *words: str, told: dict[str, object]) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *words,
            msgspec.json.encode(told).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[] if name == _CORE else [self._listening.fileno()],
            # Ctrl-C is for us alone; tokenizers' own threads would spin beside the engine.
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        child = _Child(name, process)
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return child

    async def _watch(self, child: _Child) -> None:
        """Put a child's words and its end into the queue."""
        hearing = asyncio.create_task(self._hear(child))
        # The pipe's end alone does not say it, nor does `wait`, which is for that end too: a
        # child's own child may hold the pipe.
        while child.process.returncode is None and not hearing.done():
            await asyncio.wait((hearing,), timeout=_LOOK_S)
        await asyncio.wait((hearing,), timeout=_LOOK_S)
        code = child.process.returncode
        if code is None:
            code = await child.process.wait()
        hearing.cancel()
        child.ended.set()
        self._events.put_nowait(_Ended(child, code))

    async def _hear(self, child: _Child) -> None:
        assert child.process.stdout is not None
        line = b"\n"
        while line:
            # Anything else on it is a library's, which takes it for a terminal; a line of any
            # length too, which `readline` reads in pieces.
            with contextlib.suppress(ValueError):
                line = await child.process.stdout.readline()
                self._events.put_nowait(_Said(child, _decode_word(line)))

    async def _stop_servers(self) -> None:
        for child in self._servers:
            child.say(STOP)
        await self._wait_for(self._servers, self._settings.drain_s + _API_GRACE_S)

    async def _stop_core(self) -> None:
        assert self._core is not None
        self._core.say(STOP)
        await self._wait_for([self._core], _CORE_GRACE_S)

    async def _wait_for(self, children: list[_Child], grace_s: float) -> None:
        """Wait for children to end; a second signal ends the wait."""
        ends = asyncio.gather(*(child.ended.wait() for child in children))
        signals = asyncio.create_task(self._next_signal())
        await asyncio.wait((ends, signals), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        signals.cancel()
        for child in children:
            _kill(child)
        await ends

    async def _next_signal(self) -> None:
        while not isinstance(await self._events.get(), _Signal):
            pass

    async def _kill_all(self) -> None:
        children = [child for child in (self._core, *self._servers) if child is not None]
        for child in children:
            _kill(child)
        await asyncio.gather(*(child.ended.wait() for child in children))
        await asyncio.gather(*self._watchers)


def _kill(child: _Child) -> None:
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()


def _cannot_start(ended: _Ended) -> InferScopeError:
    return InferScopeError(
        f"{_title(ended.child)} {_how(ended.code)} while starting; its own words, if any, stand "
        "above."
    )


def _title(child: _Child) -> str:
    return "the engine's process" if child.name == _CORE else f"API server {child.rank}"


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
