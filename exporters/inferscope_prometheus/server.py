"""The HTTP server of one page: bounded connections, optionally TLS and a bearer token.

The client library's own server asks for no token, and shakes hands on the thread that accepts: one
client that connects and says nothing would keep all others out.

Handshake and request together have one deadline, however their bytes come. Where all places are
taken, a new connection gets the place of the one that has not sent its request for the longest: a
scraper sends its own at once, so connections that are only held keep none out.
"""

from __future__ import annotations

import hmac
import io
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inferscope.deadline import DeadlineReader
from inferscope.errors import BadInput
from inferscope_prometheus.page import (
    OPEN_METRICS,
    TEXT,
    compressed,
    takes_gzip,
    wants_open,
)
from inferscope_prometheus.settings import PrometheusSettings, read_token

_logger = logging.getLogger(__name__)

_PATHS = ("/metrics", "/")
_HEALTH = "/health"


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may take of the server.

    Attributes:
        connections: maximum number at a time.
        per_peer: of these, of one address.
        head_bytes: maximum size of a request.
        request_s: maximum time for the handshake and the first request.
        idle_s: maximum time for each further request on the same connection.
        answer_s: maximum time to take an answer; later, another may have the place.
    """

    connections: int = 32
    per_peer: int = 8
    head_bytes: int = 16 << 10
    request_s: float = 10.0
    idle_s: float = 65.0
    answer_s: float = 10.0


class MetricsServer:
    """Serves what `render` returns.

    Attributes:
        port: that it was given.
    """

    def __init__(
        self,
        settings: PrometheusSettings,
        render: Callable[[bool], bytes],
        *,
        is_alive: Callable[[], bool] = lambda: True,
        beside: MetricsServer | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Bind and serve.

        Args:
            settings: where, and to whom.
            render: returns the page, as OpenMetrics or not; any thread may call it.
            is_alive: returns whether the page is still being renewed; any thread may call it.
            beside: one that ends soon; its address may be part of this one's.
            limits: of clients; None for the usual ones.

        Raises:
            BadInput: token or certificates cannot be used.
            OSError: the address cannot be had.
        """
        gate = AccessGate(settings)
        pages, limits = _Pages(gate, render, is_alive), limits or ConnectionLimits()
        if beside is None:
            self._http = _Http(settings, pages, limits)
        else:
            with beside._http.sharing():
                self._http = _Http(settings, pages, limits, shares=True)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    def change(
        self, gate: AccessGate, render: Callable[[bool], bytes], is_alive: Callable[[], bool]
    ) -> None:
        """Serve another page to others, on the same address."""
        self._http.pages = _Pages(gate, render, is_alive)

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(1.0)


class AccessGate:
    """Who comes in: by token, by certificate. Both files are read again when they change."""

    def __init__(self, settings: PrometheusSettings) -> None:
        """Read them.

        Raises:
            BadInput: one of them cannot be used.
        """
        self._settings = settings
        self._lock = threading.Lock()
        self._stamps = self._now()
        self._token = self._read_token()
        self._context = tls_context(settings)

    def is_open_to(self, authorization: str) -> bool:
        """Tell whether a request may be answered."""
        self._renew()
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        is_same = hmac.compare_digest(given.strip().encode(), self._token.encode())
        return scheme.lower() == "bearer" and is_same

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return the connection, where TLS is wanted with a handshake that is yet to be done."""
        self._renew()
        if self._context is None:
            return connection
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def is_current(self, connection: socket.socket) -> bool:
        """Return whether the certificates in force are those of the connection's handshake."""
        self._renew()
        wanted = connection.context if isinstance(connection, ssl.SSLSocket) else None
        return wanted is self._context

    def _renew(self) -> None:
        now = self._now()
        if now == self._stamps:
            return
        with self._lock:
            self._stamps = now
            try:
                token, context = self._read_token(), tls_context(self._settings)
            except BadInput as error:  # half written, or wrong: what was good before stays
                _logger.warning("the metrics' server keeps what it had: %s", error)
                return
            self._token, self._context = token, context

    def _read_token(self) -> str | None:
        path = self._settings.token_file
        return None if path is None else read_token(path)

    def _now(self) -> list[int]:
        settings = self._settings
        paths = (settings.token_file, settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        return [0 if path is None else _changed_ns(path) for path in paths]


def tls_context(settings: PrometheusSettings) -> ssl.SSLContext | None:
    """Return what TLS is spoken with, None where it is not.

    Raises:
        BadInput: a certificate or key cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client may renegotiate as often as it likes with OpenSSL 1.1.1, each time for a signature.
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise BadInput(
            f"cannot use tls_cert {settings.tls_cert} with tls_key {settings.tls_key}: "
            f"{error.strerror or error}."
        ) from error
    return context


@dataclass(frozen=True)
class _Pages:
    """The page, its access control and its liveness."""

    gate: AccessGate
    render: Callable[[bool], bytes]
    is_alive: Callable[[], bool]


@dataclass(eq=False)
class _ConnectionSlot:
    """One connection's.

    Attributes:
        connection: its socket; with TLS, from the handshake on, the wrapped one.
        peer: its address.
        since_s: when its request began to be waited for, or to be answered.
        is_answered: its request has come and is allowed.
    """

    connection: socket.socket
    peer: str
    since_s: float
    is_answered: bool = False


class _ConnectionSlots:
    """The connections that are open."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._by_socket: dict[socket.socket, _ConnectionSlot] = {}

    def take(self, connection: socket.socket, peer: str) -> bool:
        """Find a place for a connection, if need be that of a connection that only waits."""
        limits, now_s = self._limits, time.monotonic()
        with self._lock:
            there = list(self._by_socket.values())
            own = [place for place in there if place.peer == peer]
            if len(own) >= limits.per_peer or len(there) >= limits.connections:
                crowd = own if len(own) >= limits.per_peer else there
                waiting = [place for place in crowd if self._may_go(place, now_s)]
                if not waiting:
                    return False
                self._end(min(waiting, key=lambda place: place.since_s))
            self._by_socket[connection] = _ConnectionSlot(connection, peer, now_s)
            return True

    def hand_on(self, connection: socket.socket, by: socket.socket) -> None:
        """Note that another socket has taken over a connection.

        Raises:
            OSError: its place is another connection's by now.
        """
        with self._lock:
            place = self._by_socket.pop(connection, None)
            if place is None:
                raise OSError("the place is taken")
            place.connection = by
            self._by_socket[by] = place

    def of(self, connection: socket.socket) -> _ConnectionSlot:
        """Return a connection's place.

        Raises:
            OSError: it is another connection's by now.
        """
        with self._lock:
            place = self._by_socket.get(connection)
        if place is None:
            raise OSError("the place is taken")
        return place

    def leave(self, connection: socket.socket) -> None:
        """Release the place of a connection."""
        with self._lock:
            self._by_socket.pop(connection, None)

    def _may_go(self, place: _ConnectionSlot, now_s: float) -> bool:
        return not place.is_answered or now_s - place.since_s > self._limits.answer_s

    def _end(self, place: _ConnectionSlot) -> None:
        del self._by_socket[place.connection]
        with suppress(OSError):  # of a TLS socket as well, without a word to its peer
            socket.socket.shutdown(place.connection, socket.SHUT_RDWR)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        settings: PrometheusSettings,
        pages: _Pages,
        limits: ConnectionLimits,
        *,
        shares: bool = False,
    ) -> None:
        self._shares = shares
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        self.address_family = family
        self.pages = pages
        self.limits = limits
        self.places = _ConnectionSlots(limits)
        self._settings = settings
        super().__init__((str(address[0]), settings.port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server who we are, as the class above does."""
        self._share(self._shares)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self._settings.host, self.server_address[1]

    def server_activate(self) -> None:
        """Listen; from then on nobody else can."""
        super().server_activate()
        self._share(False)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Let another server of this process have the port as well, for a moment."""
        self._share(True)
        try:
            yield
        finally:
            self._share(False)

    def _share(self, is_shared: bool) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.take(request, str(client_address[0])):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        connection = request
        try:
            request.settimeout(self.limits.request_s)
            connection = self.pages.gate.wrap(request)
            self.places.hand_on(request, connection)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()  # within its timeout as a whole
        except OSError:  # no TLS, a wrong certificate, gone
            self.shutdown_request(connection)
        else:
            super().process_request_thread(connection, client_address)
        finally:
            self.places.leave(request)
            self.places.leave(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away in the midst of it."""
        _logger.debug("a scrape came to nothing", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "inferscope"
    sys_version = ""
    server: _Http

    def setup(self) -> None:
        """Read by deadlines."""
        super().setup()
        self.rfile.close()
        limits = self.server.limits
        self._place = self.server.places.of(self.connection)
        self._reader = DeadlineReader(self.connection, self._place.since_s + limits.request_s)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self._reader.bytes_left = self.server.limits.head_bytes
        super().handle_one_request()
        limits, now_s = self.server.limits, time.monotonic()
        self._place.since_s, self._place.is_answered = now_s, False
        self._reader.deadline_s = now_s + limits.idle_s

    def do_GET(self) -> None:
        """Answer with the page."""
        pages, path = self.server.pages, self.path.partition("?")[0]
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what stands in its body is not read
        if not pages.gate.is_current(self.connection):
            # Without an answer: Prometheus then connects again and repeats its request.
            self.close_connection = True
            return None
        if path == _HEALTH:  # which says nothing of engines: those who probe have no token
            if pages.is_alive():
                return self._answer(200, b"ok\n")
            return self._answer(503, b"the engines' records are not being folded\n")
        if not pages.gate.is_open_to(self.headers.get("Authorization", "")):
            self.close_connection = True
            return self._answer(401, b"a bearer token is needed\n")
        if path not in _PATHS:
            return self._answer(404, b"there is /metrics\n")
        self._place.since_s, self._place.is_answered = time.monotonic(), True
        is_open = wants_open(self.headers.get("Accept", ""))
        body = pages.render(is_open)
        kind = OPEN_METRICS if is_open else TEXT
        if takes_gzip(self.headers.get("Accept-Encoding", "")):
            return self._answer(200, compressed(body), kind, encoding="gzip")
        return self._answer(200, body, kind)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a scrape every few seconds is no news."""

    def _answer(
        self, status: int, body: bytes, kind: str = "text/plain", *, encoding: str = ""
    ) -> None:
        self.connection.settimeout(self.server.limits.answer_s)
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1
