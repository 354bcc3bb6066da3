"""OTLP over HTTP: one connection that is kept, and what the answer means for what was sent."""

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
"""Of the protocol's specification: with anything else the same message must not come again."""
_LONGEST_WAIT_S = 60.0
_MOST_ANSWER_BYTES = 1 << 20
_LEVEL = 1
"""Of compression: the highest takes three times as long for a tenth of the bytes."""


class Post(Protocol):
    """Brings a message to a receiver."""

    def send(self, message: bytes) -> None:
        """Send it; blocks.

        Raises:
            NotDelivered: it did not arrive.
        """

    def stop(self) -> None:
        """Make a `send` that is blocked come to its end; from another thread."""

    def close(self) -> None:
        """Let go of the connection."""


class HttpPost:
    """Posts messages to a URL."""

    def __init__(self, settings: OtlpSettings, url: str, headers: dict[str, str]) -> None:
        """Prepare; nothing is connected yet.

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
            NotDelivered: it did not arrive.
        """
        body = gzip.compress(message, _LEVEL) if self._is_gzip else message
        is_kept = self._connection is not None
        try:
            self._exchange(body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if not is_kept or self._is_stopped or isinstance(error, TimeoutError):
                raise NotDelivered(_words(error), again_after_s=0.0) from error
        else:
            return
        # The receiver has closed a connection that was kept, as it may: once more on a new one.
        try:
            self._exchange(body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise NotDelivered(_words(error), again_after_s=0.0) from error

    def stop(self) -> None:
        """Cut the connection."""
        self._is_stopped = True
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):  # it is gone
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
        raise NotDelivered(why.rstrip(), again_after_s=wait_s)

    def _connected(self) -> http.client.HTTPConnection:
        """Return a connection to the receiver, or through the proxy that the environment names."""
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
    """Return the header for a user and a password that stand in a URL."""
    if parts.username is None:
        return {}
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {header: f"Basic {base64.b64encode(words.encode()).decode()}"}


def _wait_s(answer: http.client.HTTPResponse) -> float:
    """Return how long the receiver asks to be left alone; 0 where it does not say."""
    asked = answer.getheader("Retry-After", "")
    return min(float(asked), _LONGEST_WAIT_S) if asked.isdigit() else 0.0


def _words(error: Exception) -> str:
    """Return what went wrong. None of these errors repeats what was sent."""
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
