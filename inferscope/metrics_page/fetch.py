"""Getting a page, and the samples that it holds.

    fetch(url) ─► bytes ─► samples ─► Page        a sample is a name, labels and a number

The exposition format is read by Prometheus' own client library (the extra `prometheus`). A page
may be anybody's: all of it must come, and be read, in bounded time; a redirect is not followed.
"""

from __future__ import annotations

import base64
import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import IO
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import msgspec
from prometheus_client.parser import text_fd_to_metric_families

from inferscope.deadline import DeadlineReader
from inferscope.errors import BadInput, NotFound
from inferscope.foreign import printable, without_secrets

TIMEOUT_S = 5.0
"""Maximum time for a page to come, from the connection to its last byte."""
PARSE_S = 5.0
"""Maximum time for a page to be read."""
_MOST_BYTES = 16 << 20
_LONGEST_LINE = 16 << 10
"""Longer lines are left out: the library needs time by the square of their length."""
_PATH = "/metrics"


class PageSample(msgspec.Struct, frozen=True, gc=False):
    """One number of a page."""

    name: str
    labels: dict[str, str]
    number: float


class MetricsPage(msgspec.Struct, frozen=True):
    """A page as it was at one time."""

    url: str
    """To be shown: without credentials."""
    read_ns: int
    """By the monotonic clock, halfway between question and answer."""
    real_ns: int
    samples: tuple[PageSample, ...]


def page_url(target: str) -> str:
    """Return the address of a server's page: `/metrics`, unless the target names a path.

    Raises:
        BadInput: it is no address of a server.
    """
    try:
        parts = urlsplit(target)
        has_server = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_server = False
    if not has_server or parts.scheme not in ("http", "https"):
        raise BadInput(
            f"{printable(without_secrets(target))} is no server's address. "
            "Give one like http://localhost:8000."
        )
    path = parts.path if parts.path.strip("/") else _PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def fetch(url: str, *, timeout_s: float = TIMEOUT_S) -> MetricsPage:
    """Read a page.

    Raises:
        NotFound: nobody answers there, or with something else than a page of metrics.
    """
    asked_ns = time.monotonic_ns()
    shown = printable(without_secrets(url))
    content = _get(url, shown, timeout_s)
    read_ns = (asked_ns + time.monotonic_ns()) // 2
    return MetricsPage(shown, read_ns, time.time_ns(), _samples(shown, content))


class _DeadlineConnection:
    """A socket as `http.client` uses one, with one deadline for all that is received."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self.sendall = connection.sendall
        self.close = connection.close

    def makefile(self, mode: str) -> IO[bytes]:
        """Return what the answer is read from."""
        return io.BufferedReader(DeadlineReader(self._connection, self._deadline_s))


def _connected(parts: SplitResult, deadline_s: float) -> http.client.HTTPConnection:
    """Connect to a server.

    No proxy from the environment: what is asked for is nearly always on this host.

    Raises:
        OSError: no server accepts the connection.
    """
    connection: http.client.HTTPConnection
    host, timeout_s = parts.hostname or "", max(0.001, deadline_s - time.monotonic())
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
    connection.connect()
    connection.sock = _DeadlineConnection(connection.sock, deadline_s)
    return connection


def _get(url: str, shown: str, timeout_s: float) -> bytes:
    parts = urlsplit(url)
    headers = {"Accept": "text/plain;version=0.0.4", "Connection": "close"}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    connection = None
    try:
        connection = _connected(parts, time.monotonic() + timeout_s)
        connection.request("GET", urlunsplit(("", "", parts.path, parts.query, "")), None, headers)
        with connection.getresponse() as answer:
            if answer.status != HTTPStatus.OK:
                raise NotFound(f"{shown} {_refusal(answer.status)}")
            content = answer.read(_MOST_BYTES + 1)
    # A ValueError is of an address that cannot be asked for, such as one beyond ASCII.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = "timed out" if isinstance(error, TimeoutError) else printable(str(error))
        raise NotFound(f"{shown} cannot be reached ({reason}). Is the server up?") from None
    finally:
        if connection is not None:
            connection.close()
    if len(content) > _MOST_BYTES:
        raise NotFound(f"{shown} is no page of metrics: it is larger than {_MOST_BYTES >> 20} MB.")
    return content


def _refusal(status: int) -> str:
    """Return what a status means; the phrase in the answer may hold anything."""
    try:
        phrase = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = str(status)
    if 300 <= status < 400:
        return f"answers {phrase}: redirects are not followed. Give the address of the page itself."
    return (
        f"answers {phrase}: there is no page of metrics. "
        "SGLang serves one with --enable-metrics, llama-server with --metrics."
    )


def _samples(shown: str, content: bytes) -> tuple[PageSample, ...]:
    try:
        lines = _lines(shown, content.decode(), time.monotonic() + PARSE_S)
        samples = tuple(
            PageSample(sample.name, dict(sample.labels), float(sample.value))
            for family in text_fd_to_metric_families(lines)  # type: ignore[arg-type]  # any lines
            for sample in family.samples
        )
    # The library means to raise ValueError alone; of a broken line it may also trip over.
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
        samples = ()
    if not samples:
        raise NotFound(f"{shown} is no page of metrics. Name its path, or another port.")
    return samples


def _lines(shown: str, text: str, deadline_s: float) -> Iterator[str]:
    """Yield the lines of a page while there is time.

    Raises:
        NotFound: there is none left.
    """
    for line in text.split("\n"):
        if time.monotonic() > deadline_s:
            raise NotFound(f"{shown} is no page of metrics: reading it takes over {PARSE_S:g} s.")
        if len(line) <= _LONGEST_LINE:
            yield line
