"""A table of shares as text and as JSON; both state what is measured, apportioned and modelled."""

from __future__ import annotations

import textwrap

import msgspec

from inferscope.insight import NO_AMOUNTS, Amounts, ShareRow, Shares
from inferscope.json_document import Document, json_line
from inferscope.text.labels import SYNTHETIC, more_or_less
from inferscope.text.plots import (
    UNKNOWN,
    closed,
    fit_name,
    milliseconds,
    plain,
    share,
    to_ascii,
)

_NAME, _MS = 26, 12
_NS_PER_TENTH_MS = 100_000
_MEANINGS = {
    "fair": "Shapley value: what each adds to a step, averaged over all orders",
    "phase": "Owen value: prefill and decode each come as one",
    "token": "Aumann-Shapley: one price per token; splitting a request in two changes nothing",
}
_MODELLED = (
    "Modelled, not additive: alone (the step without other requests), marginal (what the step"
    " would have saved without it). Discount: what batching saves, (alone - total) / alone."
)
_LEFT_OUT = "The modelled columns (time alone) need a wider terminal, or --json."
_NOBODY = {
    "request": "(unknown)",
    "tenant": "(no tenant)",
    "model": "(model unknown)",
    "phase": "",
}
_HEADS = ("prefill ms", "decode ms", "total ms", "of all", "alone ms", "marginal ms", "discount")
_NUM_CLOSED = 4
"""Number of columns that divide measured time; those after them are modelled."""


class SharesRow(msgspec.Struct, frozen=True):
    """Device time of one request, tenant, phase or model."""

    name: str | None
    """Name of the row; null where the records do not hold it."""
    engine: str | None
    """Engine of a request; null for other rows."""
    external_id: str | None
    """Client's name of a request; null for other rows and where there is none."""
    share_ns: int
    """Apportioned device time."""
    share: float | None
    """Share of the measured time."""
    standalone_ns: int
    """Modelled time of the same work without other requests in its steps."""
    marginal_ns: int
    """Modelled time that the steps would have saved without it."""
    tokens: int
    """Tokens computed."""
    prefill: Amounts
    """Prefill's part of the row."""
    decode: Amounts
    """Decode's part of the row."""


class ShareModel(msgspec.Struct, frozen=True):
    """Cost model that divided the steps."""

    source_shares: dict[str, float]
    """Share of the time by the source of the model's coefficients."""
    residual_p10_p50_p90: tuple[float, float, float] | None
    """Measured over modelled step time, less one, at three percentiles; null without steps."""


class ShareMethod(msgspec.Struct, frozen=True):
    """Method by which a column was made."""

    method: str
    """measured, apportioned or modelled."""
    source: str
    """Clock, rule or model."""


class SharesDocument(Document, frozen=True, kw_only=True):
    """Device time, divided by a rule (`inferscope shares --json`)."""

    rule: str
    """Rule of the division: fair, phase or token."""
    by: str
    """Kind of the rows: request, tenant, phase or model."""
    rows: tuple[SharesRow, ...]
    """Rows, the largest first."""
    padding_ns: int
    """Time of padding, which belongs to no request."""
    idle_ns: int
    """Time of dummy steps of data-parallel ranks."""
    unattributed_ns: int
    """Time of steps without a known request."""
    measured_ns: int
    """Measured time of all steps: the sum of the rows and of the three above."""
    alone_ns: int
    """Part of the rows from steps of a single request: measured, not apportioned."""
    steps: int
    """Number of steps, each rank's counted."""
    unjoined: int
    """Number of steps whose records are missing or inconsistent; they are in no sum."""
    synthetic: tuple[str, ...]
    """Engines whose records are marked as synthetic."""
    model: ShareModel
    """Cost model that divided the steps."""
    provenance: dict[str, ShareMethod]
    """Method of each column, by its key."""


def shares_lines(shares: Shares, *, most: int | None, width: int = 110, ascii: bool = False) -> str:
    """Return a table as text.

    Args:
        shares: the table.
        most: maximum number of rows; the others are summed in one. None for all.
        width: maximum width of sentences; modelled columns that do not fit are left out.
        ascii: use ASCII characters only.
    """
    num_columns = len(_HEADS) if width >= _NAME + len(_HEADS) * _MS else _NUM_CLOSED
    head = (
        f"{milliseconds(shares.measured_ns)} ms of steps, divided by the rule"
        f" `{shares.rule}` ({_MEANINGS[shares.rule]})"
    )
    lines = [
        *textwrap.wrap(head, width, break_on_hyphens=False),
        "",
        _line(f"by {shares.by}", _HEADS[:num_columns]),
        *_table(shares, most, num_columns),
        "",
    ]
    for sentence in _caveats(shares, num_columns):
        lines += textwrap.wrap(sentence, width, break_on_hyphens=False)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return to_ascii(text) if ascii else text


def shares_json(shares: Shares) -> str:
    """Return a table as the line that `--json` prints, with all of its rows."""
    clock = " and ".join(shares.clocks) or "no"
    modelled = ShareMethod("modelled", f"cost model, scaled to the {clock} clock")
    document = SharesDocument(
        rule=shares.rule,
        by=shares.by,
        rows=tuple(_json_row(row, shares) for row in shares.rows),
        padding_ns=shares.padding_ns,
        idle_ns=shares.idle_ns,
        unattributed_ns=shares.unattributed_ns,
        measured_ns=shares.measured_ns,
        alone_ns=shares.alone_ns,
        steps=shares.num_steps,
        unjoined=shares.num_unjoined,
        synthetic=shares.synthetic,
        model=ShareModel(shares.source_shares, shares.residuals),
        provenance={
            "measured_ns": ShareMethod("measured", f"{clock} clock"),
            "share_ns": ShareMethod("apportioned", f"rule {shares.rule}"),
            "standalone_ns": modelled,
            "marginal_ns": modelled,
        },
    )
    return json_line(document)


def _json_row(row: ShareRow, shares: Shares) -> SharesRow:
    whole = row.whole
    return SharesRow(
        name=row.name,
        engine=row.engine,
        external_id=row.external_id,
        share_ns=whole.share_ns,
        share=whole.share_ns / shares.measured_ns if shares.measured_ns else None,
        standalone_ns=whole.standalone_ns,
        marginal_ns=whole.marginal_ns,
        tokens=whole.tokens,
        prefill=row.prefill,
        decode=row.decode,
    )


def _table(shares: Shares, most: int | None, num_columns: int) -> list[str]:
    """Return the rows and their sum, rounded so that the printed numbers add up too."""
    shown = shares.rows if most is None else shares.rows[:most]
    hidden = shares.rows[len(shown) :]
    rows = [(_name(row, shares.by), row.prefill, row.decode) for row in shown]
    if hidden:
        rows.append((f"{len(hidden)} smaller ones", *_sum(hidden)))
    rest_ns = {
        "padding": shares.padding_ns,
        "idle (dummy steps)": shares.idle_ns,
        "unattributed": shares.unattributed_ns,
    }
    num = len(rows)
    cells_ns = [phase.share_ns for _, *phases in rows for phase in phases] + [*rest_ns.values()]
    tenths = closed(cells_ns, round(sum(cells_ns) / _NS_PER_TENTH_MS))
    wholes_ns = [(prefill + decode).share_ns for _, prefill, decode in rows] + [*rest_ns.values()]
    mills = closed(wholes_ns, 1000)
    lines = [
        _line(name, _cells(prefill, decode, tenths[2 * at : 2 * at + 2], mills[at])[:num_columns])
        for at, (name, prefill, decode) in enumerate(rows)
    ]
    lines += map(_rest, rest_ns, tenths[2 * num :], mills[num:])
    return [*lines, _rest("sum = measured", sum(tenths), sum(mills))]


def _cells(prefill: Amounts, decode: Amounts, tenths: list[int], mills: int) -> tuple[str, ...]:
    whole = prefill + decode
    discount = whole.discount_ns / whole.standalone_ns if whole.standalone_ns else None
    return (
        _format_deci_ms(tenths[0]) if prefill.tokens else UNKNOWN,
        _format_deci_ms(tenths[1]) if decode.tokens else UNKNOWN,
        _format_deci_ms(sum(tenths)),
        _per_cent(mills),
        _ms(whole.standalone_ns),
        _ms(whole.marginal_ns),
        share(discount),
    )


def _line(name: str, cells: tuple[str, ...]) -> str:
    return fit_name(plain(name), _NAME) + "".join(f"{cell:>{_MS}}" for cell in cells)


def _rest(name: str, tenths: int, mills: int) -> str:
    return _line(name, ("", "", _format_deci_ms(tenths), _per_cent(mills)))


def _per_cent(mills: int) -> str:
    return f"{mills / 10:.1f}%"


def _format_deci_ms(tenths: int) -> str:
    return _ms(tenths * _NS_PER_TENTH_MS)


def _ms(value_ns: int) -> str:
    return milliseconds(value_ns, width=_MS - 1)


def _name(row: ShareRow, by: str) -> str:
    if row.name is None or row.name == "?":
        return _NOBODY[by]
    return row.name if row.external_id is None else f"{row.external_id} ({row.name})"


def _sum(rows: tuple[ShareRow, ...]) -> tuple[Amounts, Amounts]:
    prefill = decode = NO_AMOUNTS
    for row in rows:
        prefill, decode = prefill + row.prefill, decode + row.decode
    return prefill, decode


def _caveats(shares: Shares, num_columns: int) -> list[str]:
    clock = " and ".join(shares.clocks) or "no"
    rows_ns = sum(row.whole.share_ns for row in shares.rows)
    alone = share(shares.alone_ns / rows_ns if rows_ns else None)
    sentences = [SYNTHETIC] if shares.synthetic else []
    sentences += [
        f"Measured: the time of {shares.num_steps:,} steps ({clock} clock). Apportioned: prefill,"
        f" decode and total, but for {alone} of it, which is of requests alone in their step."
        " In whole nanoseconds the rows sum to what was measured.",
        _MODELLED if num_columns > _NUM_CLOSED else _LEFT_OUT,
    ]
    if shares.residuals is not None:
        low, middle, high = shares.residuals
        sources = ", ".join(
            f"{name} for {share(part)} of the time" for name, part in shares.source_shares.items()
        )
        sentences.append(
            f"Cost model: {sources}; in the median steps took {more_or_less(middle)} than modelled,"
            f" four of five between {more_or_less(low)} and {more_or_less(high)}."
        )
    if shares.num_unjoined:
        sentences.append(
            f"{shares.num_unjoined} steps could not be matched with their requests: in no row, nor"
            " in the sum."
        )
    sentences.append("Idle time between steps belongs to no request and is not included.")
    return sentences
