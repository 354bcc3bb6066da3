"""Latency by cause: the ledgers of the finished requests, summed."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.labels import cause_role, format_window, view_verdict
from inferscope.text.lines import TRIANGLE, Line, Role, frame
from inferscope.text.panels.phases import Unit
from inferscope.text.plots import bar, closed, fit, milliseconds, share

_REST = "other causes"


def cause_rows(ledger_ns: dict[str, int], num_rows: int) -> list[tuple[str, int, int]]:
    """Rank causes by time and merge the small ones; shares in tenths of a percent sum to 1000.

    Returns:
        Rows of (cause, ns, tenths), at most `num_rows`.
    """
    ranked = sorted(
        ((cause, cause_ns) for cause, cause_ns in ledger_ns.items() if cause_ns > 0),
        key=lambda row: (-row[1], row[0]),
    )
    if len(ranked) > num_rows:
        rest_ns = sum(cause_ns for _, cause_ns in ranked[num_rows - 1 :])
        ranked = [*ranked[: num_rows - 1], (_REST, rest_ns)]
    tenths = closed([cause_ns for _, cause_ns in ranked], 1000)
    return [(cause, ns, tenth) for (cause, ns), tenth in zip(ranked, tenths, strict=True)]


def causes(view: EngineView, width: int, height: int, *, unit: Unit = "%") -> list[Line]:
    """Return the largest causes of latency; in ms they are per finished request."""
    inner = width - 4
    num_finished = view.e2e.num
    verdict = view_verdict(view)
    rows = cause_rows(view.ledger_ns, height - 2 - bool(verdict))
    title = "Where latency went"
    if not rows:
        why = "no request finished in this window"
        empty: Line = ((f"- ({view.ledger_missing})" if view.ledger_missing else why, "dim"),)
        return frame(title, [empty], width, height)
    in_ms = unit == "ms" and num_finished > 0
    lines: list[Line] = [((f"{TRIANGLE} {verdict}", "alarm"),)] if verdict else []
    largest = max(tenths for _, _, tenths in rows)
    for cause, cause_ns, tenths in rows:
        role: Role = "dim" if cause == _REST else cause_role(cause)
        number = milliseconds(cause_ns / num_finished, width=7) if in_ms else share(tenths / 1000)
        name = fit(cause, 21)
        length = tenths / largest
        lines.append(
            (
                (name, "body" if role != "dim" else "dim"),
                (fit(number, 7, align="right"), "body"),
                (" ", "body"),
                (bar(length, inner - 29), role),
            )
        )
    note = f"{num_finished} done, {format_window(view.window_ns)}"
    if in_ms:
        note = f"mean ms of {num_finished}"
    return frame(title, lines, width, height, note=note)
