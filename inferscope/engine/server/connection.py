"""Client connection: limits on what a client sends, timeouts, and delivery.

The timeout for an unread response applies to the connection, not to the request, so it covers every
route. Bytes count as delivered when they have left the process's buffer; the kernel's buffer is
kept small (see `launch.listen`).
"""

from __future__ import annotations

import asyncio
import http
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferscope.engine.request import Finish
from inferscope.engine.server.errors import ApiError, ClientDisconnected

_MOST_HEAD_BYTES = 64 << 10
_BODY_BYTES = 1 << 20
"""Bytes of a body that extend its deadline by another timeout."""
_CHECKS = 4
"""Number of checks of a client that does not read, per timeout."""
_PEER_CHECK_S = 0.1
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response that clients must ignore (RFC 9110, section 15.2); the kernel of a client that
has exited answers it with a reset."""


class Connection(HttpToolsProtocol):
    """Connection of one client.

    Attributes:
        timeout_s: maximum seconds for a request's head, for each MiB of its body, and without
            reading a response.
        most: maximum number of connections of an API server.
        on_shed: callback for each connection rejected beyond that number.
        evictable: connections to close for new ones, with the time since which each waits.
        lost_finish: finish reason of its requests if the connection is lost.
    """

    timeout_s = 30.0
    most = 2048
    on_shed: Callable[[], None] = staticmethod(lambda: None)
    evictable: ClassVar[deque[tuple[float, Connection]]] = deque()
    lost_finish: Finish = "client_cancel"

    # --- for the application ----------------------------------------------------------------

    async def drained(self) -> int:
        """Wait until all sent bytes are delivered; return how long the client did not read, in ns.

        Raises:
            ClientDisconnected: the connection was lost before.
        """
        if not self._is_lost and self.flow.write_paused:
            paused_ns = self._paused_ns
            await self.flow.drain()
            if not self._has_lost_bytes:
                return time.monotonic_ns() - paused_ns  # the connection may be closed by now
        if self._is_lost:
            raise ClientDisconnected
        return 0

    @property
    def is_stuck(self) -> bool:
        """Whether sent bytes are not yet delivered."""
        return self.flow.write_paused

    def abort(self) -> None:
        """Close the connection and discard unsent bytes."""
        self.transport.abort()

    # --- lifecycle ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Initialize the connection and enforce the connection limit."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.app_state = {**self.app_state, "connection": self}
        self._is_lost = False
        self._has_lost_bytes = False
        self._error: ApiError | None = None
        self._is_in_head = True
        self._has_begun_head = False
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._waits_since_s = self.loop.time()
        self._moved_s = 0.0
        self._paused_ns = 0
        self._unsent_bytes = 0
        self._peer_watch: asyncio.TimerHandle | None = None
        self._write_watch: asyncio.TimerHandle | None = None
        self._read_watch: asyncio.TimerHandle | None = None
        self._watch_reading()
        if len(self.connections) > self.most:
            self._evict_or_refuse()

    def _evict_or_refuse(self) -> None:
        """Close the connection that has waited longest for a request, or reject this one."""
        oldest = self._next_evictable()
        if oldest is None:
            self._list_evictable()
            oldest = self._next_evictable()
        if oldest is not None:
            oldest.transport.abort()
        else:
            self.on_shed()
            self._refuse(
                ApiError(
                    503,
                    f"the server has {self.most} connections, all with a request. Try again later.",
                    code="too_many_connections",
                )
            )

    def _list_evictable(self) -> None:
        """List the connections that wait for a request, those that have waited longest first.

        The list is used up before the next one is made: with a search for each new connection, a
        burst of some thousands delays every other client by a second.
        """
        waiting = [
            each for each in self.connections if isinstance(each, Connection) and each._is_waiting
        ]
        waiting.sort(key=lambda each: each._waits_since_s)
        self.evictable.extend((each._waits_since_s, each) for each in waiting if each is not self)

    def _next_evictable(self) -> Connection | None:
        """Return the first listed connection that still waits; None if none is left."""
        while self.evictable:
            since_s, each = self.evictable.popleft()
            if each is not self and each._is_waiting and each._waits_since_s == since_s:
                return each
        return None

    @property
    def _is_waiting(self) -> bool:
        """Whether the connection waits for a request, or for the rest of one."""
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete or cycle.more_body
        return is_idle and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note whether sent bytes were lost, and cancel all timers."""
        self._is_lost = True
        self._has_lost_bytes = self.flow.write_paused
        for watch in (self._read_watch, self._write_watch, self._peer_watch):
            if watch is not None:
                watch.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep a half-closed connection whose client waits for its response."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        # A fully closed client looks the same until something is sent to it.
        is_modern = cycle.scope["http_version"] == "1.1"
        if is_modern and not cycle.response_started and not self.pipeline:
            self.transport.write(_PROBE)
        self._check_peer()
        return True

    def _check_peer(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._peer_watch = self.loop.call_later(_PEER_CHECK_S, self._check_peer)

    # --- receiving -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the data and limit the size of the request's head."""
        self._has_begun_head = False
        super().data_received(data)
        # In data where a head begins, the size of the head is unknown.
        if self._is_in_head and not self._has_begun_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MOST_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        """Start the timeout of the request's head."""
        super().on_message_begin()
        self._is_in_head = True
        self._has_begun_head = True
        self._num_head_bytes = 0
        self._num_field_bytes = 0
        self._waits_since_s = self.loop.time()
        self._watch_reading()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Start the request and the timeout of its body."""
        self._is_in_head = False
        self._num_body_bytes = 0
        self._watch_reading()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timeout: the request is complete."""
        if self._read_watch is not None:
            self._read_watch.cancel()
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > _MOST_HEAD_BYTES:
            self._error = _head_too_large()
            raise ValueError("too large")  # the parser then calls `send_400_response`

    def _watch_reading(self) -> None:
        if self._read_watch is not None:
            self._read_watch.cancel()
        self._read_watch = self.loop.call_later(self.timeout_s, self._check_read_timeout)

    def _check_read_timeout(self) -> None:
        """Reject the request if its head or body is overdue; restart the timeout otherwise."""
        is_coming = self._num_body_bytes >= _BODY_BYTES
        self._num_body_bytes -= _BODY_BYTES if is_coming else 0
        if self._is_in_head or not (is_coming or self.flow.read_paused):
            self._refuse(
                ApiError(
                    408,
                    f"the request did not arrive within {self.timeout_s:g} s. Send it again.",
                    code="request_timeout",
                )
            )
        else:
            self._watch_reading()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with an error of OpenAI's form."""
        self._refuse(
            self._error
            or ApiError(
                400,
                "the request is not valid HTTP and was not served. Send HTTP/1.1.",
                code="invalid_http",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Close the connection with an error response, unless a response has begun."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        phrase = http.HTTPStatus(error.status).phrase
        head = (
            f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(error.body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + error.body)
        self.transport.close()

    # --- sending ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the checks of a client that does not read."""
        super().pause_writing()
        self._paused_ns = time.monotonic_ns()
        self._moved_s = self.loop.time()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Stop the checks: the client has read."""
        super().resume_writing()
        if self._write_watch is not None:
            self._write_watch.cancel()

    def _watch_writing(self) -> None:
        self._write_watch = self.loop.call_later(
            self.timeout_s / _CHECKS, self._check_write_timeout
        )

    def _check_write_timeout(self) -> None:
        """Abort the connection if the client has read nothing for `timeout_s`."""
        now_s = self.loop.time()
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < self._unsent_bytes:
            self._moved_s = now_s
        elif now_s - self._moved_s >= self.timeout_s:
            self.lost_finish = "timeout"
            self.transport.abort()
            return
        self._unsent_bytes = unsent_bytes
        self._watch_writing()


def limited(timeout_s: float, most: int, on_shed: Callable[[], None]) -> type[Connection]:
    """Return a connection class with this timeout and maximum number of connections."""
    own = {
        "timeout_s": timeout_s,
        "most": most,
        "on_shed": staticmethod(on_shed),
        "evictable": deque(),
    }
    return type("Connection", (Connection,), own)


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"the request line and headers have more than {_MOST_HEAD_BYTES} bytes. Send fewer.",
        code="headers_too_large",
    )
