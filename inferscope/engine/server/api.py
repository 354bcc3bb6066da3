"""Process of an API server: HTTP on a shared listening socket, and a link to the core."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import uvicorn

from inferscope.engine.model_names import load_tokenizer
from inferscope.engine.request import Finish
from inferscope.engine.server.app import Service, build_app
from inferscope.engine.server.chat import load_template
from inferscope.engine.server.connection import limited
from inferscope.engine.server.delivery_log import DeliveryLog
from inferscope.engine.server.exchange import Exchange, FrontEndContext
from inferscope.engine.server.link import Link
from inferscope.engine.server.parent import (
    CORE_GONE,
    Failed,
    Ready,
    listen_to_parent,
    send_to_parent,
)
from inferscope.engine.server.router import EngineLink, Router
from inferscope.errors import InferScopeError
from inferscope.probe import Probe

logger = logging.getLogger(__name__)

_ACCEPT_BURST = 8
"""Maximum connections accepted in a row, so that a burst spreads over the API servers."""
_BACKLOG = 2048
_KEEP_ALIVE_S = 65


class ApiSettings(msgspec.Struct, frozen=True):
    """Settings of an API server, sent by the supervisor.

    Attributes:
        name: name that no other API server of this engine has or had.
        rank: index among the running API servers.
        handle: file descriptor of the listening socket.
        drain_s: seconds that requests may continue after the stop command.
        client_timeout_s: seconds without progress of a client that sends or reads.
        max_connections: maximum number of open client connections.
        prefill_folder: directory of the prefill engine's socket; None without one.
    """

    name: str
    rank: int
    handle: int
    folder: str
    model: str
    served_name: str
    drain_s: float
    client_timeout_s: float
    max_connections: int
    prefill_folder: str | None = None


class _Server(uvicorn.Server):
    """Uvicorn server that reports to the supervisor when it is ready."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_BACKLOG)
        send_to_parent(Ready())


class _Process:
    """State of the API server process."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._exchanges: set[Exchange] = set()
        self._link: EngineLink | None = None
        self._server: _Server | None = None
        self._is_core_unreachable = False

    async def run(self) -> int:
        """Serve until the stop command; return the process's exit code."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        listen_to_parent(
            lambda command: loop.call_soon_threadsafe(self._on_command, command),
            # Every process removes the folder of sockets, in case it exits last.
            on_loss=lambda: shutil.rmtree(settings.folder, ignore_errors=True),
        )
        tokenizer = load_tokenizer(settings.model)
        template = load_template(settings.model)
        folder = Path(settings.folder)
        link: EngineLink = (
            Link(folder, settings.name)
            if settings.prefill_folder is None
            else Router(folder, Path(settings.prefill_folder), settings.name)
        )
        self._link = link
        welcome = await link.connect()
        probe = Probe.open(welcome.info, role="frontend", rank=settings.rank)
        context = FrontEndContext(
            tokenizer,
            link,
            probe,
            DeliveryLog(probe),
            self._exchanges,
            max_model_tokens=welcome.max_model_tokens,
            vocab=welcome.vocab,
        )
        service = Service(context, template, settings.served_name, int(time.time()))
        self._server = _Server(
            uvicorn.Config(
                build_app(service),
                http=limited(
                    settings.client_timeout_s, settings.max_connections, partial(_shed, link, probe)
                ),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # it warns of every client that does not speak HTTP
                access_log=False,
                server_header=False,
                backlog=_ACCEPT_BURST,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.drain_s) + 2),
            )
        )
        receiving = asyncio.create_task(link.receive())
        receiving.add_done_callback(self._on_core_unreachable)
        await self._server.serve([socket.socket(fileno=settings.handle)])
        receiving.cancel()
        if link.is_lost:
            probe.abandon()
        probe.close()
        link.close()
        return 1 if self._is_core_unreachable else 0

    def _on_core_unreachable(self, receiving: asyncio.Task[None]) -> None:
        """Stop this process if it cannot receive from the core; the supervisor replaces it."""
        if receiving.cancelled():
            return
        logger.error(
            "receiving from the engine failed; this API server exits and is replaced",
            exc_info=receiving.exception(),
        )
        assert self._link is not None
        assert self._server is not None
        self._is_core_unreachable = True
        self._link.mark_lost()
        self._server.should_exit = True

    def _on_command(self, command: str) -> None:
        if self._link is None or self._server is None:
            os._exit(0)  # no client is connected yet
        if command == CORE_GONE:
            self._link.mark_lost()
        else:
            self._server.should_exit = True
            asyncio.get_running_loop().call_later(
                self._settings.drain_s, self._end_all, "server_abort"
            )

    def _end_all(self, reason: Finish) -> None:
        for exchange in list(self._exchanges):
            exchange.end_early(reason)


def _shed(link: EngineLink, probe: Probe) -> None:
    """Record a rejected connection, whose request was not read, as shed."""
    index = probe.received(link.name_request())
    probe.finished(index, "shed")
    probe.last_byte(index)


def main() -> int:
    """Run until the parent sends stop or exits; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and sends stop
    # Uvicorn shuts down on SIGTERM and then raises the signal again.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = msgspec.json.decode(sys.argv[1], type=ApiSettings)
    try:
        return asyncio.run(_Process(settings).run())
    except InferScopeError as error:
        send_to_parent(Failed(str(error), error.exit_code))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
