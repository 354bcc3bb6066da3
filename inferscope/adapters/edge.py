"""HTTP edge of a front end: receipt of each request and delivery of its response.

    headers read ─► handler ─► engine's front end ─► first body send ─► … ─► last body send
     └ `receipt`     └ exchange   └ `join`: an id       └ `first_byte`, `emitted`   └ `last_byte`

A body is delivered when the server accepts it: a reading client may have it before the call
returns. Only a send that waits because the client's socket is full is delivered at its return; the
wait is reported as time in which the client did not read (`blocked_ns` of `Emitted`).

Every ASGI server is observed in the same way. An adapter makes an `Edge` with the front end's
probe, calls `watch`, and joins exchanges to its engine's ids by three calls from its own hooks:

    edge.join(request_id, …)     in the task (or a child task) that serves the HTTP request, where
                                 the engine's own id is given out. Once per engine request: several
                                 may belong to one exchange (n > 1, a batch of prompts).
    edge.produced(request_id, n) when n tokens of it are handed to the code that writes them; they
                                 count as emitted with the next body that is sent.
    edge.ended(request_id, why)  only where the front end itself ends a request (a stop string);
                                 otherwise the core's record is used.

The id given to `join` must be the one that the core's ring uses in `Probe.queued`.

A client may declare the parts of its prompt in `X-InferScope-Parts` (`probe.parts`): the record of
the receipt holds them, for engines see only tokens. It also holds the tenant and other attributes
from headers that the operator allows (`probe.headers`).

A POST that ends with status 400 or above was refused or failed; without a join it is recorded with
its status. Other exchanges without a join (health checks, model lists) are not recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any, NamedTuple

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.patching import Patches
from inferscope.adapters.receipt import received_ns, stamp_receipts
from inferscope.probe import (
    HEADER,
    LEAST_BLOCKED_NS,
    AllowedHeaders,
    Labels,
    Parts,
    Probe,
    server_place,
)
from inferscope.records import RequestIndex, finish_of_status

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_MARK = "inferscope.exchange"
_REFUSED, _FAILED = 400, 500
_exchange: ContextVar[Exchange | None] = ContextVar("inferscope_exchange", default=None)


class Prompt(NamedTuple):
    """A prompt, and what separates its cached blocks from those of other prompts."""

    tokens: Sequence[int]
    salt: object = None
    adapter: object = None
    multimodal: object = None

    def compare(self, probe: Probe, index: RequestIndex) -> None:
        """Record how it is like earlier prompts."""
        probe.compare_prompt(
            index,
            self.tokens,
            salt=self.salt,
            adapter=self.adapter,
            multimodal=self.multimodal,
        )


class Exchange:
    """One HTTP request and its response.

    Attributes:
        received_ns: time of the receipt.
        path: path of the request.
        external_id: the client's name for the request, from `X-Request-Id`.
        trace: the request's `traceparent`.
        parts: parts of the prompt, as the client declares them.
        attributes: path, server address, and contents of the allowed headers.
        status: status of the response, 0 before it begins.
        index_by_id: indices of the engine's requests in this exchange, by id.
        waiting: tokens that are produced and not yet written, by request.
        has_ended: whether the last byte is recorded.
        probe: probe of the engine of these requests; the edge's own until they are known.
    """

    __slots__ = (
        "attributes",
        "begun",
        "external_id",
        "has_ended",
        "index_by_id",
        "parts",
        "path",
        "probe",
        "received_ns",
        "status",
        "trace",
        "waiting",
    )

    def __init__(
        self, scope: Message, probe: Probe, labels: Labels, allowed: AllowedHeaders
    ) -> None:
        self.probe = probe
        self.received_ns = received_ns(scope)
        self.path: str = scope["path"]
        self.external_id: str | None = None
        self.trace = ""
        self.parts: Parts = ()
        for name, content in scope["headers"]:
            if name == b"x-request-id":
                self.external_id = content.decode("latin-1")
            elif name == b"traceparent":
                self.trace = content.decode("latin-1")
            elif name == HEADER:
                self.parts = labels.read(content)
        self.attributes = {
            "endpoint": self.path,
            **server_place(scope),
            **allowed.read(scope["headers"]),
        }
        self.status = 0
        self.index_by_id: dict[str, RequestIndex] = {}
        self.waiting: dict[RequestIndex, int] = {}
        self.begun: set[RequestIndex] = set()
        self.has_ended = False


class _Sending:
    """An awaited send, with a flag whether it had to wait.

    It is not a coroutine: `next` is the only call between it and the event loop. It passes on what
    the event loop sends or throws, as `yield from` does: asyncio sends only None, Trio values.
    """

    __slots__ = ("_steps", "has_waited")

    def __init__(self, sending: Awaitable[None]) -> None:
        self._steps: Any = sending.__await__()
        self.has_waited = False

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        awaited = next(self._steps)
        self.has_waited = True
        return awaited

    def send(self, value: Any) -> Any:
        """Resume the awaited steps with a value."""
        return self._steps.send(value) if value is not None else next(self)

    def throw(self, *error: Any) -> Any:
        """Throw a cancellation into the awaited steps; raise it here if they accept none."""
        throw = getattr(self._steps, "throw", None)
        if throw is not None:
            return throw(*error)
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Close the steps, if they can be closed."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


class Edge:
    """Recorder of HTTP receipts and deliveries for the front end's probe.

    Attributes:
        labels: reader of the prompt parts that clients declare.
    """

    def __init__(self, probe: Probe, patches: Patches) -> None:
        """Take the front end's probe, and the adapter's patches, which guard our hooks too."""
        self._probe = probe
        self._patches = patches
        self._by_id: LiveTable[Exchange] = LiveTable(probe)
        self._stamps_receipts = False
        self._numbers = itertools.count(1)
        self.labels = Labels(probe.warn)
        self._allowed = AllowedHeaders(os.environ)

    def record_into(self, probe: Probe) -> None:
        """Record later requests with another probe: the front end's engine was replaced."""
        self._probe, self._by_id, self.labels = probe, LiveTable(probe), Labels(probe.warn)

    def watch(self, app_class: Any) -> bool:
        """Observe all applications of a class (Starlette; FastAPI inherits from it)."""
        return self._patches.replace(app_class, "__call__", self._watched)

    # --- from the adapter's hooks -------------------------------------------------------------

    def join(
        self,
        request_id: str,
        *,
        prompt_tokens: int | None = None,
        external_id: str | None = None,
        parent: str = "",
        asked: Mapping[str, str] | None = None,
        prompt: Prompt | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Join the HTTP request of this task to a request of the engine.

        Args:
            request_id: the engine's id, as in the core's records.
            prompt_tokens: length of the prompt, if it is tokenised by now.
            external_id: id in the response; the client's own `X-Request-Id` takes precedence.
            parent: id of the parent, for one of several answers to the same prompt.
            asked: sampling attributes, as `asked` returns them.
            prompt: the prompt, to be compared with earlier ones.
            probe: probe of the front end of its engine, if one server has several engines.
        """
        exchange = _exchange.get()
        if exchange is None or exchange.has_ended or request_id in self._by_id:
            return
        if probe is not None and not exchange.index_by_id:
            exchange.probe = probe
        index = exchange.probe.received(
            request_id,
            external_id=exchange.external_id or external_id,
            trace=exchange.trace,
            at_ns=exchange.received_ns,
            attributes={**exchange.attributes, **(asked or {})},
            parent=parent,
            prompt_parts=exchange.parts,
        )
        exchange.index_by_id[request_id] = index
        self._by_id.put(request_id, exchange)
        if prompt_tokens is not None:
            exchange.probe.tokenised(index, prompt_tokens)
        if prompt is not None:
            # Behind what this task does next: it sends the request to the engine.
            asyncio.get_running_loop().call_soon(prompt.compare, exchange.probe, index)

    def produced(self, request_id: str, num_tokens: int) -> None:
        """Count tokens that will leave with the next body; do nothing without an exchange."""
        exchange = self._by_id.get(request_id)
        if exchange is None or not num_tokens:
            return
        index = exchange.index_by_id[request_id]
        exchange.waiting[index] = exchange.waiting.get(index, 0) + num_tokens

    def ended(self, request_id: str, reason: str) -> None:
        """Record the end of a request by the front end; the core still considers it running."""
        exchange = self._by_id.get(request_id)
        if exchange is not None:
            exchange.probe.finished(exchange.index_by_id[request_id], reason)

    # --- from the server ----------------------------------------------------------------------

    def _watched(self, original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        patches = self._patches

        async def __call__(app: Any, scope: Message, receive: Any, send: Send) -> None:
            # A mounted application is called within the outer one's exchange.
            if patches.is_off or scope["type"] != "http" or _MARK in scope:
                return await original(app, scope, receive, send)
            if not self._stamps_receipts:  # not before the server has chosen its protocol
                self._stamps_receipts = True
                patches.run(stamp_receipts, patches)
            exchange = patches.run(_begin, scope, self._probe, self.labels, self._allowed)
            if exchange is None:
                return await original(app, scope, receive, send)
            token = _exchange.set(exchange)
            try:
                receive = self._receiving(exchange, receive)
                await original(app, scope, receive, self._sending(exchange, send))
            except Exception:
                exchange.status = exchange.status or _FAILED
                raise
            finally:
                with suppress(ValueError):  # closed by a finaliser, which has another context
                    _exchange.reset(token)
                patches.run(self._end, exchange)

        return __call__

    def _receiving(self, exchange: Exchange, receive: Receive) -> Receive:
        """Wrap an exchange's `receive`: a disconnect of the client ends the exchange.

        A server may go on for seconds (SGLang waits for 2 s before it cleans up).
        """
        patches = self._patches

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                patches.run(self._end, exchange)
            return message

        return watched

    def _sending(self, exchange: Exchange, send: Send) -> Send:
        """Wrap an exchange's `send`: tokens produced before a body is sent leave with it."""
        patches = self._patches

        async def watched(message: Message) -> None:
            leaving = patches.run(_leaving, exchange, message)
            if leaving is None:
                return await send(message)
            began_ns = monotonic_ns()
            sending = _Sending(send(message))
            await sending
            at_ns = monotonic_ns() if sending.has_waited else began_ns
            patches.run(self._sent, exchange, leaving, message, at_ns, at_ns - began_ns)
            return None

        return watched

    def _sent(
        self,
        exchange: Exchange,
        leaving: dict[RequestIndex, int],
        message: Message,
        at_ns: int,
        waited_ns: int,
    ) -> None:
        is_blocked = waited_ns >= LEAST_BLOCKED_NS and not exchange.has_ended
        if leaving or (is_blocked and exchange.index_by_id):
            for index in leaving:
                if index not in exchange.begun:
                    exchange.begun.add(index)
                    exchange.probe.first_byte(index, at_ns=at_ns)
            self._emitted(exchange, leaving, at_ns, waited_ns)
        if not message.get("more_body", False):
            self._end(exchange, at_ns)

    def _emitted(
        self, exchange: Exchange, leaving: dict[RequestIndex, int], at_ns: int, waited_ns: int
    ) -> None:
        if waited_ns < LEAST_BLOCKED_NS:
            exchange.probe.emitted(list(leaving), list(leaving.values()), at_ns=at_ns)
            return
        # All requests of an exchange share its connection, with or without tokens to write.
        indices = list(exchange.index_by_id.values())
        exchange.probe.emitted(
            indices,
            [leaving.get(index, 0) for index in indices],
            at_ns=at_ns,
            blocked_ns=[waited_ns] * len(indices),
        )

    def _end(self, exchange: Exchange, at_ns: int | None = None) -> None:
        """Record the last byte: it was sent at `at_ns`, or the client disconnected now."""
        if exchange.has_ended:
            return
        exchange.has_ended = True
        for request_id, index in exchange.index_by_id.items():
            self._by_id.pop(request_id, None)
            if exchange.status >= _REFUSED:
                exchange.probe.finished(index, finish_of_status(exchange.status), at_ns=at_ns)
            exchange.probe.last_byte(index, at_ns=at_ns)
        if not exchange.index_by_id and exchange.status >= _REFUSED:
            self._refused(exchange)

    def _refused(self, exchange: Exchange) -> None:
        """Record a request that did not reach the engine."""
        index = self._probe.received(
            f"refused-{next(self._numbers)}-{exchange.received_ns}",
            external_id=exchange.external_id,
            trace=exchange.trace,
            at_ns=exchange.received_ns,
            attributes={**exchange.attributes, "status": str(exchange.status)},
        )
        self._probe.finished(index, finish_of_status(exchange.status))
        self._probe.last_byte(index)


def _begin(
    scope: Message, probe: Probe, labels: Labels, allowed: AllowedHeaders
) -> Exchange | None:
    """Return the exchange of a POST; None for other methods, which do not reach the engine."""
    if scope["method"] != "POST":
        return None
    exchange = scope[_MARK] = Exchange(scope, probe, labels, allowed)
    return exchange


def _leaving(exchange: Exchange, message: Message) -> dict[RequestIndex, int] | None:
    """Return the tokens that leave with a body; None for a message that is not a body."""
    if message["type"] == "http.response.start":
        exchange.status = message["status"]
    if message["type"] != "http.response.body":
        return None
    leaving, exchange.waiting = exchange.waiting, {}
    return leaving
