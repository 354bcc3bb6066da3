"""Parts of a prompt, as clients and servers declare them, bounded for a record.

    X-InferScope-Parts: system=120,retrieved=3000,user=20

Parts are declared in the order of the prompt, by name and number of tokens; names may repeat. They
are a claim, and nothing depends on its truth: readers of the records count undeclared tokens as
`other` and cut off parts beyond the prompt's end. Names are short words of lower-case letters, so
that no text of a prompt can pass as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from inferscope.records import OTHER_PART

Parts: TypeAlias = tuple[tuple[str, int], ...]
"""Names and tokens, in the order of the prompt."""

HEADER = b"x-inferscope-parts"
MOST_PARTS = 16
"""Maximum number of parts in a header."""
MOST_RECORDED_PARTS = 128
"""Maximum number of parts in a record: a server declares a long chat turn by turn."""
_MOST_HEADER_BYTES = 1024
_MOST_NAME_LETTERS = 32
_MOST_DIGITS = 9
_MOST_TOKENS = 0xFFFFFFFF
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz_")


def read_header(content: bytes) -> Parts | None:
    """Return the parts that a header declares; None if it cannot be read."""
    items = content.split(b",")
    if len(content) > _MOST_HEADER_BYTES or len(items) > MOST_PARTS:
        return None
    parts = []
    for item in items:
        name, _, count = item.partition(b"=")
        count = count.strip()
        if not count.isdigit() or len(count) > _MOST_DIGITS:
            return None
        parts.append((name.strip().decode("latin-1"), int(count)))
    return bounded(parts)


class Labels:
    """Reader of the parts headers of one front end's requests.

    Attributes:
        num_unreadable: number of unreadable headers; the first one is logged.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        """Log through `warn`, which must not block: it is called within a request."""
        self.num_unreadable = 0
        self._warn = warn

    def read(self, content: bytes) -> Parts:
        """Return the parts that a header declares; none if it cannot be read."""
        parts = read_header(content)
        if parts is None:
            self.num_unreadable += 1
            if self.num_unreadable == 1:  # without its content, which may be private
                self._warn(
                    "an X-InferScope-Parts header cannot be read; it is ignored, and so are "
                    "further ones, without a message. Write system=120,user=20: at most "
                    f"{MOST_PARTS} parts, tokens of each."
                )
            return ()
        return parts


def bounded(parts: Iterable[tuple[str, int]]) -> Parts:
    """Return parts within the bounds of a record.

    Invalid names become `other`, neighbours of one name are merged, and empty parts are omitted.
    Of too many parts the first and the last are kept; those between them become `other`.
    """
    kept: list[tuple[str, int]] = []
    for name, count in parts:
        named = name if is_name(name) else OTHER_PART
        tokens = min(max(0, int(count)), _MOST_TOKENS)
        if kept and kept[-1][0] == named:
            kept[-1] = (named, min(kept[-1][1] + tokens, _MOST_TOKENS))
        elif tokens:
            kept.append((named, tokens))
    if len(kept) > MOST_RECORDED_PARTS:
        first, *between = kept[: 2 - MOST_RECORDED_PARTS]
        between_tokens = min(sum(tokens for _, tokens in between), _MOST_TOKENS)
        kept = [first, (OTHER_PART, between_tokens), *kept[2 - MOST_RECORDED_PARTS :]]
    return tuple(kept)


def is_name(name: object) -> bool:
    """Return whether this is a valid name of a part."""
    return (
        isinstance(name, str) and 0 < len(name) <= _MOST_NAME_LETTERS and _LETTERS.issuperset(name)
    )
