"""The HTTP server of one page: bounded connections, optionally TLS and a bearer token.

The client library's own server asks for no token, and shakes hands on the thread that accepts: one
client that connects and says nothing would keep all others out.
"""

from __future__ import annotations

import hmac
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inferscope.errors import BadInput
from inferscope_prometheus.page import (
    OPEN_METRICS,
    TEXT,
    compressed,
    takes_gzip,
    wants_open,
)
from inferscope_prometheus.settings import Settings, read_token

_logger = logging.getLogger(__name__)

_PATHS = ("/metrics", "/")
_MOST_CONNECTIONS = 32
_SILENT_S = 30.0
"""A connection on which nothing comes, or nothing is taken, for so long is closed."""


class Server:
    """Serves what `render` returns.

    Attributes:
        port: that it was given.
    """

    def __init__(
        self,
        settings: Settings,
        render: Callable[[bool], bytes],
        *,
        beside: Server | None = None,
    ) -> None:
        """Bind and serve.

        Args:
            settings: where, and to whom.
            render: returns the page, as OpenMetrics or not; any thread may call it.
            beside: one that ends soon; its address may be part of this one's.

        Raises:
            BadInput: token or certificates cannot be used.
            OSError: the address cannot be had.
        """
        gate = Gate(settings)
        if beside is None:
            self._http = _Http(settings, gate, render)
        else:
            with beside._http.sharing():
                self._http = _Http(settings, gate, render, shares=True)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        self._thread.start()

    def change(self, gate: Gate, render: Callable[[bool], bytes]) -> None:
        """Serve another page to others, on the same address."""
        self._http.gate, self._http.render = gate, render

    def close(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(1.0)


class Gate:
    """Who comes in: by token, by certificate. Both files are read again when they change."""

    def __init__(self, settings: Settings) -> None:
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
        """Shake hands, where TLS is wanted."""
        self._renew()
        if self._context is None:
            return connection
        return self._context.wrap_socket(connection, server_side=True)

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


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return what TLS is spoken with, None where it is not.

    Raises:
        BadInput: a certificate or key cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
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


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        render: Callable[[bool], bytes],
        *,
        shares: bool = False,
    ) -> None:
        self._shares = shares
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        self.address_family = family
        self.gate = gate
        self.render = render
        self._settings = settings
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
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
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_SILENT_S)
            wrapped = self.gate.wrap(request)
        except OSError:  # no TLS, a wrong certificate, gone
            self.shutdown_request(request)
        else:
            super().process_request_thread(wrapped, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away in the midst of it."""
        _logger.debug("a scrape came to nothing", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "inferscope"
    sys_version = ""
    timeout = _SILENT_S
    server: _Http

    def do_GET(self) -> None:
        """Answer with the page."""
        if not self.server.gate.is_open_to(self.headers.get("Authorization", "")):
            return self._answer(401, b"a bearer token is needed\n")
        if self.path.partition("?")[0] not in _PATHS:
            return self._answer(404, b"there is /metrics\n")
        is_open = wants_open(self.headers.get("Accept", ""))
        body = self.server.render(is_open)
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
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
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
