"""The slowest requests, each with its ledger, its evidence and the requests that it waited for."""

from __future__ import annotations

import shlex

from inferscope.fold import FinalRequest, finished_row
from inferscope.insight import Facts
from inferscope.insight.run import EngineFacts
from inferscope.report.blocks import (
    Bar,
    Block,
    Cell,
    Code,
    Column,
    Details,
    Marked,
    Number,
    Prose,
    Section,
    Table,
    prose,
)
from inferscope.report.causes import cause_cell, in_order, role_of
from inferscope.text import BAD_FINISHES, CAUSE_MEANINGS, why
from inferscope.text.plots import UNKNOWN, closed, duration, share

_MOST_BLAMED = 5


def slowest(engine: EngineFacts) -> Section | None:
    """Return the longest requests with their ledgers."""
    if not engine.slowest:
        none = prose("No request finished that was observed from its beginning.", role="dim")
        return Section("slowest", "Slowest requests", (none,))
    rows = tuple(_row(number, each) for number, each in enumerate(engine.slowest, 1))
    table = Table(
        (
            Column("request"),
            Column("finish"),
            Column("prompt", "number", "prompt tokens"),
            Column("cached", "number", "prompt tokens from the prefix cache"),
            Column("out", "number", "output tokens"),
            Column("TTFT ms", "number"),
            Column("TBT avg ms", "number"),
            Column("longest gap ms", "number"),
            Column("total ms", "number", "arrival to the end of delivery"),
            Column("largest cause"),
        ),
        rows,
        method="Measured (probe clock); the causes are apportioned. Tokens are counted.",
    )
    ledgers = [
        _ledger(number, each, engine.explained.get(each.request_id))
        for number, each in enumerate(engine.slowest, 1)
    ]
    return Section("slowest", "Slowest requests", (table, *ledgers))


def name_of(request: FinalRequest) -> str:
    """Return the client's name of a request, else the engine's."""
    return request.external_id or request.request_id


def _row(number: int, request: FinalRequest) -> tuple[Cell, ...]:
    row = finished_row(request)
    top = max(request.ledger_ns.items(), key=lambda item: item[1], default=None)
    gap_ns = request.longest_gap_ns if request.num_gaps else None
    key = f"{number}"
    return (
        Code(name_of(request)),
        Marked(request.finish, "alarm" if request.finish in BAD_FINISHES else ""),
        Number.count(f"{key}.prompt_tokens", request.prompt_tokens),
        Number.count(f"{key}.cached_tokens", row.cached_tokens),
        Number.count(f"{key}.output_tokens", request.output_tokens),
        Number.ms(f"{key}.ttft_ns", row.ttft_ns),
        Number.ms(f"{key}.tbt_mean_ns", row.tbt_mean_ns),
        Number.ms(f"{key}.longest_gap_ns", gap_ns),
        Number.ms(f"{key}.total_ns", row.age_ns),
        UNKNOWN if top is None or request.ledger_missing else cause_cell(top[0]),
    )


def _ledger(number: int, request: FinalRequest, facts: Facts | None) -> Details:
    """Return a request's ledger; with facts, each cause also has its evidence in the records."""
    whole_ns = request.delivered_ns - request.arrived_ns
    summary = (f"{number}. ", Code(name_of(request)), f": ledger of {duration(whole_ns)}")
    if request.ledger_missing:
        missing = prose(f"It has no ledger ({request.ledger_missing}).")
        return Details(summary, (missing,), is_open=number == 1)
    explained = None if facts is None else why(facts)
    sentences = {row.cause: row.sentence for row in explained.rows} if explained else {}
    table = _rows(number, request, whole_ns, sentences)
    blocks: list[Block] = [table]
    if explained is not None:
        said = (explained.summary, *explained.verdicts)
        blocks[:0] = [Prose((sentence,)) for sentence in said]
        blocks += [Prose((sentence,)) for sentence in explained.conclusions]
    command = ("More: ", Code(f"inferscope why {shlex.quote(name_of(request))} FILE"))
    return Details(summary, (*blocks, Prose(command, "dim")), is_open=number == 1)


def _rows(number: int, request: FinalRequest, whole_ns: int, sentences: dict[str, str]) -> Table:
    done_ns = 0
    rows: list[tuple[Cell, ...]] = []
    causes = in_order({cause for cause, ns in request.ledger_ns.items() if ns})
    mills = closed([request.ledger_ns[cause] for cause in causes], 1000)
    for cause, mill in zip(causes, mills, strict=True):
        ns = request.ledger_ns[cause]
        evidence = sentences.get(cause) or CAUSE_MEANINGS.get(cause, UNKNOWN)
        blamed = "" if cause in sentences else _blamed(request, cause)
        rows.append(
            (
                cause_cell(cause),
                Number.ms(f"{number}.ledger.{cause}_ns", ns),
                f"{mill / 10:.1f}%",
                Bar(done_ns / whole_ns, ns / whole_ns, role_of(cause)),
                f"{evidence}; waited for {blamed}" if blamed else evidence,
            )
        )
        done_ns += ns
    return Table(
        (
            Column("cause"),
            Column("ms", "number"),
            Column("share", "number"),
            Column("arrival to delivery", "bar"),
            Column("evidence"),
        ),
        tuple(rows),
        total=("sum", Number.ms(f"{number}.ledger.sum_ns", done_ns), "100.0%", "", ""),
    )


def _blamed(request: FinalRequest, cause: str) -> str:
    """Return the requests that a wait is blamed on, with their shares of it."""
    whole_ns = request.ledger_ns[cause]
    named = [
        f"{one.request_id} ({share(one.ns / whole_ns)})"
        for one in request.blame
        if one.cause == cause and one.request_id is not None
    ]
    return ", ".join(named[:_MOST_BLAMED])
