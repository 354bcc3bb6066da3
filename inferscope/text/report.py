"""A report as lines of text, wrapped at a width, and as JSON."""

from __future__ import annotations

import textwrap

import msgspec

from inferscope.insight import Facts
from inferscope.json_document import Document, json_line
from inferscope.text.explanation import NS_PER_TENTH_MS, CauseRow, WhyResult
from inferscope.text.labels import cause_role
from inferscope.text.lines import TRIANGLE, Role
from inferscope.text.plots import bar, plain, to_ascii

_NAME, _MS, _SHARE, _BAR = 22, 10, 8, 10
_BAR_WIDTH, _SENTENCE_WIDTH = 100, 72
"""Minimum widths: of lines with a bar; of lines with the sentence to the right of the numbers."""
_ANSI = {"prefill": "33", "decode": "36", "alarm": "31"}
"""ANSI colours nearest to the screen's."""


class WhyRow(msgspec.Struct, frozen=True):
    """One cause of a request's latency."""

    cause: str
    """Name of the ledger row."""
    ns: int
    """Time booked to the cause."""
    share: float
    """Share of the sum of all rows."""
    sentence: str
    """Explanation with numbers."""


class WhyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of one request's latency."""

    title: str
    """Request, engine, end and token counts."""
    summary: str
    """Latencies in a sentence."""
    verdicts: tuple[str, ...]
    """Sentences on each objective that was given."""
    split: str
    """Reason why modelled rows are not reliable; empty where they are."""
    rows: tuple[WhyRow, ...]
    """Causes, the largest first; time without a record is the last row."""
    conclusions: tuple[str, ...]
    """Main causes before and after the first token."""
    caveats: tuple[str, ...]
    """Methods of the numbers, and what they leave out."""
    sum_ns: int
    """Sum of the ledger's causes."""
    life_ns: int
    """Time from arrival to the end of delivery, or to now."""


class WhyDocument(Document, frozen=True, kw_only=True):
    """One request, explained (`inferscope why REQUEST --json`)."""

    report: WhyReport
    """Explanation in sentences and numbers."""
    facts: Facts
    """Facts that the explanation was made from."""


def report_lines(
    report: WhyResult, *, width: int = 100, colour: bool = False, ascii: bool = False
) -> str:
    """Return a report as text.

    Args:
        report: the report.
        width: maximum line width; longer names may exceed it.
        colour: colour bars and cause names.
        ascii: use ASCII characters only.
    """
    lines = [
        *textwrap.wrap(plain(report.title), width, break_on_hyphens=False),
        *textwrap.wrap(report.summary, width),
        *_verdicts(report, width),
        "",
    ]
    if report.split:
        lines.append(f"  {TRIANGLE} {report.split}")
    largest = max((row.ns for row in report.rows), default=1)
    for row in report.rows:
        lines += _row(row, width, largest, colour=colour)
    lines.append(f"  {'sum':<{_NAME}}{_ms(sum(row.tenths_ms for row in report.rows)):>{_MS}}")
    for sentence in ("", *report.conclusions, "", *report.caveats):
        lines += textwrap.wrap(plain(sentence), width, break_on_hyphens=False) or [""]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def report_json(report: WhyResult, facts: Facts) -> str:
    """Return a report with its facts as the line that `--json` prints."""
    whole_ns = sum(row.ns for row in report.rows)
    explained = WhyReport(
        title=report.title,
        summary=report.summary,
        verdicts=report.verdicts,
        split=report.split,
        rows=tuple(
            WhyRow(row.cause, row.ns, row.ns / whole_ns if whole_ns else 0.0, row.sentence)
            for row in report.rows
        ),
        conclusions=report.conclusions,
        caveats=report.caveats,
        sum_ns=report.sum_ns,
        life_ns=report.life_ns,
    )
    return json_line(WhyDocument(report=explained, facts=facts))


def _verdicts(report: WhyResult, width: int) -> list[str]:
    lines: list[str] = []
    for verdict in report.verdicts:
        lines += ["", *textwrap.wrap(plain(verdict), width, break_on_hyphens=False)]
    return lines


def _row(row: CauseRow, width: int, largest_ns: int, *, colour: bool) -> list[str]:
    """Return the lines of one cause; the sentence is right of its numbers, or below them."""
    cells = _BAR if width >= _BAR_WIDTH else 0
    name = f"{row.cause:<{_NAME}}"
    drawn = bar(row.ns / largest_ns, cells) if cells else ""
    if colour:
        name, drawn = (_paint(text, cause_role(row.cause)) for text in (name, drawn))
    head = f"  {name}{_ms(row.tenths_ms):>{_MS}}{row.mills / 10:>{_SHARE - 1}.1f}%"
    if drawn:
        head += f"  {drawn}"
    indent = 2 + _NAME + _MS + _SHARE + (cells + 2 if cells else 0) + 2
    sentence = plain(row.sentence)
    if width < _SENTENCE_WIDTH:
        return [head, *_wrapped(sentence, width, 4)]
    first, *rest = _wrapped(sentence, width, indent)
    return [f"{head}  {first.strip()}", *rest]


def _wrapped(sentence: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        sentence,
        max(width, indent + 20),
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
    )


def _ms(tenths: int) -> str:
    return f"{tenths * NS_PER_TENTH_MS / 1e6:.1f} ms"


def _paint(text: str, role: Role) -> str:
    code = _ANSI.get(role)
    return f"\x1b[{code}m{text}\x1b[0m" if code else text
