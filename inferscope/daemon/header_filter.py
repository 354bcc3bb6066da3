"""The filter of attributes that engines recorded from clients' headers, before export.

An engine records the headers that its environment allows (`probe.headers`). The collector's
configuration decides which of them leave the host, as they are or hashed. Pins contain the records
as the engines wrote them.
"""

from __future__ import annotations

from msgspec.structs import replace

from inferscope.fold import FinalRequest
from inferscope.probe import HASH, WORDS, digits

_ADAPTER, _TENANT = "adapter", "tenant"


class HeaderFilter:
    """Filter of header attributes by an allow list."""

    def __init__(self, headers: tuple[str, ...] | None) -> None:
        """Store the allow list, with `:hash` after names to be hashed; None allows all."""
        allowed = dict(word.partition(":")[::2] for word in headers or ())
        self._hidden = () if headers is None else tuple(w for w in WORDS if allowed.get(w) != "")
        self._hashed = frozenset(word for word, how in allowed.items() if how == HASH)

    def filtered(self, request: FinalRequest) -> FinalRequest:
        """Return the request with only the allowed header attributes."""
        recorded = request.attributes
        found = [word for word in self._hidden if word in recorded]
        cache = request.cache
        if cache is not None and _TENANT in self._hidden:
            cache = cache.with_tenants(self._shown_tenant)
            request = replace(request, cache=cache)
        if not found:
            return request
        attributes, adapter = dict(recorded), request.adapter
        for word in found:
            value = attributes.pop(word)
            shown = ""
            if word in self._hashed:
                shown = attributes[word] = _digits(value)
            if word == _ADAPTER and adapter == value:  # the adapter came from the header
                adapter = shown
        return replace(request, attributes=attributes, adapter=adapter)

    def _shown_tenant(self, tenant: str) -> str:
        return _digits(tenant) if tenant and _TENANT in self._hashed else ""


def _digits(value: str) -> str:
    """Return the digits of a header's bytes, as engines hash them."""
    return digits(value.encode("latin-1", "xmlcharrefreplace"))
