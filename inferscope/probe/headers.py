"""Client headers that become attributes of a request: only those on the operator's list.

    INFERSCOPE_HEADERS="tenant=x-tenant-id,priority=x-priority"
    INFERSCOPE_HEADERS="tenant:hash=authorization,conversation=baggage"

A header may hold a secret or a name: `:hash` records 16 digits that only distinguish its values.
Without a list no header is read. Of W3C `baggage` only the conversation's OpenTelemetry attribute
is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

from inferscope.probe.host_log import warn
from inferscope.probe.ids import digits

VARIABLE = "INFERSCOPE_HEADERS"
WORDS = ("tenant", "priority", "adapter", "conversation")
"""Attributes that a header may set."""
HASH = "hash"
_BAGGAGE, _CONVERSATION = b"baggage", b"gen_ai.conversation.id"


class AllowedHeaders:
    """Reader of the headers on the list."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read the list; report and skip its unreadable items."""
        self._by_header: dict[bytes, tuple[str, bool]] = {}
        """Attribute of each header, and whether its value is hashed."""
        for item in filter(None, environment.get(VARIABLE, "").split(",")):
            attribute, _, header = item.partition("=")
            word, _, how = attribute.strip().partition(":")
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
            self._by_header[name.encode()] = (word, how == HASH)

    def read(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the attributes that a request's headers set, by ASGI's lower-case names."""
        by_header = self._by_header
        if not by_header:
            return {}
        found = {}
        for name, content in headers:
            known = by_header.get(name)
            if known is not None:
                content = _of_baggage(content) if name == _BAGGAGE else content
            if known is not None and content:
                word, is_hashed = known
                found[word] = digits(content) if is_hashed else content.decode("latin-1")
        return found


def _of_baggage(content: bytes) -> bytes:
    """Return the conversation's ID in a `baggage` header; empty without one."""
    for item in content.split(b","):
        key, _, value = item.partition(b";")[0].partition(b"=")
        if key.strip() == _CONVERSATION:
            return unquote_to_bytes(value.strip())
    return b""
