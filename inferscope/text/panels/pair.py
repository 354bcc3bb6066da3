"""Two requests beside each other: their ledgers, and the difference by cause."""

from __future__ import annotations

from collections.abc import Callable

from inferscope.fold import RequestRow
from inferscope.records import CAUSES
from inferscope.text.labels import CAUSE_MEANINGS, cause_role
from inferscope.text.lines import Line, Span, frame
from inferscope.text.plots import UNKNOWN, bar, closed, count, fit, fit_name, milliseconds, plain

_NAME, _CELL = 21, 15
_NS_PER_TENTH_MS = 100_000
_WITH_MEANING = 108


def pair(one: RequestRow, other: RequestRow, width: int, height: int) -> list[Line]:
    """Return facts and ledger rows of two requests; the differences sum to that of their times."""
    inner = width - 4
    names = [plain(row.external_id or row.request_id) for row in (one, other)]
    lines: list[Line] = [_head(names), *(_fact(*fact, one, other) for fact in _FACTS), ()]
    causes = [
        cause for cause in CAUSES if one.ledger_ns.get(cause, 0) or other.ledger_ns.get(cause, 0)
    ]
    room = max(height - 2 - len(lines) - 1, 1)
    has_rest = len(causes) > room
    if has_rest:
        largest = sorted(
            causes,
            key=lambda cause: -max(one.ledger_ns.get(cause, 0), other.ledger_ns.get(cause, 0)),
        )[: room - 1]
        causes = [cause for cause in causes if cause in largest]
    tenths = [_rounded(row, causes, has_rest=has_rest) for row in (one, other)]
    longest = max((abs(b - a) for a, b in zip(*tenths, strict=True)), default=0) or 1
    lines += [
        _cause(cause, a, b, longest, inner) for cause, a, b in zip(causes, *tenths, strict=False)
    ]
    if len(tenths[0]) > len(causes):
        lines.append(_sum("smaller causes", tenths[0][-1], tenths[1][-1]))
    lines.append(_sum("── sum", sum(tenths[0]), sum(tenths[1])))
    missing = one.ledger_missing or other.ledger_missing
    return frame("Two requests", lines, width, height, note=missing or "ms; + is longer")


def _milliseconds(value_ns: float | None) -> str:
    return UNKNOWN if value_ns is None else f"{milliseconds(value_ns, width=9)} ms"


_Read = Callable[[RequestRow], float | None]
_Write = Callable[[float | None], str]
_FACTS: tuple[tuple[str, _Read, _Write], ...] = (
    ("prompt", lambda row: row.prompt_tokens, count),
    ("cached", lambda row: row.cached_tokens, count),
    ("output", lambda row: row.output_tokens, count),
    ("TTFT", lambda row: row.ttft_ns, _milliseconds),
    ("TBT mean", lambda row: row.tbt_mean_ns, _milliseconds),
    ("TBT p99", lambda row: row.tbt_p99_ns, _milliseconds),
    ("E2E", lambda row: row.e2e_ns, _milliseconds),
    ("prefill compute", lambda row: row.prefill_ns, _milliseconds),
    ("decode compute", lambda row: row.decode_ns, _milliseconds),
)  # fmt: skip


def _head(names: list[str]) -> Line:
    cells = "".join(f"{fit_name(name, _CELL - 1).strip():>{_CELL}}" for name in names)
    return ((" " * _NAME, "dim"), (cells, "strong"), (f"{'difference':>{_CELL}}", "dim"))


def _fact(
    name: str,
    read: Callable[[RequestRow], float | None],
    write: Callable[[float | None], str],
    one: RequestRow,
    other: RequestRow,
) -> Line:
    values = read(one), read(other)
    difference = UNKNOWN
    if values[0] is not None and values[1] is not None:
        change = values[1] - values[0]
        difference = f"{'+' if change > 0 else ''}{write(change)}" if change else "0"
    cells = "".join(f"{write(value):>{_CELL}}" for value in values)
    return ((fit(name, _NAME), "dim"), (cells, "body"), (f"{difference:>{_CELL}}", "body"))


def _rounded(row: RequestRow, causes: list[str], *, has_rest: bool) -> list[int]:
    """Return the causes, and the sum of the others, in tenths of a millisecond that add up."""
    values = [row.ledger_ns.get(cause, 0) for cause in causes]
    whole = sum(row.ledger_ns.values())
    rest = [whole - sum(values)] if has_rest else []
    return closed([*values, *rest], round(whole / _NS_PER_TENTH_MS))


def _cause(cause: str, one: int, other: int, longest: int, inner: int) -> Line:
    meaning = CAUSE_MEANINGS.get(cause, "") if inner >= _WITH_MEANING else ""
    room = max(inner - _NAME - 3 * _CELL - 2 - (37 if meaning else 0), 0)
    spans: list[Span] = [
        (fit(cause, _NAME), "body"),
        *_numbers(one, other),
        ("  ", "body"),
        (bar(abs(other - one) / longest, room), cause_role(cause)),
        (f"  {meaning}", "dim"),
    ]
    return tuple(spans)


def _sum(name: str, one: int, other: int) -> Line:
    return ((fit(name, _NAME), "strong"), *_numbers(one, other))


def _numbers(one: int, other: int) -> tuple[Span, ...]:
    """Return two times in tenths of a millisecond, and their difference."""
    change = other - one
    cells = "".join(f"{tenths / 10:>{_CELL}.1f}" for tenths in (one, other))
    text = f"{change / 10:+.1f}" if change else "0"
    return ((cells, "body"), (f"{text:>{_CELL}}", "strong" if change else "dim"))
