"""A metrics page as lines: the output of `attach http://…`, live and once."""

from __future__ import annotations

from inferscope.metrics_page import BucketQuantiles, PageView
from inferscope.text.lines import TRIANGLE, Line, Role, text_of
from inferscope.text.plots import (
    UNKNOWN,
    bar,
    clock,
    count,
    duration,
    fit,
    per_second,
    plain,
    share,
    to_ascii,
)

LABEL = "from /metrics: totals only, no single requests, no ledger"


def page_lines(view: PageView, width: int) -> list[Line]:
    """Return the lines of a page: server, current state, rates, latencies."""
    models = ", ".join(view.models) or UNKNOWN
    head = "  ".join(("InferScope", models, view.server, view.url, clock(view.real_ns)))
    over = f"over {duration(view.window_ns)}" if view.window_ns else "from the second poll on"
    lines: list[Line] = [
        ((fit(plain(head), width).rstrip(), "title"),),
        ((f"{TRIANGLE} {LABEL}", "alarm"),),
        (),
        (("Now", "title"),),
        _row("running", count(view.num_running)),
        _row("waiting", count(view.num_waiting)),
        (*_row("KV in use", share(view.kv_share)), *_gauge(view.kv_share, width)),
        _row("prefix hit", share(view.cached_share)),
        (),
        ((f"Rates, {over}", "title"),),
        _row("requests", per_second(view.requests_s), "/s"),
        _row("prompt", per_second(view.prompt_tok_s), "tok/s", "prefill"),
        _row("generated", per_second(view.generated_tok_s), "tok/s", "decode"),
        _row("preempted", per_second(view.preemptions_s), "/s"),
        (),
        ((_latency_title(view), "title"),),
        ((f"  {'':10}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}{'num':>9}", "dim"),),
    ]
    latencies = (("TTFT", view.ttft), ("TBT", view.tbt), ("E2E", view.e2e), ("queue", view.queue))
    return [*lines, *(_latency(word, found) for word, found in latencies)]


def page_text(view: PageView, *, width: int = 100, ascii: bool = False) -> str:
    """Return a page as text."""
    text = "\n".join(text_of(line).rstrip() for line in page_lines(view, width)) + "\n"
    return to_ascii(text) if ascii else text


def _latency_title(view: PageView) -> str:
    if view.latency_window_ns is None:
        return "Latencies, since the server's start, within its buckets"
    return f"Latencies, over {duration(view.latency_window_ns)}, within the server's buckets"


def _row(word: str, number: str, unit: str = "", role: Role = "body") -> Line:
    return ((f"  {word:10}", "dim"), (f"{number:>10}", role), (f" {unit}", "dim"))


def _gauge(value: float | None, width: int) -> Line:
    room = min(40, width - 25)
    return () if value is None or room < 8 else ((bar(min(value, 1.0), room), "gauge"),)


def _latency(word: str, found: BucketQuantiles | None) -> Line:
    if found is None:
        return ((f"  {word:10}", "dim"), (f"{UNKNOWN:>10}" * 4 + f"{UNKNOWN:>9}", "body"))
    cells = [
        _sign(name, found) + duration(value_ns)
        for name, value_ns in (("p50", found.p50_ns), ("p90", found.p90_ns), ("p99", found.p99_ns))
    ]
    cells.append(duration(found.mean_ns))
    text = "".join(f"{cell:>10}" for cell in cells) + f"{count(found.num):>9}"
    return ((f"  {word:10}", "dim"), (text, "body"))


def _sign(name: str, found: BucketQuantiles) -> str:
    """Return the sign of a quantile with only one known bound."""
    if name in found.below:
        return "<"
    return ">" if name in found.beyond else ""
