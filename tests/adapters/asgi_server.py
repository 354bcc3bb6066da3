"""A small ASGI server on uvicorn, in a thread, whose front end is watched."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from inferscope.adapters.edge import Edge
from inferscope.probe import Probe

BUSY_S = 0.3


class Front:
    """An engine's front end, as far as an edge is concerned: ids, tokens, answers."""

    def __init__(self) -> None:
        self.edge: Edge | None = None
        self.num_done = 0
        self.probes: dict[str, Probe] = {}
        """Probes of further engines behind this server, by the name in the query."""
        self.linger_s = 0.0
        """For how long the server is busy between the write of a body and its return."""
        self.is_busy, self.may_go_on = threading.Event(), threading.Event()
        """Events of the busy loop: a request is in it, and may leave it."""

    def app(self) -> Any:
        """Return the application, within one that counts the calls that are over."""
        inner = self._routes()

        async def outer(scope: Any, receive: Any, send: Any) -> None:
            async def lingering(message: Any) -> None:
                await send(message)
                time.sleep(self.linger_s)

            try:
                await inner(scope, receive, lingering)
            finally:
                self.num_done += 1

        return outer

    def _routes(self) -> Starlette:
        routes = [
            Route("/stream", self.stream, methods=["POST"]),
            Route("/plain", self.plain, methods=["POST"]),
            Route("/twins", self.twins, methods=["POST"]),
            Route("/busy-loop", self.busy_loop, methods=["POST"]),
            Route("/slow", self.slow, methods=["POST"]),
            Route("/flood", self.flood, methods=["POST"]),
            Route("/broken", self.broken, methods=["POST"]),
            Route("/busy", lambda request: Response(status_code=429), methods=["POST"]),
            Route("/tokenize", lambda request: JSONResponse([1]), methods=["POST"]),
            Route("/health", lambda request: Response(status_code=503)),
        ]
        return Starlette(routes=[*routes, Mount("/under", Starlette(routes=routes))])

    def join(self, request: Request, suffix: str = "") -> str:
        """Assign a request its id in the engine."""
        request_id = f"engine-{request.query_params.get('n', '0')}{suffix}"
        if self.edge is not None:
            asked = request.query_params.get("asked")
            given = None if asked is None else {"max_tokens": asked}
            self.edge.join(
                request_id,
                prompt_tokens=5,
                external_id="ours",
                asked=given,
                probe=self.probes.get(request.query_params.get("engine", "")),
            )
        return request_id

    def produced(self, request_id: str, num: int) -> None:
        """Report tokens that are about to be written."""
        if self.edge is not None:
            self.edge.produced(request_id, num)

    async def stream(self, request: Request) -> Response:
        """Answer 3 times 2 tokens, each in a body of its own."""
        request_id = self.join(request)

        async def body() -> Iterator[bytes]:  # type: ignore[misc]
            for _ in range(3):
                await asyncio.sleep(0.01)
                self.produced(request_id, 2)
                yield b"data: xx\n\n"

        return StreamingResponse(body())

    async def plain(self, request: Request) -> Response:
        """Answer 4 tokens at once; a fifth came after a stop string that the front end saw."""
        request_id = self.join(request)
        for _ in range(4):
            self.produced(request_id, 1)
        if self.edge is not None:
            self.edge.ended(request_id, "stop")
        return JSONResponse({"text": "xxxx"})

    async def twins(self, request: Request) -> Response:
        """Answer twice, from tasks of their own."""

        async def one(number: int) -> None:
            self.produced(self.join(request, f"-{number}"), number + 1)

        await asyncio.gather(one(0), one(1))
        return JSONResponse({})

    async def busy_loop(self, request: Request) -> Response:
        """Answer a while after the signal; the server does nothing else meanwhile."""
        self.join(request)
        self.is_busy.set()
        self.may_go_on.wait(30)
        time.sleep(BUSY_S)
        return JSONResponse({})

    async def slow(self, request: Request) -> Response:
        """Answer one token, then none for long."""
        request_id = self.join(request)

        async def body() -> Iterator[bytes]:  # type: ignore[misc]
            self.produced(request_id, 1)
            yield b"data: x\n\n"
            await asyncio.sleep(30)

        return StreamingResponse(body())

    async def flood(self, request: Request) -> Response:
        """Answer one token in more bytes than any socket buffers."""
        request_id = self.join(request)

        async def body() -> Iterator[bytes]:  # type: ignore[misc]
            self.produced(request_id, 1)
            yield b"x" * 32_000_000

        return StreamingResponse(body())

    async def broken(self, request: Request) -> Response:
        """Fail before the engine receives it."""
        raise RuntimeError("their own fault")


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve until the context ends."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        config = uvicorn.Config(app, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [held]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{held.getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(30)
