"""One self-contained HTML file of sections.

The file needs no network and no JavaScript: its content security policy forbids both, so that not
even a name that slipped through the escaping could load or run anything. Colours follow the
reader's light or dark scheme, and black and white on paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from inferscope import __version__
from inferscope.report.blocks import Section
from inferscope.report.escaping import visible
from inferscope.report.plots import PLOT

_TEMPLATES = Path(__file__).parent / "templates"


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
    numbers = count(1)

    def numbered(picture: Markup) -> Markup:
        """Return a picture whose IDs no other one on the page has."""
        return Markup(picture.replace(PLOT, f"plot-{next(numbers)}"))

    return template.render(page=page, version=__version__, numbered=numbered)


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
