"""Missed objectives: their main causes, and the requests that missed one by most."""

from __future__ import annotations

from inferscope.fold import EngineView, WorstRequest
from inferscope.records import CAUSES
from inferscope.slo import UNKNOWN as UNKNOWN_CAUSE
from inferscope.text.labels import BAD_FINISHES, CAUSE_MEANINGS, cause_role
from inferscope.text.lines import Line, Role, Span, frame, text_of
from inferscope.text.plots import UNKNOWN, bar, count, duration, fit, fit_name, plain

_WITH_MEANING = 76


def breach_causes(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the main causes of the bad requests by objective, those of most requests first."""
    title = "Why requests missed"
    levels = view.levels
    missed = [each for each in levels.objectives if each.num_bad] if levels is not None else []
    if not missed:
        return frame(title, [(("no request missed an objective", "dim"),)], width, height)
    inner, lines = width - 4, list[Line]()
    largest = max(num for each in missed for num in (*each.causes.values(), 1))
    for each in missed:
        explained = sum(each.causes.values())
        pending = each.num_bad - explained
        head = f"{plain(each.objective.name)}: {count(each.num_bad)} bad"
        if pending > 0:
            head += f", {count(pending)} in flight still"
        lines.append(((head, "strong"),))
        for cause, num in each.causes.items():
            role: Role = cause_role(cause) if cause in CAUSES else "bar"
            meaning = CAUSE_MEANINGS.get(cause, "") if inner >= _WITH_MEANING else ""
            room = max(inner - 30 - len(meaning) - 2, 4)
            lines.append(
                (
                    (f"  {fit(cause, 21)}", "body"),
                    (f"{count(num):>6} ", "body"),
                    (bar(num / largest, room), role),
                    (f"  {meaning}", "dim"),
                )
            )
    note = "by the largest excess over good peers"
    is_unknown = any(UNKNOWN_CAUSE in each.causes for each in missed)
    foot = "unknown: no ledger or few good peers" if is_unknown else ""
    return frame(title, lines, width, height, note=note, foot=foot)


def worst_requests(view: EngineView, width: int, height: int, *, cursor: int) -> list[Line]:
    """Return the worst requests as a table; `cursor` is the index of the selected one."""
    levels = view.levels
    worst = levels.worst if levels is not None else ()
    title = "Worst requests"
    if not worst:
        return frame(title, [(("no request missed an objective", "dim"),)], width, height)
    inner, num_rows = width - 4, height - 3
    cursor = max(0, min(cursor, len(worst) - 1))
    start = max(0, min(cursor - num_rows // 2, len(worst) - num_rows))
    names = max(inner - 55, 10)
    head = f"{' REQUEST':<{names}}{'MISSED':<9}{'TOOK':>9}{'LIMIT':>9}{'TIMES':>6}  {'CAUSE':<20}"
    lines: list[Line] = [((head, "dim"),)]
    for at, one in enumerate(worst[start : start + num_rows], start):
        row = _worst_row(one, names)
        lines.append(((fit("▸" + text_of(row)[1:], inner), "cursor"),) if at == cursor else row)
    return frame(title, lines, width, height, note="Enter: ledger")


def _worst_row(one: WorstRequest, names: int) -> Line:
    name = plain(one.row.external_id or one.row.request_id)
    times = UNKNOWN
    if one.value_ns is not None and one.limit_ns:
        ratio = one.value_ns / one.limit_ns
        times = f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"
    finish = one.row.finish or ""
    cause = one.cause or "unknown"
    role: Role = "alarm" if finish in BAD_FINISHES else "body"
    spans: list[Span] = [
        (" " + fit_name(name, names - 2) + " ", "strong"),
        (fit(plain(one.slo), 8) + " ", "body"),
        (f"{duration(one.value_ns):>9}", "body"),
        (f"{duration(one.limit_ns):>9}", "dim"),
        (f"{times:>6}", "body"),
        (f"  {fit(finish if finish in BAD_FINISHES else cause, 20)}", role),
    ]
    return tuple(spans)
