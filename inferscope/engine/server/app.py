"""Routes of an API server."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inferscope import __version__
from inferscope.engine.server import protocol
from inferscope.engine.server.answers import Answer, Kind
from inferscope.engine.server.bodies import Bodies
from inferscope.engine.server.chat import Template
from inferscope.engine.server.connection import Connection
from inferscope.engine.server.errors import ApiError, ClientDisconnected, bad_field
from inferscope.engine.server.exchange import (
    LONG_PROMPT_CHARS,
    Exchange,
    FrontEndContext,
    Origin,
    check_length,
)
from inferscope.engine.server.metrics import CONTENT_TYPE, page
from inferscope.engine.server.parts import sections_of
from inferscope.engine.server.protocol import GenerationCall
from inferscope.engine.server.stream import Headers, send_body, send_events, send_whole
from inferscope.probe import HEADER, AllowedHeaders, Labels, server_place

_NAME = re.compile(rb"[\x20-\x7e\x80-\xff]+")
"""Bytes allowed in a response header."""
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Service:
    """Model, template and limits that an API server serves.

    Attributes:
        front: shared context of all exchanges.
        template: function from a chat to a prompt.
        served_name: served name of the model.
        created: Unix time of the start, for the list of models.
        bodies: memory budget of request bodies.
    """

    front: FrontEndContext
    template: Template
    served_name: str
    created: int
    bodies: Bodies = field(default_factory=Bodies)
    _reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    async def read(self, read: Callable[[bytes], _Read], receive: Receive) -> _Read:
        """Read and parse a request's body; large ones in a thread, two at a time for memory."""
        with self.bodies.hold() as held:
            body = await held.read(receive)
            if len(body) < LONG_PROMPT_CHARS:
                return read(body)
            async with self._reading:
                return await asyncio.to_thread(read, body)

    def check_model(self, name: str | None) -> None:
        """Reject a request for another model; a request without a model name is accepted."""
        if name not in (None, self.served_name):
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist. Use {self.served_name!r}.",
                param="model",
                code="model_not_found",
            )


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service."""
    plain, labels = _Plain(service), Labels(service.front.probe.warn)
    generation = partial(_Generation, service, labels=labels, allowed=AllowedHeaders(os.environ))
    app = Starlette(
        routes=[
            Route("/v1/completions", generation("completion"), methods=["POST"]),
            Route("/v1/chat/completions", generation("chat"), methods=["POST"]),
            Route("/v1/models", plain.models),
            Route("/v1/models/{name:path}", plain.model),
            Route("/health", plain.health),
            Route("/version", plain.version),
            Route("/metrics", plain.metrics),
            Route("/tokenize", partial(plain.read, plain.tokenize), methods=["POST"]),
            Route("/detokenize", partial(plain.read, plain.detokenize), methods=["POST"]),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse, Exception: _fail},
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body with some clients
    return _Edge(app)


class _Edge:
    """Outermost ASGI layer, which notes each request's arrival time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["arrived_ns"] = time.monotonic_ns()
        await self._app(scope, receive, send)


class _Generation:
    """Endpoint that generates text."""

    def __init__(
        self, service: Service, kind: Kind, labels: Labels, allowed: AllowedHeaders
    ) -> None:
        self._allowed = allowed
        self._service = service
        self._kind = kind
        self._labels = labels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        answer = Answer(self._kind, service.served_name, service.front.tokenizer)
        connection: Connection = scope["state"]["connection"]
        given, label_header = _given_name(scope), _header(scope, HEADER)
        headers: Headers = [(b"x-request-id", given or answer.id.encode())]
        allowed = self._allowed.read(scope["headers"])
        origin = Origin(
            arrived_ns=scope["arrived_ns"],
            external_id=None if given is None else _text(given),
            trace=(_header(scope, b"traceparent") or b"").decode("latin-1"),
            endpoint=scope["path"],
            connection=connection,
            parts=() if label_header is None else self._labels.read(label_header),
            attributes={"response_id": answer.id, **server_place(scope), **allowed},
        )
        call, error = None, None
        try:
            call = await service.read(self._read, receive)
        except ApiError as refused:
            error = refused
        except ClientDisconnected:
            return
        exchange = Exchange(service.front, origin, call)
        disconnect_watch = asyncio.create_task(_watch_disconnect(receive, exchange, connection))
        try:
            if error is not None:
                raise error
            assert call is not None
            await exchange.submit(call)
            if call.is_stream:
                await send_events(exchange, answer, call, send, headers)
            else:
                await send_whole(exchange, answer, send, headers)
        except ApiError as refused:
            exchange.refuse(refused.status)
            await send_body(send, refused.status, refused.body, headers + _headers(refused))
        except ClientDisconnected:
            exchange.end_early(connection.lost_finish)
        finally:
            disconnect_watch.cancel()
            exchange.close()

    def _read(self, body: bytes) -> GenerationCall:
        service = self._service
        if self._kind == "completion":
            completion = protocol.parse(body, protocol.CompletionRequest)
            service.check_model(completion.model)
            return protocol.completion_call(
                completion, max_model_tokens=service.front.max_model_tokens
            )
        chat = protocol.parse(body, protocol.ChatRequest)
        service.check_model(chat.model)
        messages, template_args = chat.messages, chat.chat_template_kwargs or {}
        prompt = service.template(messages, template_args)
        write = partial(service.template, template_args=template_args, begins_answer=False)
        sections = sections_of(messages, prompt, write) if service.front.probe.on else ()
        return protocol.chat_call(
            chat, prompt, max_model_tokens=service.front.max_model_tokens, sections=sections
        )


class _Plain:
    """Endpoints that do not generate text."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.served_name,
            "object": "model",
            "created": service.created,
            "owned_by": "inferscope",
            "max_model_len": service.front.max_model_tokens,
        }

    async def health(self, request: Request) -> Response:
        if outage := self._service.front.link.outage:
            raise ApiError(503, outage, code="engine_stopped")
        return Response()

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        await self.health(request)
        try:
            stats = await self._service.front.link.stats()
        except TimeoutError:
            raise ApiError(503, "the engine's process is silent.", code="engine_silent") from None
        content = page(stats, model_name=self._service.served_name)
        return Response(content, headers={"content-type": CONTENT_TYPE})

    async def read(self, read: Callable[[bytes], Response], request: Request) -> Response:
        return await self._service.read(read, request.receive)

    def tokenize(self, body: bytes) -> Response:
        service = self._service
        fields = protocol.parse(body, protocol.TokenizeRequest)
        service.check_model(fields.model)
        if fields.messages is not None:
            text = service.template(fields.messages, {})
        elif fields.prompt is not None:
            text = fields.prompt
        else:
            raise bad_field("prompt", "prompt and messages are missing. Give one of them.")
        longest = service.front.max_model_tokens
        check_length(text, max_model_tokens=longest)
        tokens = service.front.tokenizer.encode(text)
        return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens})

    def detokenize(self, body: bytes) -> Response:
        service = self._service
        fields = protocol.parse(body, protocol.DetokenizeRequest)
        service.check_model(fields.model)
        if len(fields.tokens) > protocol.MOST_DETOKENIZED:
            raise bad_field(
                "tokens",
                f"tokens holds {len(fields.tokens)} ids. Give at most {protocol.MOST_DETOKENIZED}.",
            )
        if min(fields.tokens, default=0) < 0:
            raise bad_field("tokens", "tokens holds a negative id. Give ids from 0 on.")
        return _json({"prompt": service.front.tokenizer.decode(fields.tokens)})


async def _watch_disconnect(receive: Receive, exchange: Exchange, connection: Connection) -> None:
    """End the exchange early when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not exchange.is_answered:  # after the last chunk, a disconnect is expected
        exchange.end_early(connection.lost_finish)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        hint = f" Use {allowed}." if allowed else " See docs/serve.md."
        text = f"{request.method} {request.url.path[:200]}: {error.detail}.{hint}"
        error = ApiError(error.status_code, text, headers=dict(error.headers or {}))
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, headers=error.headers, media_type="application/json")


async def _fail(request: Request, error: Exception) -> Response:
    """Return a 500 for an internal error; Starlette logs the error itself."""
    return await _refuse(
        request, ApiError(500, "the server failed with an internal error. See its log.")
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _headers(error: ApiError) -> Headers:
    return [(name.encode(), value.encode()) for name, value in error.headers.items()]


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((bytes(value) for key, value in scope["headers"] if key == name), None)


def _text(value: bytes) -> str:
    """Decode a header: non-ASCII bytes are UTF-8 in practice and Latin-1 by specification."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _given_name(scope: Scope) -> bytes | None:
    given = _header(scope, b"x-request-id")
    return given if given and _NAME.fullmatch(given) else None
