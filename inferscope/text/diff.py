"""A comparison of two recordings as a page of text and as JSON."""

from __future__ import annotations

import textwrap

import msgspec

from inferscope.insight.compare import (
    Explanation,
    FindingChange,
    LimitOutcome,
    RecordingComparison,
)
from inferscope.json_document import Document
from inferscope.text.comparison import (
    change,
    interval,
    label,
    listed,
    measured,
    tables,
    verdict_sentence,
    within,
)
from inferscope.text.evidence import many
from inferscope.text.plots import UNKNOWN, plain, seconds, share, to_ascii

_WORKLOAD = ("requests", "prompt_tokens", "output_tokens")


class DiffEngine(msgspec.Struct, frozen=True):
    """An engine of a recording."""

    engine_id: str
    """Name of the engine."""
    engine: str
    """Kind of the engine; empty where it is not known."""
    version: str
    """Version of the engine; empty where it is not known."""
    model: str
    """Served name of its model; empty where it is not known."""
    is_synthetic: bool
    """Whether the records are marked as synthetic."""


class DiffSide(msgspec.Struct, frozen=True, kw_only=True):
    """One recording."""

    name: str
    """Recording, as it was given."""
    engines: tuple[DiffEngine, ...]
    """Engines of the recording."""
    num_requests: int
    """Requests that are compared: answered, and observed as a whole."""
    num_failed: int
    """Requests that the server did not answer as a whole."""
    num_left_out: int
    """Requests of which only a part was observed."""
    span_ns: int
    """Time from the first arrival to the last."""


class DiffDocument(Document, frozen=True, kw_only=True):
    """Comparison of two recordings (`inferscope diff A B --json`)."""

    a: DiffSide
    """Recording A."""
    b: DiffSide
    """Recording B."""
    comparison: RecordingComparison
    """Rows, causes, and outcomes of the limits."""
    findings: tuple[FindingChange, ...]
    """Findings of either side, the largest change first."""
    notes: tuple[str, ...]
    """Other differences between the recordings, in sentences."""
    verdict: str
    """Verdict in a sentence."""


def diff_document(
    a: DiffSide, b: DiffSide, comparison: RecordingComparison, findings: tuple[FindingChange, ...]
) -> DiffDocument:
    """Return the document of a comparison, with its notes and its verdict."""
    return DiffDocument(
        a=a,
        b=b,
        comparison=comparison,
        findings=findings,
        notes=tuple(_notes(a, b, comparison)),
        verdict=_verdict(a, b, comparison),
    )


def diff_page(document: DiffDocument, *, width: int, ascii: bool) -> str:
    """Return a comparison as a page of text, the verdict at its end."""
    comparison = document.comparison
    paragraphs = [*(f"Note: {note}" for note in document.notes), diff_method(comparison)]
    ledgers = {"ttft_ledger", "tbt_ledger", "longest_gap"}
    lines = [
        f"{letter}  {plain(_side(side))}" for letter, side in (("A", document.a), ("B", document.b))
    ]
    lines += [*tables([row for row in comparison.rows if row.group not in ledgers]), ""]
    if document.findings:
        lines += [*map(finding_sentence, document.findings), ""]
    for paragraph in paragraphs:
        lines += textwrap.wrap(plain(paragraph), width, break_on_hyphens=False)
    lines += ["", *_wrapped(f"Verdict: {document.verdict}", width)]
    for explanation in comparison.explanations:
        lines += _wrapped(explanation_sentence(explanation, comparison), width)
    for outcome in comparison.outcomes:
        lines += _wrapped(outcome_sentence(outcome), width)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def outcome_sentence(outcome: LimitOutcome) -> str:
    """Return the outcome of a limit in a sentence."""
    row = outcome.row
    return (
        f"{outcome.limit}: {outcome.outcome}. {label(row)} changed by "
        f"{measured(row.difference, row.unit)} (interval {interval(row)}), and "
        f"{measured(outcome.allowed, row.unit)} is allowed."
    )


def diff_engines(side: DiffSide) -> str:
    """Return the engines of a side, equal ones once."""
    return ", ".join(
        dict.fromkeys(
            " ".join(filter(None, (each.engine, each.version, each.model))) for each in side.engines
        )
    )


def _side(side: DiffSide) -> str:
    failed = f", {side.num_failed} failed" if side.num_failed else ""
    return (
        f"{side.name}: {diff_engines(side)}; {many(side.num_requests, 'request')}{failed} over "
        f"{seconds(side.span_ns)} s"
    )


def _notes(a: DiffSide, b: DiffSide, comparison: RecordingComparison) -> list[str]:
    """Return what else differs, and what no row counts."""
    notes = []
    for what in ("model", "engine", "version"):
        in_a, in_b = (
            listed(sorted({getattr(each, what) or "unknown" for each in side.engines}))
            for side in (a, b)
        )
        if in_a != in_b:
            notes.append(f"{what} differs: {in_a} in A, {in_b} in B.")
    notes += [
        f"workload differs: {change(row)} in B."
        for row in comparison.rows
        if row.name in _WORKLOAD and row.verdict in ("lower", "higher")
    ]
    for letter, side in (("A", a), ("B", b)):
        if side.num_left_out:
            notes.append(
                f"{many(side.num_left_out, 'request')} of {letter} were observed in part and are in"
                " no row."
            )
        if any(each.is_synthetic for each in side.engines):
            notes.append(f"the records of {letter} are synthetic.")
    return notes


def diff_method(comparison: RecordingComparison) -> str:
    """Return how the rows were made, in sentences."""
    if comparison.num_paired:
        matched = (
            f"Both recordings have the same {comparison.num_paired} requests by name, and each is "
            "compared with itself."
        )
    else:
        matched = (
            f"Requests are weighted to common shares of prompt and answer lengths; "
            f"{share(comparison.overlap_share)} of the workload is common."
        )
    sentences = [
        f"{matched} Intervals come from resampled blocks of time.",
    ]
    if comparison.headlines:
        sentences.append(
            f"Rows marked * decide the verdict: equal sides differ in any of them in at most "
            f"{share(1 - comparison.level)} of comparisons. Other rows have intervals of "
            f"{share(comparison.level)} each, and some of them may differ by chance."
        )
    if comparison.too_few:
        names = listed(comparison.too_few)
        sentences.append(f"Too few values on a side for {names}: record longer.")
    sentences.append(f"Goodput: {within(comparison.limits)}, twice the medians of both sides.")
    return " ".join(sentences)


def _verdict(a: DiffSide, b: DiffSide, comparison: RecordingComparison) -> str:
    if comparison.is_comparable:
        return verdict_sentence(comparison.headlines, a="A", b="B")
    return (
        "None: the workloads differ too much to compare. "
        f"{share(comparison.overlap_share)} of the workload is common, by the lengths of prompts "
        "and answers. Record both sides under the same load."
    )


def explanation_sentence(explanation: Explanation, comparison: RecordingComparison) -> str:
    """Return the causes of a headline in a sentence."""
    by_name = {row.name: row for row in comparison.rows}
    name = label(by_name[explanation.headline])
    if not explanation.causes:
        return f"{name}: no row that explains it differs by itself."
    parts = [
        f"{cause.rpartition('.')[2]} ({measured(by_name[cause].difference, 'ns')})"
        for cause in explanation.causes
    ]
    group = by_name[explanation.causes[0]].group
    if group == "longest_gap":
        return f"{name}: what differs with it in each request's longest gap: {listed(parts)}."
    unit = "per gap between tokens" if group == "tbt_ledger" else "per request"
    return f"{name}: the ledger's rows that differ with it, {unit}: {listed(parts)}."


def finding_sentence(finding: FindingChange) -> str:
    """Return a finding of either side in a sentence."""
    a, b = finding.a_lost_share, finding.b_lost_share
    word = "new in B" if a is None else "gone in B" if b is None else "in both"
    sides = " to ".join(UNKNOWN if each is None else share(each) for each in (a, b))
    why = f"with {listed(finding.differs)}" if finding.differs else "no row of it differs"
    return f"finding, {word}: {plain(finding.title)} ({sides} of the time; {why})"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), width, break_on_hyphens=False)
