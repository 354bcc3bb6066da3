"""Text that is safe and exact in a grid of cells: one character, one cell.

IDs and model names come from users. A wide or control character would shift every column to its
right, or worse; `plain` replaces them.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Literal

Align = Literal["left", "right"]

_ASCII = str.maketrans(
    {
        **dict.fromkeys("█▉▊▇▆", "#"),
        **dict.fromkeys("▋▌▍▅▄▓", "="),
        **dict.fromkeys("▎▏▃▂▒", "-"),
        **dict.fromkeys("▁░", "."),
        **dict.fromkeys("╭╮╰╯┬┴├┤┼", "+"),
        **dict.fromkeys("─—–−", "-"),
        "━": "=",
        "Δ": "d",
        "◐": "%",
        **dict.fromkeys("│┃", "|"),
        "▲": "!",
        "◆": "+",
        **dict.fromkeys("▸→", ">"),
        **dict.fromkeys("←", "<"),
        **dict.fromkeys("▼↓", "v"),
        "↑": "^",
        **dict.fromkeys("●•", "*"),
        **dict.fromkeys("○", "o"),
        **dict.fromkeys("·…", "."),
        **dict.fromkeys("×", "x"),
        **dict.fromkeys("µ", "u"),
        **dict.fromkeys("±", "~"),
        "‖": "=",
        "≤": "<",
        "≥": ">",
        "°": " ",
        "✓": "v",
        "✗": "x",
    }
)

_BRAILLE = dict.fromkeys(range(0x2800, 0x2900), ":")


def to_ascii(text: str) -> str:
    """Map blocks and lines to `#=-.` and the like, cell by cell; anything else becomes `?`."""
    text = text.translate(_ASCII).translate(_BRAILLE)
    return text if text.isascii() else "".join(c if c.isascii() else "?" for c in text)


@lru_cache(maxsize=8192)
def plain(text: str) -> str:
    """Replace every character that is not exactly one visible cell by `?`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable()
        and unicodedata.east_asian_width(c) not in "WF"
        and unicodedata.category(c) not in ("Mn", "Me", "Cf")
        else "?"
        for c in text
    )


def fit_name(text: str, width: int) -> str:
    """Pad or cut to exactly `width` cells; cut in the middle, since names differ at their ends.

    If it is too narrow for both ends, it is cut at the end.
    """
    if len(text) <= width or width < 9:
        return fit(text, width)
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def fit(text: str, width: int, *, align: Align = "left") -> str:
    """Pad or cut to exactly `width` cells; a cut shows as `…`."""
    if width <= 0:
        return ""
    if len(text) > width:
        return text[: width - 1] + "…"
    return text.rjust(width) if align == "right" else text.ljust(width)
