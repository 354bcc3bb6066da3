"""HTTP fetch of a page, and its samples.

    fetch(url) ─► bytes ─► samples ─► MetricsPage        a sample is a name, labels and a number

Prometheus' own client library (the extra `prometheus`) parses the exposition format. A page is
untrusted: it must arrive and be parsed in bounded time; redirects are not followed.
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
"""Maximum seconds for a page to arrive, from the connection to its last byte."""
PARSE_S = 5.0
"""Maximum seconds to parse a page."""
_MOST_BYTES = 16 << 20
_LONGEST_LINE = 16 << 10
"""Maximum length of a line in bytes; the library's time is quadratic in it."""
_PATH = "/metrics"


class PageSample(msgspec.Struct, frozen=True, gc=False):
    """One number of a page."""

    name: str
    labels: dict[str, str]
    number: float


class MetricsPage(msgspec.Struct, frozen=True):
    """A page at one time."""

    url: str
    """URL to display, without credentials."""
    read_ns: int
    """Monotonic time, halfway between request and response."""
    real_ns: int
    samples: tuple[PageSample, ...]


def page_url(target: str) -> str:
    """Return the address of a server's page: `/metrics`, unless the target has a path.

    Without a scheme, as in `gpu7:8000`, it is http.

    Raises:
        BadInput: it is not a server's address.
    """
    target = target if "://" in target else f"http://{target}"
    try:
        parts = urlsplit(target)
        has_server = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_server = False
    if not has_server or parts.scheme not in ("http", "https"):
        raise BadInput(
            f"{printable(without_secrets(target))} is not a server address. "
            "Give one like http://localhost:8000."
        )
    path = parts.path if parts.path.strip("/") else _PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def fetch(url: str, *, timeout_s: float = TIMEOUT_S) -> MetricsPage:
    """Fetch a page.

    Raises:
        NotFound: no server responds, or the response is not a metrics page.
    """
    asked_ns = time.monotonic_ns()
    shown = printable(without_secrets(url))
    content = _get(url, shown, timeout_s)
    read_ns = (asked_ns + time.monotonic_ns()) // 2
    return MetricsPage(shown, read_ns, time.time_ns(), _samples(shown, content))


class _DeadlineConnection:
    """Socket for `http.client` with one deadline for all received bytes."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self.sendall = connection.sendall
        self.close = connection.close

    def makefile(self, mode: str) -> IO[bytes]:
        """Return the stream of the response."""
        return io.BufferedReader(DeadlineReader(self._connection, self._deadline_s))


def _connected(parts: SplitResult, deadline_s: float) -> http.client.HTTPConnection:
    """Connect to a server.

    The environment's proxy is not used: the server is nearly always on this host.

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
    # A ValueError means an address that cannot be requested, such as one beyond ASCII.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = "timed out" if isinstance(error, TimeoutError) else printable(str(error))
        raise NotFound(f"{shown} cannot be reached ({reason}). Is the server up?") from None
    finally:
        if connection is not None:
            connection.close()
    if len(content) > _MOST_BYTES:
        raise NotFound(f"{shown} is not a metrics page: it is larger than {_MOST_BYTES >> 20} MB.")
    return content


def _refusal(status: int) -> str:
    """Return the meaning of a status; the phrase in the response is untrusted."""
    try:
        phrase = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = str(status)
    if 300 <= status < 400:
        return f"answers {phrase}: redirects are not followed. Give the address of the page itself."
    return (
        f"answers {phrase}: it has no metrics page. "
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
    # The library should raise only ValueError, but fails otherwise on some broken lines.
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
        samples = ()
    if not samples:
        raise NotFound(f"{shown} is not a metrics page. Name its path, or another port.")
    return samples


def _lines(shown: str, text: str, deadline_s: float) -> Iterator[str]:
    """Yield the lines of a page until the deadline.

    Raises:
        NotFound: the deadline has passed.
    """
    for line in text.split("\n"):
        if time.monotonic() > deadline_s:
            raise NotFound(f"{shown} is not a metrics page: reading it takes over {PARSE_S:g} s.")
        if len(line) <= _LONGEST_LINE:
            yield line
