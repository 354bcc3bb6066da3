"""Parts of a page: sections of prose, tables and figures, as data without markup.

A page holds only these, so that every text on it is escaped in one place, the template. A number
keeps the exact value behind its text, and the page states both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from markupsafe import Markup

from inferscope.text.plots import UNKNOWN, duration, milliseconds, per_second, share

Role = Literal["prefill", "decode", "alarm", "strong", "dim", ""]
"""Meaning of a colour. A shape repeats the first three: a diamond, a dot, a triangle."""


@dataclass(frozen=True)
class Number:
    """A printed number with the value that it rounds.

    Attributes:
        key: name of the value, unique in its section, with its unit: `ttft.p99_ns`.
        value: value in that unit; None if it is unknown.
        text: printed form.
    """

    key: str
    value: float | int | None
    text: str

    @classmethod
    def ms(cls, key: str, value_ns: float | None) -> Number:
        """Return nanoseconds, printed as milliseconds."""
        return cls(key, value_ns, milliseconds(value_ns))

    @classmethod
    def duration(cls, key: str, value_ns: float | None) -> Number:
        """Return nanoseconds, printed with a fitting unit."""
        return cls(key, value_ns, duration(value_ns))

    @classmethod
    def share(cls, key: str, value: float | None) -> Number:
        """Return a fraction, printed as percent."""
        return cls(key, value, share(value))

    @classmethod
    def count(cls, key: str, value: int | None) -> Number:
        """Return a whole number, printed with all of its digits."""
        return cls(key, value, UNKNOWN if value is None else f"{value:,}")

    @classmethod
    def rate(cls, key: str, value: float | None) -> Number:
        """Return a rate per second, printed in three digits."""
        return cls(key, value, per_second(value))


@dataclass(frozen=True)
class Code:
    """A name or a command, printed in a monospaced font."""

    text: str


@dataclass(frozen=True)
class Bar:
    """A horizontal bar in a cell.

    Attributes:
        start: left end, as a share of the cell.
        length: length, likewise.
        role: colour.
    """

    start: float
    length: float
    role: Role = ""


@dataclass(frozen=True)
class Marked:
    """A text with the colour and the shape of its role."""

    text: str
    role: Role


Inline: TypeAlias = str | Number | Code | Marked
Cell: TypeAlias = Inline | Bar | tuple[Inline, ...]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    heading: str
    kind: Literal["text", "number", "bar"] = "text"
    title: str = ""
    """Explanation of the heading."""


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    parts: tuple[Inline, ...]
    role: Role = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: columns, left to right.
        rows: cells of each row, as many as columns.
        caption: heading of the table; empty for none.
        total: cells of the last row, which sums the others; None for none.
        method: how the numbers were made; empty if the text around the table states it.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    total: tuple[Cell, ...] | None = None
    method: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot: an SVG picture of `inferscope.report.plots`.

    Attributes:
        picture: the picture.
        caption: description of what it shows; empty for none.
        method: how its numbers were made.
    """

    picture: Markup
    caption: str
    method: str = ""


@dataclass(frozen=True)
class Details:
    """Blocks that are closed at first, under a line that opens them."""

    summary: tuple[Inline, ...]
    blocks: tuple[Block, ...]
    is_open: bool = False


Block: TypeAlias = Prose | Table | Figure | Details


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading.

    Attributes:
        id: anchor, unique on the page.
        title: heading.
        blocks: content.
        level: 1 for a heading over other sections, 2 for others.
    """

    id: str
    title: str
    blocks: tuple[Block, ...]
    level: Literal[1, 2] = 2


def prose(text: str, *numbers: Number, role: Role = "") -> Prose:
    """Return a paragraph; text between backticks is code, each `{}` the next number."""
    left = list(numbers)
    parts: list[Inline] = []
    for at, part in enumerate(text.split("`")):
        if at % 2:
            parts.append(Code(part))
            continue
        for piece in re.split(r"(\{\})", part):
            if piece == "{}" and left:
                parts.append(left.pop(0))
            elif piece:
                parts.append(piece)
    return Prose(tuple(parts), role)
