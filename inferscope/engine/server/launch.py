"""The supervisor, which starts and stops the core and the API servers.

Everything it reacts to is an event in one queue: a message of a child, the exit of a child, or a
signal. An API server that exits is replaced. The server ends if an API server exits while it
starts, or if the core exits.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from inferscope.engine.config import EngineOptions, Role
from inferscope.engine.server.parent import CORE_GONE, STOP, Failed, Ready, Stuck
from inferscope.errors import BadInput, InferScopeError
from inferscope.probe import ENGINE_ID_VARIABLE, engine_id

_CORE = "engine"
_PREFILL = "prefill"
"""Name of the prefill engine's core, of its directory of sockets, and end of its engine ID."""
_CORE_EXIT_NOTICE_S = 1.0
"""Seconds that API servers respond with 503 after the core has exited."""
_CORE_GRACE_S = 5.0
_API_GRACE_S = 4.0
"""Seconds for an API server to exit after the drain time."""
_POLL_S = 0.2
"""Seconds between checks of a child whose pipe is open."""
_SEND_BUFFER_BYTES = 16 << 10
_UNSENT_BYTES = 8 << 10
"""Unsent bytes in the kernel; few, so that a client that does not read is detected early."""
_LONGEST_ADDRESS = 100
"""Maximum length of a socket's path; the kernel's limit is 107."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server.

    Attributes:
        is_disaggregated: whether a prefill engine is started beside the engine, which decodes.
        kv_folder: directory in which a prefill engine and decode engines started elsewhere meet.
    """

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
    is_disaggregated: bool = False
    kv_folder: Path | None = None


@dataclass
class _Child:
    """A child process."""

    name: str
    process: asyncio.subprocess.Process
    rank: int = -1
    is_ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: str) -> None:
        """Send a line to the child, if it still runs."""
        pipe = self.process.stdin
        if pipe is not None and not pipe.is_closing():
            with contextlib.suppress(OSError):
                pipe.write(message.encode() + b"\n")


@dataclass(frozen=True)
class _Ended:
    child: _Child
    code: int


@dataclass(frozen=True)
class _ChildMessage:
    child: _Child
    message: Ready | Failed | Stuck


@dataclass(frozen=True)
class _Signal:
    number: int


_Event: TypeAlias = _Ended | _ChildMessage | _Signal
_decode_message = msgspec.json.Decoder(Ready | Failed | Stuck).decode


class _StartFailed(InferScopeError):
    """Error: a child failed to start."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _StopRequested(Exception):
    """A signal to stop arrived before all processes were ready."""


def listen(host: str, port: int) -> socket.socket:
    """Return the listening socket that all API servers share.

    Raises:
        BadInput: the address cannot be used.
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
    """Supervisor of the processes of one server."""

    def __init__(
        self,
        settings: ServeSettings,
        listening: socket.socket | None,
        notify: Callable[[str], object],
    ) -> None:
        """Set up on a listening socket; `notify` prints a line to the user.

        A prefill engine has no API servers, and so no listening socket.
        """
        self._settings = settings
        self._listening = listening
        self._notify = notify
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._core: _Child | None = None
        self._prefill: _Child | None = None
        self._servers: list[_Child] = []
        self._watchers: set[asyncio.Task[None]] = set()
        self._num_started = 0

    async def run(self, on_ready: Callable[[], object]) -> bool:
        """Serve until a signal to stop; return False if it arrived before all were ready.

        Args:
            on_ready: callback when all processes are ready.

        Raises:
            InferScopeError: a process failed to start, or the core exited.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._events.put_nowait, _Signal(number))
        folder = self._make_folder()
        longest_name = "/core" if self._listening is None else "/api-00.000-prefill"
        if len(str(folder)) > _LONGEST_ADDRESS - len(longest_name):
            shutil.rmtree(folder)
            raise BadInput(
                f"{folder} is too long for local sockets. Choose a shorter TMPDIR or --kv-dir."
            )
        try:
            await self._serve(folder, on_ready)
            await self._stop_servers()
            await self._stop_cores()
            return True
        except _StopRequested:
            return False
        finally:
            await self._kill_all()
            shutil.rmtree(folder, ignore_errors=True)

    async def _serve(self, folder: Path, on_ready: Callable[[], object]) -> None:
        self._core = await self._start_core(folder)
        if self._settings.is_disaggregated:
            (folder / _PREFILL).mkdir()
            self._prefill = await self._start_prefill(folder)
        if self._listening is not None:
            for rank in range(self._settings.num_api_servers):
                self._servers.append(await self._start_server(folder, rank))
        while not all(child.is_ready for child in self._children()):
            event = await self._events.get()
            if isinstance(event, _Signal):
                raise _StopRequested
            if isinstance(event, _Ended):
                raise _cannot_start(event)
            self._on_message(event)
        on_ready()
        while True:
            event = await self._events.get()
            if isinstance(event, _Signal):
                return
            if isinstance(event, _ChildMessage):
                self._on_message(event)
            elif event.child is self._core:
                await self._announce_core_exit(event)
            elif event.child is self._prefill:
                await self._replace_prefill(event, folder)
            else:
                await self._replace(event, folder)

    def _on_message(self, event: _ChildMessage) -> None:
        message = event.message
        if isinstance(message, Ready):
            event.child.is_ready = True
            if message.note:
                self._notify(message.note)
        elif isinstance(message, Failed):
            raise _StartFailed(message.message, message.exit_code)
        else:
            for child in self._servers:
                if child.name == message.name:
                    self._notify(f"{_title(child)} has stopped reading; killing it.")
                    _kill(child)

    async def _announce_core_exit(self, ended: _Ended) -> None:
        """Notify the API servers that the core has exited, then stop."""
        for child in self._servers:
            child.send(CORE_GONE)
        await asyncio.sleep(_CORE_EXIT_NOTICE_S)
        await self._stop_servers()
        raise InferScopeError(
            f"the engine's process {_describe_exit(ended.code)}. Its requests are lost; its "
            f"records are not: inferscope attach {engine_id()}"
        )

    async def _replace(self, ended: _Ended, folder: Path) -> None:
        """Start an API server in place of one that has exited."""
        child = ended.child
        assert self._core is not None
        self._core.send(child.name)
        self._servers.remove(child)
        if not child.is_ready:
            raise _cannot_start(ended)
        self._notify(
            f"{_title(child)} {_describe_exit(ended.code)}; its requests are cancelled, another "
            "one starts."
        )
        self._servers.append(await self._start_server(folder, child.rank))

    async def _replace_prefill(self, ended: _Ended, folder: Path) -> None:
        """Start a prefill engine in place of one that has exited; API servers reconnect."""
        if not ended.child.is_ready:
            raise _cannot_start(ended)
        self._notify(
            f"{_title(ended.child)} {_describe_exit(ended.code)}; requests in prefill fail, "
            "another one starts."
        )
        self._prefill = await self._start_prefill(folder)

    # --- children -----------------------------------------------------------------------------

    def _children(self) -> list[_Child]:
        return [child for child in (self._core, self._prefill, *self._servers) if child is not None]

    def _make_folder(self) -> Path:
        """Create the directory of sockets; a prefill engine's is found by decode engines.

        Raises:
            BadInput: another prefill engine has it.
        """
        options, kv_folder = self._settings.options, self._settings.kv_folder
        if options.role != "prefill" or kv_folder is None:
            return Path(tempfile.mkdtemp(prefix="inferscope-serve-"))
        folder = kv_folder / _PREFILL
        try:
            kv_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise BadInput(
                f"{folder} exists: a prefill engine uses it, or was killed. Choose another "
                "--kv-dir, or remove it."
            ) from None
        except OSError as error:
            raise BadInput(
                f"cannot create {folder}: {error.strerror}. Choose another --kv-dir."
            ) from None
        return folder

    async def _start_core(self, folder: Path) -> _Child:
        role = "decode" if self._settings.is_disaggregated else self._settings.options.role
        return await self._start_engine(_CORE, folder, role)

    async def _start_prefill(self, folder: Path) -> _Child:
        own_id = {ENGINE_ID_VARIABLE: f"{engine_id()}-{_PREFILL}"}
        return await self._start_engine(_PREFILL, folder / _PREFILL, "prefill", own_id)

    async def _start_engine(
        self, name: str, folder: Path, role: Role, environment: Mapping[str, str] | None = None
    ) -> _Child:
        options = self._settings
        settings = {
            "model": options.model,
            "served_name": options.served_name,
            "folder": str(folder),
            "options": replace(options.options, role=role),
            "in_worker": options.in_worker,
        }
        modules = ("inferscope.engine.start", "inferscope.engine.server.core")
        return await self._start(name, *modules, settings=settings, environment=environment or {})

    async def _start_server(self, folder: Path, rank: int) -> _Child:
        options = self._settings
        assert self._listening is not None
        name = f"api-{self._num_started}"
        self._num_started += 1
        kv_folder = folder if options.is_disaggregated else options.kv_folder
        settings = {
            "name": name,
            "rank": rank,
            "handle": self._listening.fileno(),
            "folder": str(folder),
            "model": options.model,
            "served_name": options.served_name,
            "drain_s": options.drain_s,
            "client_timeout_s": options.client_timeout_s,
            "max_connections": options.max_connections,
            "prefill_folder": None if kv_folder is None else str(kv_folder / _PREFILL),
        }
        handle = self._listening.fileno()
        child = await self._start(
            name, "inferscope.engine.server.api", settings=settings, handles=[handle]
        )
        child.rank = rank
        return child

    async def _start(
        self,
        name: str,
        *modules: str,
        settings: dict[str, object],
        handles: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *modules,
            msgspec.json.encode(settings).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=handles,
            # Only the supervisor handles Ctrl-C. The tokenizer's threads would compete with the
            # engine.
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})},
        )
        child = _Child(name, process)
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return child

    async def _watch(self, child: _Child) -> None:
        """Put a child's messages and its exit into the queue."""
        reading = asyncio.create_task(self._read_messages(child))
        # Neither the end of the pipe nor `wait`, which waits for that end, shows that the child has
        # exited: a grandchild may hold the pipe open.
        while child.process.returncode is None and not reading.done():
            await asyncio.wait((reading,), timeout=_POLL_S)
        await asyncio.wait((reading,), timeout=_POLL_S)
        code = child.process.returncode
        if code is None:
            code = await child.process.wait()
        reading.cancel()
        child.ended.set()
        self._events.put_nowait(_Ended(child, code))

    async def _read_messages(self, child: _Child) -> None:
        assert child.process.stdout is not None
        line = b"\n"
        while line:
            # Lines that are no message are a library's output; `readline` reads very long ones in
            # pieces.
            with contextlib.suppress(ValueError):
                line = await child.process.stdout.readline()
                self._events.put_nowait(_ChildMessage(child, _decode_message(line)))

    async def _stop_servers(self) -> None:
        for child in self._servers:
            child.send(STOP)
        await self._wait_for(self._servers, self._settings.drain_s + _API_GRACE_S)

    async def _stop_cores(self) -> None:
        cores = [child for child in (self._core, self._prefill) if child is not None]
        for child in cores:
            child.send(STOP)
        await self._wait_for(cores, _CORE_GRACE_S)

    async def _wait_for(self, children: list[_Child], grace_s: float) -> None:
        """Wait for children to exit, then kill them; a second signal ends the wait."""
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
        children = self._children()
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
        f"{_title(ended.child)} {_describe_exit(ended.code)} while starting. Its output, if any, "
        "is above."
    )


def _title(child: _Child) -> str:
    if child.name == _PREFILL:
        return "the prefill engine's process"
    return "the engine's process" if child.name == _CORE else f"API server {child.rank}"


def _describe_exit(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
