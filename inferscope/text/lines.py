"""Lines of spans: the output of panels.

A span is text and its role; a theme turns a role into a colour, plain text drops it. One character
is one cell (`plots.plain` ensures that), so widths are lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from inferscope.text.plots import fit

Role = Literal[
    "body", "dim", "strong", "title", "key", "border", "bar", "gauge",
    "prefill", "decode", "alarm", "cursor",
]  # fmt: skip
"""Roles. Colour has three meanings: prefill, decode and alarm.

The others are weights of the body text. A line whose first span is empty and of role `cursor` is
the one under the cursor.
"""
Span = tuple[str, Role]
Line = tuple[Span, ...]

BLANK: Line = (("", "body"),)
DIAMOND, DOT, TRIANGLE = "◆", "●", "▲"
"""Shapes that repeat the colours of prefill, decode and alarm."""


def width_of(line: Line) -> int:
    """Return the number of cells of a line."""
    return sum(len(text) for text, _ in line)


def text_of(line: Line) -> str:
    """Return a line's text."""
    return "".join(text for text, _ in line)


def fit_line(line: Line, width: int) -> Line:
    """Return a line padded or cut to exactly `width` cells."""
    have = width_of(line)
    if have == width:
        return line
    if have < width:
        return (*line, (" " * (width - have), "body"))
    spans: list[Span] = []
    left = width
    for text, role in line:
        if len(text) >= left:
            spans.append((fit(text, left) if len(text) > left else text, role))
            break
        spans.append((text, role))
        left -= len(text)
    return tuple(spans)


def spread(left: Line, right: Line, width: int) -> Line:
    """Return a line of two parts at the left and right edges; the left one is cut if necessary."""
    room = width - width_of(right)
    if room < 0:
        return fit_line(right, width)
    return (*fit_line(left, room), *right)


def join_columns(blocks: Sequence[Sequence[Line]]) -> list[Line]:
    """Join blocks of equal height side by side."""
    return [tuple(span for line in row for span in line) for row in zip(*blocks, strict=True)]


def frame(
    title: str, lines: Iterable[Line], width: int, height: int, *, note: str = "", foot: str = ""
) -> list[Line]:
    """Return a rounded frame with a title, a note at the top right and one at the bottom right."""
    inner = width - 4
    body = list(lines)[: height - 2]
    body += [BLANK] * (height - 2 - len(body))
    return [
        _edge("╭", "╮", title, note, width),
        *[(("│ ", "border"), *fit_line(line, inner), (" │", "border")) for line in body],
        _edge("╰", "╯", "", foot, width),
    ]


def rule(title: str, width: int, *, note: str = "") -> Line:
    """Return a horizontal rule with a title: the frame of a narrow screen."""
    return _edge("", "", title, note, width)


def _edge(left: str, right: str, title: str, note: str, width: int) -> Line:
    room = width - len(left) - len(right)
    title = fit(f" {title} ", min(len(title) + 2, room - 2)) if title else ""
    note = f" {note} " if note and len(title) + len(note) + 5 <= room else ""
    fill = room - 1 - len(title) - len(note) - (1 if note else 0)
    spans: list[Span] = [(left + "─", "border"), (title, "title"), ("─" * fill, "border")]
    if note:
        spans += [(note, "dim"), ("─", "border")]
    spans.append((right, "border"))
    return tuple(spans)
