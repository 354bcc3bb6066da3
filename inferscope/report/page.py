"""One self-contained HTML file of sections.

The file needs no network and no JavaScript: its content security policy forbids both, so that not
even a name that slipped through the escaping could load or run anything. Colours follow the
reader's light or dark scheme, and black and white on paper.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from inferscope import __version__
from inferscope.report.blocks import Section

_TEMPLATES = Path(__file__).parent / "templates"
_LONGEST = 2_000
"""Largest number of characters of one text: names come from other programs."""
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that have no glyph, or change the direction of the text around them."""


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: title of the file and of its first heading.
        subtitle: line below it.
        sections: sections in their order.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def render(page: Page) -> str:
    """Return a page as HTML."""
    template = _environment().get_template("page.html")
    return template.render(page=page, version=__version__)


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


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment
