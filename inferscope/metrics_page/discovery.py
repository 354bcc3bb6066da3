"""Servers of this host that have a metrics page on a usual port."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from inferscope.errors import NotFound
from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.fetching import fetch
from inferscope.metrics_page.reading import read

USUAL_PORTS = (8000, 8080, 30000)
"""Default ports of vLLM and `inferscope serve`, of llama-server, and of SGLang."""
_TIMEOUT_S = 0.5


class FoundPage(msgspec.Struct, frozen=True):
    """A server's address, its software and its models."""

    url: str
    server: str
    models: tuple[str, ...]


def find_pages(ports: Sequence[int] = USUAL_PORTS) -> tuple[FoundPage, ...]:
    """Return the servers on the loopback interface that answer at once with a known page."""
    with ThreadPoolExecutor(len(ports)) as pool:
        found = pool.map(_page_on, ports)
        return tuple(page for page in found if page is not None)


def _page_on(port: int) -> FoundPage | None:
    url = f"http://127.0.0.1:{port}"
    try:
        page = fetch(f"{url}/metrics", timeout_s=_TIMEOUT_S)
        reading = read(page, dialect_of(page))
    except NotFound:
        return None
    return FoundPage(url, reading.server, reading.models)
