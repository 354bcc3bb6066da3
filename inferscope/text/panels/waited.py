"""Requests that one request waited for, and how long, over all causes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from inferscope.fold import EngineView, RequestRow
from inferscope.text.lines import Line, frame
from inferscope.text.plots import bar, fit, fit_name, milliseconds, plain

_OTHERS = "others, or unknown"
_NUMBERS = 32


class Blamed(NamedTuple):
    """One request, or all others together, that another request waited for."""

    request_id: str | None
    """Engine's ID; None for all others."""
    ns: int
    """Time of all causes."""
    cause: str
    """Cause with the most time."""


def blamed(row: RequestRow) -> list[Blamed]:
    """Return the requests that a request waited for, the longest wait first, others last."""
    by_request: dict[str | None, Counter[str]] = {}
    for share in row.blame:
        by_request.setdefault(share.request_id, Counter())[share.cause] += share.ns
    found = [
        Blamed(request_id, causes.total(), causes.most_common(1)[0][0])
        for request_id, causes in by_request.items()
    ]
    return sorted(found, key=lambda each: (each.request_id is None, -each.ns))


def name_of(request_id: str | None, view: EngineView) -> str:
    """Return the client's ID of a listed request, else the engine's."""
    if request_id is None:
        return _OTHERS
    for row in view.requests:
        if row.request_id == request_id:
            return plain(row.external_id or request_id)
    return plain(request_id)


def waited_for(
    row: RequestRow, view: EngineView, width: int, height: int, *, cursor: int
) -> list[Line]:
    """Return a row per blamed request; `cursor` is the index of the selected one."""
    found, inner, rows = blamed(row), width - 4, height - 2
    start = max(0, min(cursor - rows // 2, len(found) - rows))
    longest = max((each.ns for each in found), default=1)
    names = max(inner - _NUMBERS, 8)
    lines: list[Line] = []
    for at, each in enumerate(found[start : start + rows], start):
        is_selected = at == cursor and each.request_id is not None
        name = fit_name(name_of(each.request_id, view), names - 3)
        lines.append(
            (
                ("▸ " if is_selected else "  ", "key"),
                (f"{name} ", "strong" if is_selected else "body"),
                (f"{milliseconds(each.ns, width=7):>8} ", "body"),
                (bar(each.ns / longest, 2), "bar"),
                (" " + fit(each.cause, 20), "dim"),
            )
        )
    return frame("Waited for", lines, width, height, note="ms", foot="b opens it")


def waited_line(row: RequestRow, view: EngineView) -> Line:
    """Return the longest wait for another request as a line; empty without one."""
    found = blamed(row)
    if not found or found[0].request_id is None:
        return ()
    first = found[0]
    return (
        (" waited ", "dim"),
        (f"{milliseconds(first.ns)} ms", "body"),
        (" for ", "dim"),
        (name_of(first.request_id, view), "strong"),
        (f" ({first.cause})   ", "dim"),
        ("b", "key"),
        (" opens it", "dim"),
    )
