"""Which trace a request belongs to: ids that come out the same each time, and the client's parent.

A span's id is a hash of (engine, request, span name), so what is exported twice is one trace, not
two. The trace's id is the client's where it sent a `traceparent`, else a hash of (engine, request).
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
    """The client's span, as it told of it."""

    trace_id: int
    span_id: int
    is_sampled: bool
    """The client records this trace."""


def parent_of(traceparent: str) -> Parent | None:
    """Read a `traceparent`; None unless it is valid by W3C Trace Context, section 3.2.

    Version 00 has exactly four fields. Later ones may append fields, which are not read; ff is
    forbidden, and so are ids of nothing but zeros.
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
    """Return the id of the trace of a request that came without one."""
    return _hash(16, engine_id, request_id)


def span_id_of(engine_id: str, request_id: str, name: str) -> int:
    """Return the id of one of a request's spans."""
    return span_ids_of(engine_id, request_id)(name)


def span_ids_of(engine_id: str, request_id: str) -> Callable[[str], int]:
    """Return what tells the ids of all of a request's spans by their names."""
    digest = hashlib.blake2b(_part(engine_id) + _part(request_id), digest_size=8)

    def span_id(name: str) -> int:
        own = digest.copy()
        own.update(_part_of_name(name))
        return int.from_bytes(own.digest(), "big") or 1

    return span_id


def _hash(num_bytes: int, *parts: str) -> int:
    """Return a number of so many bytes that is never zero, which would be no id."""
    digest = hashlib.blake2b(b"".join(map(_part, parts)), digest_size=num_bytes)
    return int.from_bytes(digest.digest(), "big") or 1


def _part(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(4, "little") + encoded


_part_of_name = lru_cache(256)(_part)
