"""An API server's process: HTTP on a socket it shares with the others, a link to the engine."""

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

from inferscope.engine.names import load_tokenizer
from inferscope.engine.request import Finish
from inferscope.engine.server.app import Service, build_app
from inferscope.engine.server.chat import load_template
from inferscope.engine.server.connection import limited
from inferscope.engine.server.exchange import Exchange, Front
from inferscope.engine.server.link import Link
from inferscope.engine.server.parent import CORE_GONE, Failed, Ready, listen_to_parent, say
from inferscope.engine.server.written import Written
from inferscope.errors import InferScopeError
from inferscope.probe import Probe

logger = logging.getLogger(__name__)

_ACCEPT_AT_ONCE = 8
"""Connections that one API server takes in a row: of a burst, the others shall have theirs."""
_BACKLOG = 2048
_KEEP_ALIVE_S = 65


class ApiSettings(msgspec.Struct, frozen=True):
    """What the parent wants.

    Attributes:
        name: of this process among all API servers that this engine ever had.
        rank: its number among those running.
        handle: the listening socket.
        drain_s: how long requests may go on after the word to stop.
        client_timeout_s: how long a client may leave its answer unread, or its request unsaid.
        max_connections: of clients, at a time.
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


class _Server(uvicorn.Server):
    """Uvicorn, which says when it has begun."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_BACKLOG)
        say(Ready())


class _Process:
    """The API server."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._exchanges: set[Exchange] = set()
        self._link: Link | None = None
        self._server: _Server | None = None
        self._is_deaf = False

    async def run(self) -> int:
        """Serve until told to stop; return the process's exit code."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        listen_to_parent(
            lambda word: loop.call_soon_threadsafe(self._on_word, word),
            # As the core does: whoever leaves last takes the folder of sockets along.
            on_loss=lambda: shutil.rmtree(settings.folder, ignore_errors=True),
        )
        tokenizer = load_tokenizer(settings.model)
        template = load_template(settings.model)
        link = self._link = Link(Path(settings.folder), settings.name)
        welcome = await link.connect()
        probe = Probe.open(welcome.info, role="frontend", rank=settings.rank)
        front = Front(
            tokenizer,
            link,
            probe,
            Written(probe),
            self._exchanges,
            max_model_tokens=welcome.max_model_tokens,
            vocab=welcome.vocab,
        )
        service = Service(front, template, settings.served_name, int(time.time()))
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
                log_level="error",  # it warns of every client that speaks no HTTP
                access_log=False,
                server_header=False,
                backlog=_ACCEPT_AT_ONCE,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.drain_s) + 2),
            )
        )
        receiving = asyncio.create_task(link.receive())
        receiving.add_done_callback(self._on_deaf)
        await self._server.serve([socket.socket(fileno=settings.handle)])
        receiving.cancel()
        probe.close()
        link.close()
        return 1 if self._is_deaf else 0

    def _on_deaf(self, receiving: asyncio.Task[None]) -> None:
        """End this process when it can no longer hear the engine; another takes its place."""
        if receiving.cancelled():
            return
        logger.error("the way from the engine has failed", exc_info=receiving.exception())
        assert self._link is not None
        assert self._server is not None
        self._is_deaf = True
        self._link.lose()
        self._server.should_exit = True

    def _on_word(self, word: str) -> None:
        if self._link is None or self._server is None:
            os._exit(0)  # nobody is served yet
        if word == CORE_GONE:
            self._link.lose()
        else:
            self._server.should_exit = True
            asyncio.get_running_loop().call_later(
                self._settings.drain_s, self._end_all, "server_abort"
            )

    def _end_all(self, reason: Finish) -> None:
        for exchange in list(self._exchanges):
            exchange.leave(reason)


def _shed(link: Link, probe: Probe) -> None:
    """Record a connection that was refused: the request in it was never read."""
    index = probe.received(link.name_request())
    probe.finished(index, "shed")
    probe.last_byte(index)


def main() -> int:
    """Run until the parent says stop or is gone; return the process's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C and tells us by the pipe
    # Uvicorn stops in order on SIGTERM, and raises it again when it has.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = msgspec.json.decode(sys.argv[1], type=ApiSettings)
    try:
        return asyncio.run(_Process(settings).run())
    except InferScopeError as error:
        say(Failed(str(error), error.exit_code))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
