"""Columns of the request table: heading, width, text, colour and order of each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inferscope.fold import RequestRow
from inferscope.text.labels import BAD_FINISHES, STATE_MARKS
from inferscope.text.lines import Line, Role, Span
from inferscope.text.panels.phases import Unit
from inferscope.text.plots import UNKNOWN, count, fit, fit_name, milliseconds, plain, seconds, share

SortValue = float | str | None


@dataclass(frozen=True)
class Column:
    """One column: heading, text, colour and sort key."""

    name: str
    heading: str
    width: int
    """Width in cells; 0 takes the remaining width."""
    write: Callable[[RequestRow, Unit], str]
    sort_value: Callable[[RequestRow], SortValue]
    role: Callable[[RequestRow], Role] = lambda row: "body"
    is_text: bool = False


def _label(row: RequestRow) -> str:
    return plain(row.external_id or row.request_id)


def _state(row: RequestRow) -> str:
    mark, _ = STATE_MARKS.get(row.state, ("·", "body"))
    if row.state == "done" and row.finish in BAD_FINISHES:
        return f"✗ {row.finish}"
    return f"{mark} {row.state}"


def _state_role(row: RequestRow) -> Role:
    if row.state == "done":
        return "alarm" if row.finish in BAD_FINISHES else "dim"
    return STATE_MARKS.get(row.state, ("", "body"))[1]


def _compute(value_ns: int, row: RequestRow, unit: Unit) -> str:
    if row.ledger_missing or (not value_ns and row.state in ("arriving", "waiting")):
        return UNKNOWN
    if unit == "ms":
        return milliseconds(value_ns)
    return share(value_ns / row.age_ns) if row.age_ns else UNKNOWN


def _percent(part: float | None) -> str:
    return UNKNOWN if part is None else f"{100 * part:.0f}%"


def _number(
    name: str,
    heading: str,
    width: int,
    write: Callable[[float | None], str],
    read: Callable[[RequestRow], float | None],
) -> Column:
    return Column(name, heading, width, lambda row, _: write(read(row)), read)


def _device_time(name: str, width: int, read: Callable[[RequestRow], int]) -> Column:
    return Column(
        name, f"{name} {{unit}}", width, lambda row, unit: _compute(read(row), row, unit), read
    )


_REQUEST = Column("id", "REQUEST", 0, lambda row, _: _label(row), _label, is_text=True)
_STATE = Column(
    "state", "STATE", 11, lambda row, _: _state(row), lambda row: row.state, _state_role, True
)
_PROMPT = _number("prompt", "PROMPT", 7, count, lambda row: row.prompt_tokens)
_CACHED = _number("cached", "CACHED", 7, count, lambda row: row.cached_tokens)
_OUT = _number("out", "OUT", 7, count, lambda row: row.output_tokens)
_TTFT = _number("ttft", "TTFT ms", 10, milliseconds, lambda row: row.ttft_ns)
_TBT = _number("tbt", "TBT avg", 9, milliseconds, lambda row: row.tbt_mean_ns)
_P99 = _number("p99", "TBT p99", 10, milliseconds, lambda row: row.tbt_p99_ns)
_PREFILL = _device_time("prefill", 12, lambda row: row.prefill_ns)
_DECODE = _device_time("decode", 11, lambda row: row.decode_ns)
_COMPUTE = _device_time("compute", 12, lambda row: row.prefill_ns + row.decode_ns)
_INTERFERED = _number("interfered", "INTERFERED", 12, _percent, lambda row: row.interference_share)
_INTERF = replace(_INTERFERED, heading="INTERF", width=8)
_AGE = _number("age", "AGE s", 9, seconds, lambda row: row.age_ns)
_PREEMPTED = Column(
    "preempted",
    "PREEMPTED",
    11,
    lambda row, _: str(row.num_preemptions),
    lambda row: row.num_preemptions,
    lambda row: "alarm" if row.num_preemptions else "dim",
)

_NORMAL = (
    _REQUEST, _STATE, _PROMPT, _CACHED, _OUT, _TTFT, _TBT, _P99, _PREFILL, _DECODE, _INTERFERED,
)  # fmt: skip
_WIDE = (*_NORMAL, _PREEMPTED, _AGE)
_NARROW = (_REQUEST, _STATE, _OUT, _TTFT, _TBT, _P99, _COMPUTE, _INTERF)
_TINY = (_REQUEST, _STATE, _OUT, _P99)


def columns_for(width: int) -> tuple[Column, ...]:
    """Return the columns for a screen's width."""
    if width < 72:
        return _TINY
    if width < 112:
        return _NARROW
    return _NORMAL if width < 140 else _WIDE


def heading_line(
    columns: Sequence[Column], width: int, *, unit: Unit, sort: str, is_reversed: bool
) -> Line:
    """Return the heading line; the sort column is marked."""
    arrow = "▼" if is_reversed else "▲"
    spans: list[Span] = []
    for column, cells in zip(columns, _widths(columns, width), strict=True):
        heading = column.heading.format(unit=unit)
        role: Role = "dim"
        if column.name == sort:
            role = "strong"
            heading = f"{heading} {arrow}" if len(heading) + 2 < cells else f"{heading}{arrow}"
        spans.append((fit(heading, cells, align="left" if column.is_text else "right"), role))
    return tuple(spans)


def row_line(row: RequestRow, columns: Sequence[Column], width: int, *, unit: Unit) -> Line:
    """Return the line of one request, dim once it is done."""
    is_done = row.state == "done"
    spans: list[Span] = []
    for column, cells in zip(columns, _widths(columns, width), strict=True):
        text = column.write(row, unit)
        role = column.role(row)
        if role == "body" and (is_done or text == UNKNOWN):
            role = "dim"
        room = cells - 1 if column.is_text else cells
        if not column.width:
            text = fit_name(text, room)
        text = fit(fit(text, room, align="left" if column.is_text else "right"), cells)
        spans.append((text, role))
    return tuple(spans)


def column_at(columns: Sequence[Column], width: int, x: int) -> Column | None:
    """Return the column drawn at cell `x`."""
    left = 0
    for column, cells in zip(columns, _widths(columns, width), strict=True):
        left += cells
        if x < left:
            return column
    return None


def order_rows(
    rows: Sequence[RequestRow],
    indices: Sequence[int],
    column: Column,
    *,
    is_reversed: bool,
    num_first: int | None = None,
) -> list[int]:
    """Sort indices of rows by a column, unknown values always last, ties in input order.

    With `num_first`, only that many are found, by a heap, and returned.
    """
    read = column.sort_value
    unknown: float | str = "" if column.is_text else 0.0

    def rising(i: int) -> tuple[bool, float | str]:
        value = read(rows[i])
        return (value is None, unknown if value is None else value)

    def falling(i: int) -> tuple[bool, float | str]:
        value = read(rows[i])
        return (value is not None, unknown if value is None else value)

    if num_first is not None and num_first < len(indices) // 4:
        if is_reversed:
            return heapq.nlargest(num_first, indices, key=falling)
        return heapq.nsmallest(num_first, indices, key=rising)
    if is_reversed:
        return sorted(indices, key=falling, reverse=True)[:num_first]
    return sorted(indices, key=rising)[:num_first]


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    rest = width - sum(column.width for column in columns)
    return [column.width or max(rest, 1) for column in columns]
