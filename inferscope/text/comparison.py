"""A comparison of two option sets as a page of text and as JSON, with the verdict as a sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from inferscope.insight.compare import Comparison, Difference, Limits
from inferscope.json_document import Document
from inferscope.text.plots import (
    UNKNOWN,
    duration,
    fit_name,
    milliseconds,
    per_second,
    plain,
    share,
    to_ascii,
)

_NAME, _NUMBER, _INTERVAL = 24, 11, 22
_FEW_NS = 9.995e6
"""Time below which milliseconds have two decimals."""
GROUPS = {
    "workload": "workload",
    "latency": "latency, ms",
    "load": "load",
    "phase": "device time per request, ms",
    "ledger": "ledger: time per request from arrival to delivery, by cause, ms",
    "ttft_ledger": "ledger of TTFT: time per request, by cause, ms",
    "tbt_ledger": "ledger of TBT: time per gap between tokens, by cause, ms",
    "longest_gap": "longest gap between tokens of each request, by cause, ms",
}
"""Titles of the groups of rows, in the order of a page."""
_UNITS = {"ns": " ms", "requests/s": " per s", "tok/s": " per s", "tokens": "", "share": ""}
_LABELS = {
    **{f"{metric}_{of}": f"{metric.upper()} {of}"
       for metric in ("ttft", "tbt", "tpot", "e2e")
       for of in ("mean", "p50", "p90", "p95", "p99")},
    "requests": "arrivals, requests/s",
    "failed": "failed requests",
    "prompt_tokens": "prompt, tokens",
    "output_tokens": "answer, tokens",
    "goodput": "goodput, requests/s",
    "throughput": "output, tokens/s",
    "cached_prompt": "prompt from the cache",
    "recomputed": "of it recomputed",
    "drafted": "of it drafting",
    "rejected": "of it rejected drafts",
}  # fmt: skip


class ComparisonDocument(Document, frozen=True, kw_only=True):
    """Same load with two option sets (`inferscope demo --compare A B --json`)."""

    a: str
    """Options of side A."""
    b: str
    """Options of side B."""
    model: str
    """Name of the model."""
    seed: int
    """Seed of the first round's load; each further round has the next."""
    num_requests: int
    """Requests of one run."""
    requests_s: float
    """Requests per second of the load."""
    num_rounds: int
    """Number of rounds, each a run of A and a run of B."""
    comparison: Comparison
    """Rows, limits of the goodput, and numbers of requests."""
    verdict: str
    """Verdict in a sentence."""


def verdict_sentence(headlines: Sequence[Difference], *, a: str, b: str) -> str:
    """Return the verdict on the headline rows in a sentence."""
    if not headlines:
        return "No verdict: too few runs have finished requests."
    found = [row for row in headlines if row.verdict in ("lower", "higher")]
    rest = listed([label(row) for row in headlines if row not in found])
    if not found:
        return f"No difference shown between {a} and {b}: not in {rest}."
    changes = listed([change(row) for row in found])
    end = f"; no difference shown in {rest}." if rest else "."
    return f"With {b} instead of {a}, {changes}{end}"


def comparison_page(document: ComparisonDocument, *, width: int, ascii: bool) -> str:
    """Return a comparison as a page of text, the verdict at its end."""
    comparison = document.comparison
    lines = [
        f"A  {plain(document.a)}",
        f"B  {plain(document.b)}",
        *textwrap.wrap(
            f"{plain(document.model)}, {document.num_rounds} rounds in the order A B, B A, …; each "
            f"run has {document.num_requests} requests at {per_second(document.requests_s)}/s; "
            f"seeds {document.seed} to {document.seed + document.num_rounds - 1}",
            width,
        ),
    ]
    lines += [*tables(comparison.rows), ""]
    for sentence in (*_notes(comparison), f"Verdict: {plain(document.verdict)}"):
        lines += textwrap.wrap(sentence, width, break_on_hyphens=False)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def tables(rows: Sequence[Difference]) -> list[str]:
    """Return the lines of a table for each group of rows, with an empty line before it."""
    lines = []
    for group, title in GROUPS.items():
        of_group = [row for row in rows if row.group == group]
        if of_group:
            lines += ["", _line(title, ("A", "B", "B - A", ""), "interval", "")]
            lines += map(_row, of_group)
    return lines


def _notes(comparison: Comparison) -> list[str]:
    heads = comparison.headlines
    rest = next((row for row in comparison.rows if not row.is_headline), None)
    sentences = ["Values are means over the runs; intervals come from resampled rounds."]
    if heads and rest is not None:
        sentences.append(
            f"Rows marked * decide the verdict, with intervals of {share(heads[0].level)}: equal"
            f" sides differ in any of them at most once in twenty comparisons. Other intervals are"
            f" of {share(rest.level)}, and one row in twenty may differ by chance."
        )
    sentences.append(f"Goodput: {within(comparison.limits)}, twice the medians of both sides.")
    if comparison.num_left_out:
        sentences.append(f"{comparison.num_left_out} requests that failed are in no row.")
    return sentences


def within(limits: Limits) -> str:
    """Return the limits of the goodput in words."""
    tpot = "" if limits.tpot_ns is None else f" and TPOT within {duration(limits.tpot_ns)}"
    return f"TTFT within {duration(limits.ttft_ns)}{tpot}"


def _row(row: Difference) -> str:
    name = f"{label(row)} *" if row.is_headline else label(row)
    numbers = [number(value, row.unit) for value in (row.a, row.b, row.difference)]
    verdict = row.verdict if row.verdict in ("lower", "higher") else ""
    percent = UNKNOWN if row.share is None else f"{100 * row.share:+.0f}%"
    return _line(name, (*numbers, percent), interval(row), verdict)


def _line(name: str, numbers: Sequence[str], interval: str, verdict: str) -> str:
    cells = "".join(f"{each:>{_NUMBER}}" for each in numbers)
    if len(name) > _NAME and not numbers[0].strip("A"):
        return f"{name}\n{' ' * _NAME}{cells}{interval:>{_INTERVAL}}"
    return f"{fit_name(name, _NAME)}{cells}{interval:>{_INTERVAL}}  {verdict}"


def number(value: float, unit: str) -> str:
    """Return a value of a row, without its unit."""
    if unit == "ns":
        return f"{value / 1e6:.2f}" if abs(value) < _FEW_NS else milliseconds(value)
    return share(value) if unit == "share" else per_second(value)


def measured(value: float, unit: str) -> str:
    """Return a value of a row with its unit."""
    return f"{number(value, unit)}{_UNITS[unit]}"


def interval(row: Difference) -> str:
    """Return a row's interval, without its unit."""
    return f"{number(row.low, row.unit)} to {number(row.high, row.unit)}"


def label(row: Difference) -> str:
    """Return a row's name on a page."""
    return _LABELS.get(row.name, row.name)


def change(row: Difference) -> str:
    """Return a row's change: `TTFT p50 is 31% lower (by 12.0 to 45.1 ms)`."""
    name = label(row).partition(",")[0]
    if not row.a:
        return f"{name} is {row.verdict}"
    least, most = sorted((abs(row.low), abs(row.high)))
    ends = f"{number(least, row.unit)} to {measured(most, row.unit)}"
    return f"{name} is {100 * abs(row.difference / row.a):.0f}% {row.verdict} (by {ends})"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    short = [name.partition(",")[0] if name.endswith("/s") else name for name in names]
    return (
        short[0] if len(short) == 1 else f"{', '.join(short[:-1])} and {short[-1]}" if short else ""
    )
