"""The findings of a run as lines of text, wrapped at a width, and as JSON."""

from __future__ import annotations

import textwrap

import msgspec

from inferscope.insight.findings import (
    FEWEST_REQUESTS,
    Counterfactual,
    Disaggregation,
    Distribution,
    EngineFindings,
    Finding,
    NotJudged,
    Number,
    ObjectiveMiss,
    Severity,
    times,
)
from inferscope.json_document import Document, json_line
from inferscope.slo import UNKNOWN, ObjectiveCount, outcome_line, worst_causes
from inferscope.text.evidence import many
from inferscope.text.labels import SYNTHETIC
from inferscope.text.plots import milliseconds, plain, share, to_ascii

_MARGIN = "    "
_METRIC, _COLUMN = 34, 10
_NONE = "No findings: this run shows none of the known performance problems{sought}."


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finding with its severity."""

    id: str
    """Name of the rule that found it; `docs/findings.md` lists them."""
    severity: Severity
    """high, medium or low."""
    title: str
    """Finding in one sentence."""
    lost_share: float
    """Share of all answers' time that it took, roughly; findings are ordered by it."""
    sentences: tuple[str, ...]
    """Explanation with numbers."""
    evidence: tuple[Number, ...]
    """Numbers that the finding rests on."""
    advice: str = msgspec.field(name="try")
    """Suggested change."""
    counterfactual: Counterfactual | None
    """Metric without the cause; null where it is not known."""
    objective: ObjectiveMiss | None
    """Objective that was missed; null for any other finding."""
    causes: tuple[str, ...]
    """Ledger rows that the finding names."""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Findings on one engine's run."""

    engine_id: str
    """Name of the engine."""
    model: str
    """Served name of its model; empty where it is not known."""
    num_requests: int
    """Finished requests that were observed from their beginning."""
    num_joined_late: int
    """Finished requests whose beginning was not observed."""
    findings: tuple[FindingRow, ...] | None
    """Findings, the costliest first; null for a run with too few requests."""
    disaggregation: Disaggregation | None
    """Latencies without interference; null where no answer had several tokens."""
    is_synthetic: bool
    """Whether the records are marked as synthetic."""
    objectives: tuple[ObjectiveCount, ...] | None
    """Counts by objective; null without `--slo`."""
    not_judged: tuple[NotJudged, ...] = ()
    """Rules that the source cannot decide, with the reason; none for records."""


class FindingsDocument(Document, frozen=True, kw_only=True):
    """Findings by engine (`inferscope findings --json`)."""

    engines: tuple[EngineRow, ...]
    """Engines of the source."""


def findings_text(engines: tuple[EngineFindings, ...], *, width: int, ascii: bool = False) -> str:
    """Return the findings of all engines as text.

    Args:
        engines: findings of each engine.
        width: maximum line width; table lines may exceed it.
        ascii: use ASCII characters only.
    """
    lines: list[str] = []
    for engine in engines:
        lines += ["", *_engine(engine, width)] if lines else _engine(engine, width)
    text = "\n".join(lines) + "\n"
    return to_ascii(text) if ascii else text


def findings_brief(engines: tuple[EngineFindings, ...]) -> str:
    """Return the titles of all findings, one a line; empty without findings."""
    found = [finding for engine in engines for finding in engine.findings or ()]
    return "".join(f"{finding.severity:<8}{finding.title}\n" for finding in found)


def run_verdict(engine: EngineFindings) -> str:
    """Return the verdict on a run in one or two sentences: objectives first, then problems."""
    if engine.findings is None:
        return (
            f"No verdict: {many(engine.num_requests, 'finished request')}, fewer than"
            f" {FEWEST_REQUESTS}."
        )
    problems = [each for each in engine.findings if each.objective is None]
    sentences = _on_objectives(engine)
    if problems:
        first, more = problems[0], len(problems) - 1
        others = f", and {many(more, 'more finding')}" if more else ""
        sentences.append(
            f"{first.title} ({share(first.lost_share)} of the requests' time){others}."
        )
    else:
        sentences.append("The run shows none of the known performance problems.")
    return " ".join(sentences)


def _on_objectives(engine: EngineFindings) -> list[str]:
    counts = [each for each in engine.objectives or () if each.num_good + each.num_bad]
    missed = {each.objective.slo for each in engine.findings or () if each.objective is not None}
    if not counts:
        return []
    if not missed:
        return [
            f"All {len(counts)} objectives are met." if len(counts) > 1 else "The objective is met."
        ]
    named = [_missed(each) for each in counts if each.objective.name in missed]
    if len(counts) == 1:
        return [f"The objective is missed: {named[0]}."]
    are = "is" if len(missed) == 1 else "are"
    return [f"{len(missed)} of {len(counts)} objectives {are} missed: {'; '.join(named)}."]


def _missed(count: ObjectiveCount) -> str:
    """Return a missed objective with its main cause."""
    one, num = count.objective, count.num_good + count.num_bad
    known = [(cause, num_bad) for cause, num_bad in worst_causes(count) if cause != UNKNOWN]
    most = f"; of {count.num_bad} bad ones {known[0][1]} for {known[0][0]}" if known else ""
    return (
        f"{one.name} ({count.num_good / num:.2%} of {num} requests good, target"
        f" {one.objective * 100:g}%{most})"
    )


def findings_json(engines: tuple[EngineFindings, ...]) -> str:
    """Return the findings of all engines as the line that `--json` prints."""
    return json_line(FindingsDocument(engines=tuple(map(_engine_row, engines))))


def _engine_row(engine: EngineFindings) -> EngineRow:
    found = engine.findings
    rows = None if found is None else tuple(map(_finding_row, found))
    return EngineRow(**{**msgspec.structs.asdict(engine), "findings": rows})


def _finding_row(finding: Finding) -> FindingRow:
    return FindingRow(**msgspec.structs.asdict(finding), severity=finding.severity)


def _engine(engine: EngineFindings, width: int) -> list[str]:
    model = f" ({engine.model})" if engine.model else ""
    late = f"; {engine.num_joined_late} only partly observed" if engine.num_joined_late else ""
    head = f"{engine.engine_id}{model}: {many(engine.num_requests, 'finished request')}{late}"
    lines = textwrap.wrap(plain(head), width)
    if engine.is_synthetic:
        lines += textwrap.wrap(SYNTHETIC, width)
    for count in engine.objectives or ():
        lines += _wrapped(outcome_line(count), width)
    if engine.objectives == ():
        lines += _wrapped("No objective is in force for its model.", width)
    if engine.findings is None:
        few = f"Not analyzed: fewer than {FEWEST_REQUESTS} finished requests."
        return [*lines, "", *textwrap.wrap(few, width)]
    if not engine.findings:
        sought = " that its totals can show" if engine.not_judged else ""
        lines += ["", *textwrap.wrap(_NONE.format(sought=sought), width)]
    for number, finding in enumerate(engine.findings, 1):
        lines += ["", *_finding(number, finding, width)]
    if engine.disaggregation is not None:
        lines += ["", *_disaggregation(engine.disaggregation, width)]
    if engine.not_judged:
        lines += ["", *_not_judged(engine.not_judged, width)]
    return lines


def _not_judged(rules: tuple[NotJudged, ...], width: int) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for rule in rules:
        by_reason.setdefault(rule.reason, []).append(rule.id)
    lines = ["Not judged:"]
    for reason, names in by_reason.items():
        lines += _wrapped(f"{', '.join(names)}: {reason}.", width)
    return lines


def _finding(number: int, finding: Finding, width: int) -> list[str]:
    missed = finding.objective
    much = (
        f"{share(finding.lost_share)} of the time"
        if missed is None
        else f"{times(missed.burn)} the budget"
    )
    head = f"{number}. {finding.title} [{finding.severity}: {much}]"
    return [
        *textwrap.wrap(head, width, subsequent_indent="   "),
        *_wrapped(" ".join(finding.sentences), width),
        *_wrapped(provenance_sentence(finding), width),
        *(_wrapped(_if_not(finding.counterfactual), width) if finding.counterfactual else ()),
        *_wrapped(f"Try: {finding.advice}", width),
    ]


def provenance_sentence(finding: Finding) -> str:
    """Return which figures are not measured, by their JSON names."""
    names: dict[str, list[str]] = {}
    for number in finding.evidence:
        names.setdefault(number.provenance.capitalize(), []).append(number.name)
    names.pop("Measured", None)
    sentences = [f"{how}: {', '.join(of)}." for how, of in names.items()]
    return " ".join([*sentences, "All else is measured." if sentences else "All measured."])


def _if_not(what: Counterfactual) -> str:
    """Return the sentence of a counterfactual and its provenance."""
    rests_on = "modelled" if what.provenance == "modelled" else "from measured times"
    return f"{what.sentence} (First-order, {rests_on}.)"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        plain(text),
        width,
        initial_indent=_MARGIN,
        subsequent_indent=_MARGIN,
        break_on_hyphens=False,
    )


def _disaggregation(apart: Disaggregation, width: int) -> list[str]:
    title = "Prefill and decode on separate workers: latencies without interference"
    columns = "".join(f"{name:>{_COLUMN}}" for name in ("p50", "p95", "p99"))
    note = (
        "First-order and modelled: the queue and the batches stay as they were, and the "
        "KV cache transfer, which would add to TTFT, is not included."
    )
    return [
        *textwrap.wrap(title, width),
        f"{_MARGIN}{'ms':<{_METRIC}}{columns}",
        _row("TTFT", apart.ttft),
        _row("TTFT without others' decodes", apart.ttft_without_interference),
        _row("TBT", apart.tbt),
        _row("TBT without others' prefills", apart.tbt_without_interference),
        *_wrapped(note, width),
    ]


def _row(name: str, of: Distribution) -> str:
    cells = (milliseconds(ns) for ns in (of.p50_ns, of.p95_ns, of.p99_ns))
    return f"{_MARGIN}{name:<{_METRIC}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)
