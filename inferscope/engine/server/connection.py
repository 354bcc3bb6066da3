"""A client's connection: what it may send, how long it may take, and what it has taken.

A client that leaves its answer unread is held by its connection, not by its request, so every
route is covered. Bytes are with the client when they have left our buffer; the kernel's are kept
small (see `launch.listen`).
"""

from __future__ import annotations

import asyncio
import http
import socket
import time
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferscope.engine.request import Finish
from inferscope.engine.server.errors import ApiError, Left

_MOST_HEAD_BYTES = 64 << 10
_BODY_BYTES = 1 << 20
"""Each so much of a body that has come gives the rest as much time again."""
_LOOKS = 4
"""How often a silent client is looked at until its time is over."""
_PEER_LOOK_S = 0.1
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Any client must pass over it (RFC 9110, section 15.2), and the kernel of one that is gone says
so."""


class Connection(HttpToolsProtocol):
    """One client.

    Attributes:
        timeout_s: how long its head may take, then each MiB of its body, and how long it may leave
            an answer unread.
        most: connections that an API server has at a time.
        on_shed: called for each connection that is refused beyond that number.
        parting: how its requests end when it is lost.
    """

    timeout_s = 30.0
    most = 2048
    on_shed: Callable[[], None] = staticmethod(lambda: None)
    parting: Finish = "client_cancel"

    # --- what the application needs -----------------------------------------------------------

    async def drained(self) -> int:
        """Wait until the client has what was sent; return for how long it had not read, in ns.

        Raises:
            Left: it never will.
        """
        if not self._is_lost and self.flow.write_paused:
            paused_ns = self._paused_ns
            await self.flow.drain()
            if not self._has_lost_bytes:
                return time.monotonic_ns() - paused_ns  # it may be closed by now, as it should
        if self._is_lost:
            raise Left
        return 0

    @property
    def is_stuck(self) -> bool:
        """The client has not taken all that was sent."""
        return self.flow.write_paused

    def abort(self) -> None:
        """End it, whatever is still to be sent."""
        self.transport.abort()

    # --- its life -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
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
            self._make_room()

    def _make_room(self) -> None:
        """End the connection that has been without a whole request for the longest, or this one."""
        waiting = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and each._is_waiting
        ]
        if waiting:
            min(waiting, key=lambda each: each._waits_since_s).transport.abort()
        else:
            self.on_shed()
            self._refuse(
                ApiError(
                    503,
                    f"the server has {self.most} connections, all with a request. Try again.",
                    code="too_many_connections",
                )
            )

    @property
    def _is_waiting(self) -> bool:
        """Return whether a request, or the rest of one, is still to come."""
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete or cycle.more_body
        return is_idle and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note whether the client has all that was sent."""
        self._is_lost = True
        self._has_lost_bytes = self.flow.write_paused
        for watch in (self._read_watch, self._write_watch, self._peer_watch):
            if watch is not None:
                watch.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep a connection whose client waits for its answer, having said all it had to say."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False
        # One that has closed its end altogether looks the same until something is sent to it.
        is_modern = cycle.scope["http_version"] == "1.1"
        if is_modern and not cycle.response_started and not self.pipeline:
            self.transport.write(_PROBE)
        self._look_for_peer()
        return True

    def _look_for_peer(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._peer_watch = self.loop.call_later(_PEER_LOOK_S, self._look_for_peer)

    # --- what comes in ------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, and bound a head that does not end."""
        self._has_begun_head = False
        super().data_received(data)
        # Of a chunk in which a head begins, it is not known how much of it is head.
        if self._is_in_head and not self._has_begun_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MOST_HEAD_BYTES:
                self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        """Give the head its time."""
        super().on_message_begin()
        self._is_in_head = True
        self._has_begun_head = True
        self._num_head_bytes = 0
        self._num_field_bytes = 0
        self._waits_since_s = self.loop.time()
        self._watch_reading()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Start the request, and give its body its time."""
        self._is_in_head = False
        self._num_body_bytes = 0
        self._watch_reading()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the client has said all."""
        if self._read_watch is not None:
            self._read_watch.cancel()
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > _MOST_HEAD_BYTES:
            self._error = _head_too_large()
            raise ValueError("too large")  # to the parser, which ends with `send_400_response`

    def _watch_reading(self) -> None:
        if self._read_watch is not None:
            self._read_watch.cancel()
        self._read_watch = self.loop.call_later(self.timeout_s, self._look_at_reading)

    def _look_at_reading(self) -> None:
        """End the wait for a head or a body, unless much of it came or we do not read on."""
        is_coming = self._num_body_bytes >= _BODY_BYTES
        self._num_body_bytes -= _BODY_BYTES if is_coming else 0
        if self._is_in_head or not (is_coming or self.flow.read_paused):
            self._refuse(
                ApiError(
                    408,
                    f"the request did not come within {self.timeout_s:g} s.",
                    code="request_timeout",
                )
            )
        else:
            self._watch_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as everything else is answered."""
        self._refuse(
            self._error
            or ApiError(
                400, "the request is not valid HTTP; nothing of it was served.", code="invalid_http"
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """End the connection with an error, if there is still a place for one."""
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

    # --- what goes out ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Watch the client: it has not taken all that was sent."""
        super().pause_writing()
        self._paused_ns = time.monotonic_ns()
        self._moved_s = self.loop.time()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Note that it has."""
        super().resume_writing()
        if self._write_watch is not None:
            self._write_watch.cancel()

    def _watch_writing(self) -> None:
        self._write_watch = self.loop.call_later(self.timeout_s / _LOOKS, self._look_at_writing)

    def _look_at_writing(self) -> None:
        """End a connection whose client has read nothing for too long."""
        now_s = self.loop.time()
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < self._unsent_bytes:
            self._moved_s = now_s
        elif now_s - self._moved_s >= self.timeout_s:
            self.parting = "timeout"
            self.transport.abort()
            return
        self._unsent_bytes = unsent_bytes
        self._watch_writing()


def limited(timeout_s: float, most: int, on_shed: Callable[[], None]) -> type[Connection]:
    """Return the connection class with this timeout and this maximum number."""
    own = {"timeout_s": timeout_s, "most": most, "on_shed": staticmethod(on_shed)}
    return type("Connection", (Connection,), own)


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"the request line and headers have more than {_MOST_HEAD_BYTES} bytes. Send fewer.",
        code="headers_too_large",
    )
