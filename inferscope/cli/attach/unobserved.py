"""Offer of a server's metrics page where `attach` without a target finds no running engine."""

from __future__ import annotations

import importlib.util
import sys
import time

from inferscope.errors import NotFound
from inferscope.ring import find_engines
from inferscope.text.plots import plain


def unobserved_servers() -> list[tuple[str, str]]:
    """Return address and name of the servers here that have a page, if no engine is running.

    Without the parser of such pages, and while an engine runs, there are none.
    """
    now_ns = time.monotonic_ns()
    if any(engine.is_alive(now_ns) for engine in find_engines()):
        return []
    if importlib.util.find_spec("prometheus_client") is None:
        return []
    from inferscope.metrics_page import find_pages

    return [
        (page.url, plain(f"{page.server} {', '.join(page.models)}".strip()))
        for page in find_pages()
    ]


def offer(servers: list[tuple[str, str]]) -> str:
    """Ask on the terminal whether to show a server's page, and return its address.

    Raises:
        NotFound: the user chose none.
    """
    sys.stderr.write("No engine with a probe is running, but a server has a metrics page:\n")
    for number, (url, name) in enumerate(servers, 1):
        sys.stderr.write(f"{number:>3}  {url}  {name}\n")
    while True:
        sys.stderr.write(f"Show which page? 1-{len(servers)}, or q to quit [1]: ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if answer.strip() in ("q", "quit") or not answer:
            raise NotFound("no page was chosen.")
        number_text = answer.strip() or "1"
        if number_text.isdecimal() and 1 <= int(number_text) <= len(servers):
            return servers[int(number_text) - 1][0]


def hint(servers: list[tuple[str, str]]) -> str:
    """Return how to show these servers, to follow an error; empty without any."""
    shown = ", ".join(f"`inferscope attach {url}` ({name})" for url, name in servers)
    return f" Without a probe, a server's /metrics can be shown: {shown}." if servers else ""
