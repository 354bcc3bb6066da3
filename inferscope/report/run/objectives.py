"""Objectives of the run: good and bad requests, burn, and the causes of the bad ones."""

from __future__ import annotations

from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import Cell, Column, Inline, Marked, Number, Section, Table, prose
from inferscope.report.causes import cause_cell
from inferscope.slo import ObjectiveCount, good_line, worst_causes

_COLUMNS = (
    Column("objective"),
    Column("good is"),
    Column("target", "number"),
    Column("good", "number"),
    Column("bad", "number"),
    Column("good share", "number"),
    Column("budget spent", "number", "bad requests over the number allowed for as many"),
    Column("main causes of bad requests"),
)


def objectives(engine: EngineFacts) -> Section:
    """Return the objectives in force for the engine's model."""
    counts = engine.found.objectives
    if counts is None:
        return Section(
            "objectives",
            "Objectives",
            (prose("No objectives were given: `--slo FILE` judges the run by them.", role="dim"),),
        )
    if not counts:
        none = prose("No request was judged: no objective is in force for it.", role="dim")
        return Section("objectives", "Objectives", (none,))
    rows = tuple(_row(count) for count in counts)
    method = (
        "Counted: requests by the verdicts of `inferscope collect --slo`; warm-up requests, before"
        " the engine's first answer, are left out. Modelled: the main cause of each bad request,"
        " from its ledger and those of compliant requests of similar length."
    )
    table = Table(_COLUMNS, rows, method=method.replace("`", ""))
    return Section("objectives", "Objectives", (table,))


def _row(count: ObjectiveCount) -> tuple[Cell, ...]:
    one, num = count.objective, count.num_good + count.num_bad
    good = count.num_good / num if num else None
    burn = count.num_bad / (one.budget * num) if num else None
    is_missed = burn is not None and burn > 1
    return (
        Marked(one.name, "alarm" if is_missed else "strong"),
        good_line(one),
        f"{one.objective * 100:g}%",
        Number.count(f"{one.name}.good", count.num_good),
        Number.count(f"{one.name}.bad", count.num_bad),
        Number(f"{one.name}.good_share", good, "-" if good is None else f"{100 * good:.2f}%"),
        Number(f"{one.name}.burn", burn, "-" if burn is None else f"{burn:.2f}×"),
        _causes(count),
    )


def _causes(count: ObjectiveCount) -> tuple[Inline, ...]:
    parts: list[Inline] = []
    for cause, num in worst_causes(count)[:5]:
        parts += [", "] if parts else []
        number = Number.count(f"{count.objective.name}.causes.{cause}", num)
        parts += [cause_cell(cause), " ", number]
    return tuple(parts) or ("-",)
