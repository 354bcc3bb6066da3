"""Summary of a load as text and as JSON, and the live status line."""

from __future__ import annotations

from inferscope.foreign import one_line
from inferscope.json_document import Document
from inferscope.load.server import TokenizerRatio
from inferscope.load.summary import LATE_P99_MS, LatencyQuantiles, LoadStats, LoadSummary

_MOST_CELLS = 79


class LoadDocument(Document, frozen=True, kw_only=True):
    """Outcome of one load (`inferscope load URL --json`)."""

    url: str
    """Address of the server."""
    model: str
    """Model that was asked for."""
    endpoint: str
    """Kind of request: chat or completions."""
    seed: int
    """Seed of the load; `--seed` repeats it."""
    run: str
    """Name of the run, the beginning of every request's id."""
    words: TokenizerRatio | None
    """Tokens of the words that prompts are made of; None where no length was asked for."""
    interrupted: bool
    """Whether the load was stopped before its end."""
    summary: LoadSummary
    """Counts, rates and latencies."""


def summary_text(summary: LoadSummary) -> str:
    """Return the summary as lines of text."""
    lines = [
        f"scheduled  {summary.scheduled}   sent {summary.sent}   finished {summary.finished}   "
        f"failed {sum(summary.failed.values())}   refused {summary.refused}   "
        f"abandoned {summary.abandoned}",
        *(_failure(kind, num, summary.examples[kind]) for kind, num in summary.failed.items()),
        f"in         {summary.span_ns / 1e9:.1f} s   {summary.requests_s:.2f} requests/s   "
        f"{summary.output_tok_s:.1f} output tokens/s",
        _tokens(summary),
        "",
        f"{'ms':<10}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
        _row("TTFT", summary.ttft),
        _row("TBT", summary.tbt),
        _row("E2E", summary.e2e),
        _row("late", summary.late),
        "",
        _lateness(summary),
    ]
    if summary.was_seen_before:
        lines.append(
            f"THE SERVER HAD CACHED THESE PROMPTS: {summary.seen_before_share:.0%} of the prompt "
            "tokens that this load sends once came from the server's prefix cache, and TTFT is "
            "that of repeated prompts. An earlier load had the same seed: leave --seed out, or "
            "restart the server."
        )
    if summary.refused:
        lines.append(
            f"{summary.refused} requests were refused by the generator, not by the server: too "
            "many were open (--most-open)."
        )
    return "\n".join(lines) + "\n"


def live_line(tally: LoadStats, *, elapsed_s: float, num_scheduled: int, num_open: int) -> str:
    """Return the status line of a running load, at most 79 cells wide: the last parts go first."""
    line = f"{elapsed_s:.1f} s"
    for part in (
        f"sent {num_scheduled}",
        f"open {num_open}",
        f"done {tally.num_finished}",
        f"failed {tally.num_failed}",
        f"TTFT p50 {_ms(tally.ttft.quantile_ns(0.5))} ms",
        f"late p99 {_ms(tally.late.quantile_ns(0.99))} ms",
    ):
        if len(line) + 2 + len(part) > _MOST_CELLS:
            break
        line += f"  {part}"
    return line


def _failure(kind: str, num: int, example: str) -> str:
    return one_line(f"           {num} x {kind}" + (f": {example}" if example else ""))


def _tokens(summary: LoadSummary) -> str:
    prompt, cached = summary.prompt_tokens, summary.cached_tokens
    output = f"{summary.output_tokens} output"
    if summary.is_output_counted:
        output += " (counted as events: the server sent no usage)"
    share = "" if summary.cached_share is None else f", {summary.cached_share:.0%}"
    found = "" if cached is None else f" ({cached} from its cache{share})"
    return f"tokens     {'-' if prompt is None else prompt} prompt{found}, {output}"


def _row(name: str, quantiles: LatencyQuantiles) -> str:
    values = (quantiles.p50_ns, quantiles.p95_ns, quantiles.p99_ns, quantiles.max_ns)
    return f"{name:<10}" + "".join(f"{_ms(value):>10}" for value in values)


def _lateness(summary: LoadSummary) -> str:
    late = summary.late
    if late.p99_ns is None:
        return "Nothing was sent."
    numbers = f"requests left {_ms(late.p99_ns)} ms late at p99, {_ms(late.max_ns)} ms at most"
    if summary.fell_behind:
        return (
            f"THE GENERATOR FELL BEHIND: {numbers} (bound: {LATE_P99_MS:.0f} ms at p99). "
            "The load deviated from the plan: this machine was busy, or the rate is too "
            "high for one process. Give it a dedicated core, or split the rate between processes."
        )
    return f"The generator kept up: {numbers}."


def _ms(duration_ns: float | None) -> str:
    return "-" if duration_ns is None else f"{duration_ns / 1e6:.1f}"
