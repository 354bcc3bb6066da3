"""OTLP over HTTP: one persistent connection, and the meaning of each response status."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import socket
import ssl
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from inferscope_otlp.delivery_queue import NotDelivered
from inferscope_otlp.settings import OtlpSettings

_AGAIN = frozenset({429, 502, 503, 504})
"""Retryable status codes of the OTLP specification; any other forbids a retry."""
_LONGEST_WAIT_S = 60.0
_MOST_ANSWER_BYTES = 1 << 20
_LEVEL = 1
"""Compression level; the highest takes three times as long for 10 % fewer bytes."""


class Post(Protocol):
    """Client that delivers messages to a receiver."""

    def send(self, message: bytes) -> None:
        """Send a message; blocks.

        Raises:
            NotDelivered: it was not delivered.
        """

    def stop(self) -> None:
        """Interrupt a blocked `send`; called from another thread."""

    def close(self) -> None:
        """Close the connection."""


class HttpPost:
    """Client that posts messages to a URL."""

    def __init__(self, settings: OtlpSettings, url: str, headers: dict[str, str]) -> None:
        """Prepare; connect with the first message.

        Raises:
            BadInput: a certificate cannot be used.
        """
        parts = urlsplit(url)
        self._timeout_s = settings.timeout_s
        self._is_gzip = settings.compression == "gzip"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": "inferscope",
            **_credentials(parts),
            **headers,
        }
        if self._is_gzip:
            self._headers["Content-Encoding"] = "gzip"
        self._parts = parts
        self._context = settings.tls_context() if parts.scheme == "https" else None
        self._connection: http.client.HTTPConnection | None = None
        self._is_stopped = False

    def send(self, message: bytes) -> None:
        """Post a message.

        Raises:
            NotDelivered: it was not delivered.
        """
        body = gzip.compress(message, _LEVEL) if self._is_gzip else message
        is_kept = self._connection is not None
        try:
            self._exchange(body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if not is_kept or self._is_stopped or isinstance(error, TimeoutError):
                raise NotDelivered(_describe_error(error), retry_after_s=0.0) from error
        else:
            return
        # The receiver may close a persistent connection: retry once on a new one.
        try:
            self._exchange(body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise NotDelivered(_describe_error(error), retry_after_s=0.0) from error

    def stop(self) -> None:
        """Shut down the connection."""
        self._is_stopped = True
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next `send` makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self, body: bytes) -> None:
        if self._connection is None:
            self._connection = self._connected()
        self._connection.request("POST", self._path, body, self._headers)
        answer = self._connection.getresponse()
        answer.read(_MOST_ANSWER_BYTES)
        if answer.will_close:
            self.close()
        if 200 <= answer.status < 300:
            return
        why = f"the receiver answers {answer.status} {http.client.responses.get(answer.status, '')}"
        wait_s = _wait_s(answer) if answer.status in _AGAIN else None
        raise NotDelivered(why.rstrip(), retry_after_s=wait_s)

    def _connected(self) -> http.client.HTTPConnection:
        """Return a connection to the receiver, or through the environment's proxy."""
        parts, timeout_s = self._parts, self._timeout_s
        host, port = parts.hostname or "", parts.port or (443 if self._context else 80)
        proxy = getproxies().get(parts.scheme, "")
        if not proxy or proxy_bypass(host):
            return _connection(host, port, timeout_s, self._context)
        via = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        connection = _connection(via.hostname or "", via.port or 80, timeout_s, self._context)
        connection.set_tunnel(host, port, headers=_credentials(via, "Proxy-Authorization"))
        return connection


def _connection(
    host: str, port: int, timeout_s: float, context: ssl.SSLContext | None
) -> http.client.HTTPConnection:
    if context is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _credentials(parts: SplitResult, header: str = "Authorization") -> dict[str, str]:
    """Return the header for a user and a password in a URL."""
    if parts.username is None:
        return {}
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {header: f"Basic {base64.b64encode(credentials.encode()).decode()}"}


def _wait_s(answer: http.client.HTTPResponse) -> float:
    """Return the delay that the receiver requests; 0 if it requests none."""
    retry_after = answer.getheader("Retry-After", "")
    return min(float(retry_after), _LONGEST_WAIT_S) if retry_after.isdigit() else 0.0


def _describe_error(error: Exception) -> str:
    """Return a description of an error. None of these errors repeats the message sent."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
