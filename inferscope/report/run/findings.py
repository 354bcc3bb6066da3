"""Findings of the run, with the numbers behind them and what to try."""

from __future__ import annotations

from inferscope.insight.findings import FEWEST_REQUESTS, Finding, times
from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import (
    Block,
    Code,
    Column,
    Details,
    Inline,
    Marked,
    Number,
    Section,
    Table,
    prose,
)
from inferscope.text import provenance_sentence
from inferscope.text.plots import share


def found(engine: EngineFacts) -> Section:
    """Return the findings, the costliest first."""
    rows = engine.found.findings
    blocks: list[Block] = []
    if rows is None:
        few = f"Not analyzed: fewer than {FEWEST_REQUESTS} finished requests."
        blocks.append(prose(few, role="dim"))
    elif not rows:
        blocks.append(prose("This run shows none of the known performance problems."))
    else:
        blocks += [_finding(number, each) for number, each in enumerate(rows, 1)]
    return Section("findings", "Findings", tuple(blocks))


def _finding(number: int, finding: Finding) -> Details:
    missed = finding.objective
    much = (
        f"{share(finding.lost_share)} of the requests' time"
        if missed is None
        else f"{times(missed.burn)} the budget"
    )
    title: Inline = Marked(finding.title, "alarm" if finding.severity == "high" else "strong")
    blocks: list[Block] = [prose(" ".join(finding.sentences))]
    without = finding.counterfactual
    if without is not None:
        rests_on = "modelled" if without.provenance == "modelled" else "from measured times"
        blocks.append(prose(f"{without.sentence} (First-order, {rests_on}.)"))
    blocks.append(prose(f"Try: {finding.advice}"))
    evidence = Table(
        (Column("evidence"), Column("value", "number"), Column("method")),
        tuple(
            (Code(each.name), _value(number, each.name, each.value), each.provenance)
            for each in finding.evidence
        ),
    )
    blocks.append(Details(("Numbers behind it",), (evidence, prose(provenance_sentence(finding)))))
    summary = (f"{number}. ", title, f" [{finding.severity}: {much}] ", Code(finding.id))
    return Details(summary, tuple(blocks), is_open=True)


def _value(number: int, name: str, value: float | int | str) -> Number | str:
    if isinstance(value, str):
        return value
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return Number(f"{number}.{name}", value, text)
