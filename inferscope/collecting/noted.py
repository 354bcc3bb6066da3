"""What exporters are told of what engines have noted from clients' headers.

An engine notes what its own environment allows (`probe.headers`). Its collector may tell less of
it, or digits in its place: what leaves the host is one person's to say, in one file. Pins hold the
records as engines have written them.
"""

from __future__ import annotations

from msgspec.structs import replace

from inferscope.collector.finals import FinalRequest
from inferscope.probe.headers import HASH, WORDS
from inferscope.probe.ids import digits

_ADAPTER = "adapter"


class Noted:
    """Passes on what is on the list."""

    def __init__(self, headers: tuple[str, ...] | None) -> None:
        """Take the list; None lets all pass."""
        asked = dict(word.partition(":")[::2] for word in headers or ())
        self._hidden = () if headers is None else tuple(w for w in WORDS if asked.get(w) != "")
        self._hashed = frozenset(word for word, how in asked.items() if how == HASH)

    def told(self, request: FinalRequest) -> FinalRequest:
        """Return a request as exporters may know it."""
        noted = request.attributes
        found = [word for word in self._hidden if word in noted]
        if not found:
            return request
        attributes, adapter = dict(noted), request.adapter
        for word in found:
            value = attributes.pop(word)
            said = ""
            if word in self._hashed:  # of the bytes of the header, as an engine would
                said = digits(value.encode("latin-1", "xmlcharrefreplace"))
                attributes[word] = said
            if word == _ADAPTER and adapter == value:  # of the header, and not of the engine
                adapter = said
        return replace(request, attributes=attributes, adapter=adapter)
