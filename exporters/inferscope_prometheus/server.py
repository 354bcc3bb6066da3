"""HTTP server of one page: bounded connections, optional TLS and bearer token.

The client library's server supports no token and performs the handshake on the accepting thread:
one client that connects and stays silent would block all others.

Handshake and request share one deadline, however slowly their bytes arrive. When all slots are
taken, a new connection evicts the one whose request has been pending longest: a scraper sends its
request at once, so idle connections block none.
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
    """Limits on clients' use of the server.

    Attributes:
        connections: maximum number at a time.
        per_peer: maximum number from one address.
        head_bytes: maximum size of a request.
        request_s: maximum time for the handshake and the first request.
        idle_s: maximum time for each further request on the same connection.
        answer_s: maximum time to receive a response; later, its slot may be reused.
    """

    connections: int = 32
    per_peer: int = 8
    head_bytes: int = 16 << 10
    request_s: float = 10.0
    idle_s: float = 65.0
    answer_s: float = 10.0


class MetricsServer:
    """Server of the page that `render` returns.

    Attributes:
        port: bound port.
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
            settings: address and access control.
            render: returns the page, as OpenMetrics or text; any thread may call it.
            is_alive: returns whether the page is still being renewed; any thread may call it.
            beside: a server about to close; its address may overlap with this one's.
            limits: limits on clients; None for the defaults.

        Raises:
            BadInput: token or certificates cannot be used.
            OSError: the address is not available.
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
        """Serve another page with other access control, on the same address."""
        self._http.pages = _Pages(gate, render, is_alive)

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(1.0)


class AccessGate:
    """Access control by token and certificate; both files are reloaded when they change."""

    def __init__(self, settings: PrometheusSettings) -> None:
        """Read token and certificates.

        Raises:
            BadInput: one of them cannot be used.
        """
        self._settings = settings
        self._lock = threading.Lock()
        self._stamps = self._now()
        self._token = self._read_token()
        self._context = tls_context(settings)

    def is_open_to(self, authorization: str) -> bool:
        """Return whether a request may be answered."""
        self._renew()
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        is_same = hmac.compare_digest(given.strip().encode(), self._token.encode())
        return scheme.lower() == "bearer" and is_same

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Return the connection; with TLS, wrapped and before its handshake."""
        self._renew()
        if self._context is None:
            return connection
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def is_current(self, connection: socket.socket) -> bool:
        """Return whether the connection's handshake used the current certificates."""
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
            except BadInput as error:  # half-written or invalid: the previous ones stay in force
                _logger.warning(
                    "metrics server: reload failed, token and certificates stay as they were: %s",
                    error,
                )
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
    """Return the TLS context; None without TLS.

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
    """Page, access control and liveness of a server."""

    gate: AccessGate
    render: Callable[[bool], bytes]
    is_alive: Callable[[], bool]


@dataclass(eq=False)
class _ConnectionSlot:
    """Slot of one connection.

    Attributes:
        connection: its socket; with TLS the wrapped one, from the handshake on.
        peer: its address.
        since_s: start of the wait for its request, or of its response.
        is_answered: whether its request was received and allowed.
    """

    connection: socket.socket
    peer: str
    since_s: float
    is_answered: bool = False


class _ConnectionSlots:
    """Slots of the open connections."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._by_socket: dict[socket.socket, _ConnectionSlot] = {}

    def take(self, connection: socket.socket, peer: str) -> bool:
        """Take a slot, evicting a pending connection if necessary; return whether there is one."""
        limits, now_s = self._limits, time.monotonic()
        with self._lock:
            there = list(self._by_socket.values())
            own = [slot for slot in there if slot.peer == peer]
            if len(own) >= limits.per_peer or len(there) >= limits.connections:
                crowd = own if len(own) >= limits.per_peer else there
                waiting = [slot for slot in crowd if self._is_evictable(slot, now_s)]
                if not waiting:
                    return False
                self._end(min(waiting, key=lambda slot: slot.since_s))
            self._by_socket[connection] = _ConnectionSlot(connection, peer, now_s)
            return True

    def replace_socket(self, connection: socket.socket, by: socket.socket) -> None:
        """Replace a connection's socket by another.

        Raises:
            OSError: its slot was given to another connection.
        """
        with self._lock:
            slot = self._by_socket.pop(connection, None)
            if slot is None:
                raise OSError("the slot was given to another connection")
            slot.connection = by
            self._by_socket[by] = slot

    def of(self, connection: socket.socket) -> _ConnectionSlot:
        """Return a connection's slot.

        Raises:
            OSError: it was given to another connection.
        """
        with self._lock:
            slot = self._by_socket.get(connection)
        if slot is None:
            raise OSError("the slot was given to another connection")
        return slot

    def release(self, connection: socket.socket) -> None:
        """Release the slot of a connection."""
        with self._lock:
            self._by_socket.pop(connection, None)

    def _is_evictable(self, slot: _ConnectionSlot, now_s: float) -> bool:
        return not slot.is_answered or now_s - slot.since_s > self._limits.answer_s

    def _end(self, slot: _ConnectionSlot) -> None:
        del self._by_socket[slot.connection]
        with suppress(OSError):  # also for a TLS socket, without a close-notify
            socket.socket.shutdown(slot.connection, socket.SHUT_RDWR)


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
        self.slots = _ConnectionSlots(limits)
        self._settings = settings
        super().__init__((str(address[0]), settings.port), _Handler)

    def server_bind(self) -> None:
        """Bind without the reverse name lookup of the base class."""
        self._share(self._shares)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self._settings.host, self.server_address[1]

    def server_activate(self) -> None:
        """Listen; from then on the port is exclusive."""
        super().server_activate()
        self._share(False)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Allow another server of this process to bind the port meanwhile."""
        self._share(True)
        try:
            yield
        finally:
            self._share(False)

    def _share(self, is_shared: bool) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.take(request, str(client_address[0])):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        connection = request
        try:
            request.settimeout(self.limits.request_s)
            connection = self.pages.gate.wrap(request)
            self.slots.replace_socket(request, connection)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()  # within its timeout as a whole
        except OSError:  # not TLS, a wrong certificate, or closed
            self.shutdown_request(connection)
        else:
            super().process_request_thread(connection, client_address)
        finally:
            self.slots.release(request)
            self.slots.release(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early."""
        _logger.debug("a scrape was aborted", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "inferscope"
    sys_version = ""
    server: _Http

    def setup(self) -> None:
        """Read with deadlines."""
        super().setup()
        self.rfile.close()
        limits = self.server.limits
        self._place = self.server.slots.of(self.connection)
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
            self.close_connection = True  # its body is not read
        if not pages.gate.is_current(self.connection):
            # Close without a response: Prometheus reconnects and repeats its request.
            self.close_connection = True
            return None
        if path == _HEALTH:  # contains nothing about engines: probes have no token
            if pages.is_alive():
                return self._answer(200, b"ok\n")
            return self._answer(503, b"the engines' records are not being folded\n")
        if not pages.gate.is_open_to(self.headers.get("Authorization", "")):
            self.close_connection = True
            return self._answer(401, b"a bearer token is required\n")
        if path not in _PATHS:
            return self._answer(404, b"not found; see /metrics\n")
        self._place.since_s, self._place.is_answered = time.monotonic(), True
        is_open = wants_open(self.headers.get("Accept", ""))
        body = pages.render(is_open)
        kind = OPEN_METRICS if is_open else TEXT
        if takes_gzip(self.headers.get("Accept-Encoding", "")):
            return self._answer(200, compressed(body), kind, encoding="gzip")
        return self._answer(200, body, kind)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: scrapes are frequent."""

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
