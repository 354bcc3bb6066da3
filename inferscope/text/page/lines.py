"""A metrics page as lines: the output of `attach http://…`, live and once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from inferscope.insight.findings import Finding
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
    sparkline,
    to_ascii,
)

LABEL = "from /metrics: totals only, no single requests, no ledger"


Trends = Mapping[str, Sequence[float | None]]

_RATES = ("requests_s", "prompt_tok_s", "generated_tok_s", "preemptions_s")
_NAMES = {
    "num_running": "running",
    "num_waiting": "waiting",
    "kv_share": "KV in use",
    "cached_share": "prefix hit",
    "requests_s": "requests",
    "prompt_tok_s": "prompt",
    "generated_tok_s": "generated",
    "preemptions_s": "preempted",
    "ttft": "TTFT",
    "tbt": "TBT",
    "e2e": "E2E",
    "queue": "queue",
}
"""Words on the screen, by the view's fields."""
_REASON_WIDTH, _REASON_INDENT = 66, 13


def page_lines(
    view: PageView,
    width: int,
    *,
    findings: Sequence[Finding] = (),
    trends: Trends | None = None,
) -> list[Line]:
    """Return the lines of a page: server, findings, current state, rates, latencies.

    Args:
        view: the page's values.
        width: maximum line width.
        findings: problems that its totals show.
        trends: gauges and rates of the readings in the window, by their names in the page's room.
    """
    past = trends or {}
    rates: tuple[tuple[str, float | None, str, Role, str], ...] = (
        ("requests", view.requests_s, "/s", "body", "finished"),
        ("prompt", view.prompt_tok_s, "tok/s", "prefill", "prompt_tokens"),
        ("generated", view.generated_tok_s, "tok/s", "decode", "generated_tokens"),
        ("preempted", view.preemptions_s, "/s", "body", "preemptions"),
    )
    models = ", ".join(view.models) or UNKNOWN
    head = "  ".join(("InferScope", models, view.server, view.url, clock(view.real_ns)))
    over = f"over {duration(view.window_ns)}" if view.window_ns else "from the second poll on"
    lines: list[Line] = [
        ((fit(plain(head), width).rstrip(), "title"),),
        ((f"{TRIANGLE} {LABEL}", "alarm"),),
        *(((fit(f"  {_headline(each)}", width).rstrip(), "alarm"),) for each in findings),
        (),
        (("Now", "title"),),
        (*_row("running", count(view.num_running)), *_trend(past.get("running"), width)),
        (*_row("waiting", count(view.num_waiting)), *_trend(past.get("waiting"), width)),
        (*_row("KV in use", share(view.kv_share)), *_gauge(view.kv_share, width)),
        _row("prefix hit", share(view.cached_share)),
        (),
        ((f"Rates, {over}", "title"),),
        *(
            (*_row(word, per_second(rate), unit, role), *_trend(past.get(name), width, unit))
            for word, rate, unit, role, name in rates
        ),
        (),
        ((_latency_title(view), "title"),),
        ((f"  {'':10}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}{'num':>9}", "dim"),),
    ]
    latencies = (("TTFT", view.ttft), ("TBT", view.tbt), ("E2E", view.e2e), ("queue", view.queue))
    return [*lines, *(_latency(word, found) for word, found in latencies)]


def page_text(
    view: PageView, *, findings: Sequence[Finding] = (), width: int = 100, ascii: bool = False
) -> str:
    """Return a page as text."""
    lines = page_lines(view, width, findings=findings)
    text = "\n".join(text_of(line).rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def unknown_reasons(view: PageView) -> tuple[str, ...]:
    """Return why each `-` of a page is unknown, as lines for the help."""
    missing = [name for name in _NAMES if getattr(view, name) is None]
    waits = [name for name in missing if name in _RATES and not view.window_ns]
    lacking = [_NAMES[name] for name in missing if name not in waits]
    lines = [f"{UNKNOWN:<{_REASON_INDENT}}rates: known from the second poll on"] if waits else []
    if lacking:
        sentence = f"{', '.join(lacking)}: {view.server}'s page has no such values"
        first, *more = wrap(plain(sentence), _REASON_WIDTH)
        lines.append(f"{UNKNOWN:<{_REASON_INDENT}}{first}")
        lines += [" " * _REASON_INDENT + line for line in more]
    return tuple(lines)


def _headline(finding: Finding) -> str:
    return f"{finding.severity:<7}{finding.title}: {' '.join(finding.sentences)}"


def _latency_title(view: PageView) -> str:
    if view.latency_window_ns is None:
        return "Latencies, since the server's start, within its buckets"
    return f"Latencies, over {duration(view.latency_window_ns)}, within the server's buckets"


def _row(word: str, number: str, unit: str = "", role: Role = "body") -> Line:
    return ((f"  {word:10}", "dim"), (f"{number:>10}", role), (f" {unit}", "dim"))


def _trend(values: Sequence[float | None] | None, width: int, unit: str = "") -> Line:
    """Return a series as a sparkline at one column, whatever the row's unit."""
    room = min(40, width - 32)
    if values is None or len(values) < 2 or room < 8:
        return ()
    return ((" " * (6 - len(unit)) + sparkline(values, room), "dim"),)


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
