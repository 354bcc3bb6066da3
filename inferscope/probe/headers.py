"""Which headers of a client become attributes of its request: those on the operator's list alone.

    INFERSCOPE_HEADERS="tenant=x-tenant-id,priority=x-priority"
    INFERSCOPE_HEADERS="tenant:hash=authorization"

Whatever stands in a header may be a secret or a name: `:hash` records sixteen digits that tell one
from another and no more. Without a list none is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inferscope.probe.ids import digits
from inferscope.probe.voice import warn

VARIABLE = "INFERSCOPE_HEADERS"
WORDS = ("tenant", "priority", "adapter")
"""What a header may tell."""
HASH = "hash"


class AllowedHeaders:
    """Reads the headers on the list."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the list; what cannot be read of it is said, and left out."""
        self._told: dict[bytes, tuple[str, bool]] = {}
        """By header: the attribute, and whether it is hashed."""
        for item in filter(None, environment.get(VARIABLE, "").split(",")):
            said, _, header = item.partition("=")
            word, _, how = said.strip().partition(":")
            name = header.strip().lower()
            if word not in WORDS or how not in ("", HASH) or not name or not name.isascii():
                warn(
                    "%s: %r cannot be read, and is left out. Write WORD=HEADER or "
                    "WORD:hash=HEADER, with a word of: %s.",
                    VARIABLE,
                    item,
                    ", ".join(WORDS),
                )
                continue
            self._told[name.encode()] = (word, how == HASH)

    def read(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the attributes that a request's headers tell, by ASGI's lower-case names."""
        told = self._told
        if not told:
            return {}
        found = {}
        for name, content in headers:
            known = told.get(name)
            if known is not None and content:
                word, is_hashed = known
                found[word] = digits(content) if is_hashed else content.decode("latin-1")
        return found
