"""Trace and span IDs of requests: deterministic, or the client's parent.

A span's ID is a hash of (engine, request, span name), so exporting twice yields one trace. The
trace's ID is the client's if it sent a `traceparent`, else a hash of (engine, request).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-[\x20-\x7e]*)?"
)
_SAMPLED = 0x01


@dataclass(frozen=True)
class Parent:
    """The client's span, from its `traceparent`."""

    trace_id: int
    span_id: int
    is_sampled: bool
    """Whether the client records this trace."""


def parent_of(traceparent: str) -> Parent | None:
    """Parse a `traceparent`; return None unless it is valid by W3C Trace Context, section 3.2.

    Version 00 has exactly four fields. Later ones may append fields, which are not read; ff is
    forbidden, and so are IDs of only zeros.
    """
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found["version"] == "ff":
        return None
    if found["version"] == "00" and found["rest"] is not None:
        return None
    trace_id, span_id = int(found["trace"], 16), int(found["span"], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED))


def trace_id_of(engine_id: str, request_id: str) -> int:
    """Return the trace ID of a request without a client's."""
    return _hash(engine_id, request_id)


def span_id_of(engine_id: str, request_id: str, name: str) -> int:
    """Return the ID of one of a request's spans."""
    return span_ids_of(engine_id, request_id)(name)


def span_ids_of(engine_id: str, request_id: str) -> Callable[[str], int]:
    """Return a function from span names to the IDs of a request's spans."""
    digest = hashlib.blake2b(_part(engine_id) + _part(request_id), digest_size=8)

    def span_id(name: str) -> int:
        own = digest.copy()
        own.update(_part_of_name(name))
        return int.from_bytes(own.digest(), "big") or 1

    return span_id


def _hash(*parts: str) -> int:
    """Return a hash of 16 bytes that is never zero: zero is not a valid ID."""
    digest = hashlib.blake2b(b"".join(map(_part, parts)), digest_size=16)
    return int.from_bytes(digest.digest(), "big") or 1


def _part(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(4, "little") + encoded


_part_of_name = lru_cache(256)(_part)
