"""The slowest requests, each with its ledger and the requests that it waited for."""

from __future__ import annotations

from inferscope.fold import FinalRequest, finished_row
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
    Section,
    Table,
    prose,
)
from inferscope.report.causes import cause_cell, in_order, role_of
from inferscope.text import BAD_FINISHES, CAUSE_MEANINGS
from inferscope.text.plots import UNKNOWN, duration, share

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
    ledgers = [_ledger(number, each) for number, each in enumerate(engine.slowest, 1)]
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


def _ledger(number: int, request: FinalRequest) -> Details:
    whole_ns = request.delivered_ns - request.arrived_ns
    summary = (f"{number}. Ledger of ", Code(name_of(request)), f", {duration(whole_ns)}")
    if request.ledger_missing:
        return Details(summary, (prose(f"It has no ledger ({request.ledger_missing})."),))
    done_ns = 0
    rows: list[tuple[Cell, ...]] = []
    for cause in in_order({cause for cause, ns in request.ledger_ns.items() if ns}):
        ns = request.ledger_ns[cause]
        rows.append(
            (
                cause_cell(cause),
                CAUSE_MEANINGS.get(cause, UNKNOWN),
                Number.ms(f"{number}.ledger.{cause}_ns", ns),
                share(ns / whole_ns if whole_ns else None),
                Bar(done_ns / whole_ns, ns / whole_ns, role_of(cause)),
                _blamed(request, cause),
            )
        )
        done_ns += ns
    table = Table(
        (
            Column("cause"),
            Column("meaning"),
            Column("ms", "number"),
            Column("share", "number"),
            Column("from arrival to delivery", "bar"),
            Column("waited for"),
        ),
        tuple(rows),
        total=(
            "sum = arrival to delivery",
            "",
            Number.ms(f"{number}.ledger.sum_ns", done_ns),
            "100.0%",
            "",
            "",
        ),
    )
    name = name_of(request)
    blocks: list[Block] = [table, prose("More: ")]
    blocks[-1] = prose(f"More: `inferscope why {name} FILE`") if "`" not in name else prose("")
    return Details(summary, tuple(blocks))


def _blamed(request: FinalRequest, cause: str) -> str:
    """Return the requests that a wait is blamed on, with their shares of it."""
    whole_ns = request.ledger_ns.get(cause, 0)
    ranked = [each for each in request.blame if each.cause == cause and each.request_id is not None]
    named = [f"{each.request_id} {share(each.ns / whole_ns)}" for each in ranked[:_MOST_BLAMED]]
    return ", ".join(named)
