"""A server that misbehaves on purpose: a socket and a script of what to write to it.

It runs in a thread with an event loop of its own, so that what it does to a client in the test's
loop, or in another process, is what a real server would do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeAlias

Script: TypeAlias = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""What to do once a request has been read."""

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MODELS = b'{"object": "list", "data": [{"id": "raw", "owned_by": "test"}]}'


def whole(status: str, body: bytes, *, headers: str = "") -> bytes:
    """Return a whole HTTP response with a JSON body."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def sending(*pieces: bytes, pause_s: float = 0.0) -> Script:
    """Write pieces, apart, and close."""

    async def script(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return script


class RawServer:
    """Answers /v1/models as it should, /tokenize with 404, and everything else by its script.

    Attributes:
        url: where it listens.
        asked_at: the loop's time of each scripted request, as it arrived.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._connections: set[asyncio.Task[None]] = set()
        self.asked_at: list[float] = []
        self.url = ""

    def __enter__(self) -> RawServer:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # the streams' own callbacks

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        path = head.split()[1]
        await reader.readexactly(int(fields.get("Content-Length", "0")))
        if path == "/v1/models":
            writer.write(whole("200 OK", MODELS))
        elif path == "/tokenize":
            writer.write(whole("404 Not Found", b"{}"))
        else:
            self.asked_at.append(asyncio.get_running_loop().time())
            await self._script(writer)
        await writer.drain()
