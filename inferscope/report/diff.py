"""The comparison of two recordings as a page: the verdict, its causes, and all rows."""

from __future__ import annotations

from inferscope.insight.compare import NO_DIFFERENCE, Difference
from inferscope.report.blocks import (
    Bar,
    Block,
    Cell,
    Code,
    Column,
    Marked,
    Number,
    Section,
    Table,
    prose,
)
from inferscope.report.page import Page
from inferscope.text import (
    GROUPS,
    DiffDocument,
    diff_engines,
    diff_method,
    explanation_sentence,
    finding_sentence,
    label,
    number,
    outcome_sentence,
)
from inferscope.text.plots import UNKNOWN

_TICK = 0.01
"""Least length of a bar, as a share of its cell."""
_WIDEST = 1.0
"""Change at the end of a bar's cell at most, as a share of A; bars are cut there."""


def diff_report(document: DiffDocument) -> Page:
    """Return a comparison as a page."""
    comparison = document.comparison
    verdict: list[Block] = [prose(document.verdict, role="strong")]
    verdict += [
        prose(explanation_sentence(explanation, comparison))
        for explanation in comparison.explanations
    ]
    verdict += [prose(f"Note: {note}", role="dim") for note in document.notes]
    sections = [Section("verdict", "Verdict", tuple(verdict))]
    if comparison.outcomes:
        outcomes = tuple(
            prose(outcome_sentence(each), role="alarm" if each.outcome == "failed" else "")
            for each in comparison.outcomes
        )
        sections.append(Section("limits", "Limits", outcomes))
    for group, title in GROUPS.items():
        rows = [row for row in comparison.rows if row.group == group]
        if rows:
            sections.append(Section(group, title[0].upper() + title[1:], (_table(rows),)))
    if document.findings:
        found = tuple(prose(finding_sentence(each)) for each in document.findings)
        sections.append(Section("findings", "Findings", found))
    sides = Table(
        (Column(""), Column("recording"), Column("engines"), *_NUMBERS),
        tuple(
            (
                letter,
                Code(side.name),
                diff_engines(side),
                Number.count(f"{letter}.num_requests", side.num_requests),
                Number.count(f"{letter}.num_failed", side.num_failed),
                Number.count(f"{letter}.num_left_out", side.num_left_out),
                Number.duration(f"{letter}.span_ns", side.span_ns),
            )
            for letter, side in (("A", document.a), ("B", document.b))
        ),
    )
    sections.append(
        Section("method", "Recordings and method", (sides, prose(diff_method(comparison))))
    )
    return Page(
        title="What changed from A to B",
        subtitle=f"A: {document.a.name}, B: {document.b.name}",
        sections=tuple(sections),
    )


_NUMBERS = tuple(
    Column(heading, "number")
    for heading in ("requests", "failed", "observed in part", "time of arrivals")
)


def _table(rows: list[Difference]) -> Table:
    """Return a table; its bars are intervals, on one scale, with A in the middle."""
    widest = max(
        (abs(end) / row.a for row in rows if row.a for end in (row.low, row.high)), default=0
    )
    return Table(
        (
            Column("measure"),
            Column("A", "number"),
            Column("B", "number"),
            Column("B - A", "number"),
            Column("from", "number", "lower end of the interval"),
            Column("to", "number", "upper end of the interval"),
            Column("change", "number"),
            Column("interval of the change", "bar"),
            Column("verdict"),
        ),
        tuple(_row(row, widest) for row in rows),
        method="* decides the verdict. "
        + (
            f"The middle of a bar's cell is A, its ends are ± {100 * widest:.0f} %."
            if widest
            else ""
        ),
    )


def _row(row: Difference, widest: float) -> tuple[Cell, ...]:
    is_shown = row.verdict != NO_DIFFERENCE
    change = UNKNOWN if row.share is None else f"{100 * row.share:+.1f}%"
    bar: Cell = ""
    if row.a and widest:
        left, right = (
            min(max(0.5 + end / row.a / widest / 2, 0.0), 1.0) for end in (row.low, row.high)
        )
        start = min(left, 1 - _TICK)
        bar = Bar(start, max(right - start, _TICK), "strong" if is_shown else "dim")
    name = f"{label(row)} *" if row.is_headline else label(row)
    suffix = {"ns": "_ns", "requests/s": "_s", "tok/s": "_s"}.get(row.unit, "")
    return (
        name,
        *(
            Number(f"{row.name}.{key}{suffix}", value, number(value, row.unit))
            for key, value in (
                ("a", row.a),
                ("b", row.b),
                ("difference", row.difference),
                ("low", row.low),
                ("high", row.high),
            )
        ),
        Number(f"{row.name}.share", row.share, change),
        bar,
        Marked(row.verdict, "strong") if is_shown else row.verdict,
    )
