"""One request's ledger as a waterfall: each bar starts at the end of the previous one.

Causes are in the order of `CAUSES`, the order of a request's phases; rows are rounded so that the
printed ones add up to the printed sum.
"""

from __future__ import annotations

from inferscope.records import CAUSES
from inferscope.text.labels import CAUSE_MEANINGS, cause_role
from inferscope.text.lines import Line, Role
from inferscope.text.plots import UNKNOWN, closed, fit, offset_bar

_NS_PER_TENTH_MS = 100_000
_MEANING = 36
_WITH_MEANING = 90
_REST = "smaller causes"


def in_lifecycle_order(ledger_ns: dict[str, int], num_rows: int) -> list[tuple[str, int]]:
    """Return the causes with time, in order; the smallest merge into one row if space is short."""
    known = [cause for cause in CAUSES if ledger_ns.get(cause, 0) > 0]
    known += sorted(cause for cause in ledger_ns if cause not in CAUSES and ledger_ns[cause] > 0)
    if len(known) <= num_rows:
        return [(cause, ledger_ns[cause]) for cause in known]
    largest = set(sorted(known, key=lambda cause: -ledger_ns[cause])[: max(num_rows - 1, 0)])
    rows = [(cause, ledger_ns[cause]) for cause in known if cause in largest]
    return [*rows, (_REST, sum(ledger_ns[cause] for cause in known if cause not in largest))]


def equation(ledger_ns: dict[str, int], measured_ns: int | None, *, is_over: bool) -> str:
    """Return the equation of the measured time and the sum of the rows."""
    sum_ms = closed_ms(sum(ledger_ns.values()))
    if measured_ns is None or closed_ms(measured_ns) == sum_ms:
        return f"{sum_ms} ms = sum of rows"
    rest_ms = f"{float(closed_ms(measured_ns)) - float(sum_ms):.1f}"
    word = "residual" if is_over else "not booked yet"
    return f"{closed_ms(measured_ns)} ms = {sum_ms} in rows + {rest_ms} {word}"


def closed_ms(value_ns: int) -> str:
    """Return milliseconds with one decimal, rounded as the rows are."""
    return f"{round(value_ns / _NS_PER_TENTH_MS) / 10:.1f}"


def waterfall(
    ledger_ns: dict[str, int],
    width: int,
    num_rows: int,
    *,
    total: str,
    note: str,
    missing: str = "",
) -> list[Line]:
    """Return the ledger's lines: an axis, one per cause, and the sum.

    Args:
        ledger_ns: Time by cause.
        width: Width of every line.
        num_rows: Maximum number of causes.
        total: Name of the sum.
        note: Note right of the sum.
        missing: Reason for a missing ledger; empty if there is one.
    """
    rows = in_lifecycle_order(ledger_ns, num_rows)
    sum_ns = sum(cause_ns for _, cause_ns in rows)
    tenths = closed([cause_ns for _, cause_ns in rows], round(sum_ns / _NS_PER_TENTH_MS))
    mills = closed([cause_ns for _, cause_ns in rows], 1000)
    has_meaning = width >= _WITH_MEANING
    chart = width - 42 - (_MEANING if has_meaning else 0)
    end = f"{closed_ms(sum_ns)} ms"
    lines: list[Line] = [
        ((f"{'':22}{'ms':>9} {'%':>7}   0{end:>{max(chart - 1, 0)}}", "dim"),),
    ]
    done_ns = 0
    for (cause, cause_ns), tenth, mill in zip(rows, tenths, mills, strict=True):
        start, done_ns = done_ns / sum_ns, done_ns + cause_ns
        role: Role = "dim" if cause == _REST else cause_role(cause)
        line: Line = (
            (fit(cause, 22), "body"),
            (f"{tenth / 10:9.1f}", "body"),
            (f"{mill / 10:7.1f}%", "dim"),
            ("   ", "body"),
            (offset_bar(start, done_ns / sum_ns, chart), role),
        )
        if has_meaning:
            meaning = CAUSE_MEANINGS.get(cause, "")
            line = (*line, (fit(f"  {meaning}", _MEANING), "dim"))
        lines.append(line)
    if not rows:
        lines.append(((f"- ({missing})" if missing else "nothing booked yet", "dim"),))
    lines.append(
        (
            (fit(f"── {total} ", 22), "strong"),
            (f"{UNKNOWN if missing else closed_ms(sum_ns):>9}", "strong"),
            (f"{'100.0%' if rows else '-':>8}", "dim"),
            (f"   {note}", "dim"),
        )
    )
    return lines
