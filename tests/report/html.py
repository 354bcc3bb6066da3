"""A parsed page: its elements, its texts, and the numbers with their exact values."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_EMPTY = {"meta", "br", "link", "img", "input", "hr"}


@dataclass
class Parsed(HTMLParser):
    """A parsed page.

    Attributes:
        tags: elements with their attributes, in order.
        texts: texts, without those of the style sheet.
        values: exact values of numbers by section and key; None where it is unknown.
        printed: printed texts of numbers, likewise.
        open: elements that were not closed.
    """

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    values: dict[tuple[str, str], float | None] = field(default_factory=dict)
    printed: dict[tuple[str, str], str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    section: str = ""
    number: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in _EMPTY:
            self.open.append(tag)
        if tag == "section":
            self.section = found["id"] or ""
        if tag == "data":
            self.number = (self.section, found["data-key"] or "")
            assert self.number not in self.values, self.number
            value = found["value"]
            self.values[self.number] = float(value) if value else None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "data":
            self.number = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.texts.append(data)
        if self.number is not None:
            self.printed[self.number] = data

    def of(self, section: str) -> dict[str, float | None]:
        """Return the values of a section by key."""
        return {key: value for (at, key), value in self.values.items() if at == section}


def parse(page: str) -> Parsed:
    parsed = Parsed()
    parsed.feed(page)
    parsed.close()
    assert not parsed.open, parsed.open
    return parsed
