"""Texts of other programs, made safe to read: bounded, and without characters that disguise.

Markup is escaped elsewhere: by the template, and by the XML writer of a plot.
"""

from __future__ import annotations

import unicodedata

_LONGEST = 2_000
"""Largest number of characters of one text: names come from other programs."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that have no glyph, or change the direction of the text around them."""


def visible(value: object) -> str:
    """Return a text of bounded length with `\N{REPLACEMENT CHARACTER}` for unprintable characters.

    Characters that only arrange others (direction marks, joiners) count as unprintable: a name
    could use them to look like another one.
    """
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) in _HIDDEN else each
        for each in text
    )
