"""Command `attach http://…`: a server that is not observed, shown from its /metrics page."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from inferscope.cli.terminal import can_draw
from inferscope.errors import BadInput
from inferscope.json_document import json_line
from inferscope.metrics_page import PageSource, PageView, page_url

_RATE_WINDOW_S = 1.0


def show_page(options: argparse.Namespace) -> int:
    """Show the target's page live, or print one view of it.

    Raises:
        BadInput: the target is not a server's address, or an option needs history.
        NotFound: the address has no page of a known server.
    """
    url = page_url(options.target)
    if options.since is not None or options.at is not None:
        raise BadInput("a metrics page has no history. Leave out --since and --at.")
    if options.screen not in (None, 1):
        raise BadInput(
            f"a metrics page has totals only, so there is no screen {options.screen} of it. Leave"
            " out --screen, or start the server with inferscope run."
        )
    source = PageSource(url)
    window_ns = round((options.window or 60.0) * 1e9)
    try:
        if options.once or options.json or not can_draw():
            _print(_view_with_rates(source, window_ns), source, options)
        else:
            source.poll()  # raises before the screen opens if the page is unreadable
            from inferscope.tui import PageApp

            PageApp(source, window_ns=window_ns, ascii=options.ascii).run()
    finally:
        source.close()
    return 0


def _view_with_rates(source: PageSource, window_ns: int) -> PageView:
    """Return a view with rates, from two readings; its latencies are since the server's start."""
    first = source.view(window_ns)
    time.sleep(_RATE_WINDOW_S)
    second = source.view(window_ns)
    return msgspec.structs.replace(
        second,
        latency_window_ns=None,
        ttft=first.ttft,
        tbt=first.tbt,
        e2e=first.e2e,
        queue=first.queue,
        cached_share=first.cached_share,
    )


def _print(view: PageView, source: PageSource, options: argparse.Namespace) -> None:
    if options.json:
        sys.stdout.write(json_line(view))
        return
    from inferscope.insight.page import page_findings
    from inferscope.text.page import page_text

    found = page_findings(source.totals(None)).findings or ()
    sys.stdout.write(page_text(view, findings=found, ascii=options.ascii))
