"""Getting a page, and the samples that it holds.

    fetch(url) ─► bytes ─► samples ─► Page        a sample is a name, labels and a number

The exposition format is read by Prometheus' own client library (the extra `prometheus`).
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from inferscope.errors import BadInput, NotFound

TIMEOUT_S = 5.0
_MOST_BYTES = 16 << 20
_PATH = "/metrics"


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One number of a page."""

    name: str
    labels: dict[str, str]
    number: float


class Page(msgspec.Struct, frozen=True):
    """A page as it was at one time."""

    url: str
    read_ns: int
    """By the monotonic clock, halfway between question and answer."""
    real_ns: int
    samples: tuple[Sample, ...]


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
        raise BadInput(f"{target} is no server's address. Give one like http://localhost:8000.")
    path = parts.path if parts.path.strip("/") else _PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def fetch(url: str, *, timeout_s: float = TIMEOUT_S) -> Page:
    """Read a page.

    Raises:
        NotFound: nobody answers there, or with something else than a page of metrics.
    """
    asked_ns = time.monotonic_ns()
    content = _get(url, timeout_s)
    read_ns = (asked_ns + time.monotonic_ns()) // 2
    samples = _samples(url, content)
    return Page(url, read_ns, time.time_ns(), samples)


def _get(url: str, timeout_s: float) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})
    # No proxy from the environment: what is asked for is nearly always on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise NotFound(
            f"{url} answers {error.code} {error.reason}: there is no page of metrics. "
            "SGLang serves one with --enable-metrics, llama-server with --metrics."
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NotFound(f"{url} cannot be reached ({reason}). Is the server up?") from None
    if len(content) > _MOST_BYTES:
        raise NotFound(f"{url} is no page of metrics: it is larger than {_MOST_BYTES >> 20} MB.")
    return content


def _samples(url: str, content: bytes) -> tuple[Sample, ...]:
    try:
        samples = tuple(
            Sample(sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(content.decode())
            for sample in family.samples
        )
    except (ValueError, IndexError, KeyError):
        samples = ()
    if not samples:
        raise NotFound(f"{url} is no page of metrics. Name its path, or another port.")
    return samples
