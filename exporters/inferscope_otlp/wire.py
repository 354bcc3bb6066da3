"""OTLP protobuf encoding of traces and metrics, field by field.

Protobuf's own messages take five times as long, and the SDK's spans as long again: a request has
about seventy attributes, nearly all with the same few names. So prefixes are cached by name, and
whole pairs if values are few. Field numbers are those of opentelemetry-proto 1.x, where they may
not change: trace.proto, metrics.proto, common.proto, resource.proto.

    message = (tag, content)*      tag = number << 3 | type      types: 0 varint, 1 eight bytes,
                                                                 2 length and bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

from inferscope_otlp import names
from inferscope_otlp.attributes import Attributes, Value
from inferscope_otlp.spans import SpanEvent, SpanLink, Trace, TraceSpan

_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_times = struct.Struct("<BQBQ").pack
_INTERNAL, _SERVER = b"\x30\x01", b"\x30\x02"
_ERROR = b"\x18\x02"
_CUMULATIVE = 2
_DOUBLE_OF_LIST = b"\x0a\x09\x21"
"""Prefix of the eight bytes of one value in an array."""


def varint(number: int) -> bytes:
    """Return a varint of at most 64 bits, negative numbers in two's complement."""
    number &= 0xFFFFFFFFFFFFFFFF
    if number < 0x80:
        return _SMALL[number]
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SMALL = [bytes((number,)) for number in range(0x80)]
_TAGS = [varint(number << 3 | 2) for number in range(32)]


def field(number: int, content: bytes) -> bytes:
    """Return a bytes field with a number below 32: a text or another message."""
    num_bytes = len(content)
    if num_bytes < 0x80:
        return _TAGS[number] + _SMALL[num_bytes] + content
    return _TAGS[number] + varint(num_bytes) + content


def text(number: int, content: str) -> bytes:
    """Return a text field; lone surrogates, which are invalid, become question marks."""
    return field(number, content.encode("utf-8", "replace"))


def packed(number: int, values: Iterable[float], *, is_whole: bool) -> bytes:
    """Return a packed field of eight-byte numbers."""
    values = list(values)
    return field(number, struct.pack(f"<{len(values)}{'Q' if is_whole else 'd'}", *values))


# --- attributes ---------------------------------------------------------------------------------


def pairs(number: int, attributes: Attributes) -> bytes:
    """Return attributes, each as a field with this number."""
    out = []
    for name, value in attributes.items():
        if isinstance(value, float):
            out.append(_double_prefix(number, name) + _double(value))
        elif isinstance(value, int) and value is not True and value is not False:
            content = varint(value)
            out.append(_integer_prefix(number, name, len(content)) + content)
        elif isinstance(value, str) and name not in names.UNIQUE:
            out.append(_string_pair(number, name, value))
        else:
            out.append(_pair(number, name, value))
    return b"".join(out)


@lru_cache(1024)
def _double_prefix(number: int, name: str) -> bytes:
    """Return a pair without the eight bytes of its value, which end it."""
    key = text(1, name)
    return varint(number << 3 | 2) + varint(len(key) + 11) + key + b"\x12\x09\x21"


@lru_cache(1024)
def _integer_prefix(number: int, name: str, num_bytes: int) -> bytes:
    """Return a pair without its value, an integer of `num_bytes` bytes, which ends it."""
    key = text(1, name)
    before = varint(number << 3 | 2) + varint(len(key) + 3 + num_bytes) + key
    return before + b"\x12" + varint(1 + num_bytes) + b"\x18"


def _pair(number: int, name: str, value: Value) -> bytes:
    content = _any_value(value)
    key = _key(name)
    num_bytes = len(content)
    return (
        varint(number << 3 | 2)
        + varint(len(key) + 1 + (1 if num_bytes < 0x80 else len(varint(num_bytes))) + num_bytes)
        + key
        + b"\x12"
        + varint(num_bytes)
        + content
    )


@lru_cache(4096)
def _string_pair(number: int, name: str, value: str) -> bytes:
    return _pair(number, name, value)


@lru_cache(1024)
def _key(name: str) -> bytes:
    return text(1, name)


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return text(1, value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return b"\x21" + _double(value)
    return field(
        5,
        b"".join(
            [
                _DOUBLE_OF_LIST + _double(each)
                if type(each) is float
                else field(1, _any_value(each))
                for each in value
            ]
        ),
    )


# --- traces -------------------------------------------------------------------------------------


def trace_bytes(trace: Trace) -> bytes:
    """Return a trace's spans, the root first, as fields of a ScopeSpans message."""
    trace_id = b"\x0a\x10" + trace.trace_id.to_bytes(16, "big")
    root_id = trace.root.span_id.to_bytes(8, "big")
    above = b"" if trace.parent is None else b"\x22\x08" + trace.parent.span_id.to_bytes(8, "big")
    # Status carries the failure; the flags mark the parent as remote.
    status = b"" if trace.failure is None else field(15, text(2, trace.failure) + _ERROR)
    below = b"\x22\x08" + root_id
    return field(2, trace_id + _span(trace.root, above + _SERVER) + status) + b"".join(
        [field(2, trace_id + _span(child, below + _INTERNAL)) for child in trace.children]
    )


def _span(span: TraceSpan, place: bytes) -> bytes:
    name = span.name.encode("utf-8", "replace")
    return b"".join(
        (
            b"\x12\x08",
            span.span_id.to_bytes(8, "big"),
            place,
            b"\x2a",
            varint(len(name)),
            name,
            _times(0x39, max(0, span.start_ns), 0x41, max(0, span.end_ns)),
            pairs(9, span.attributes),
            *[field(11, _event(event)) for event in span.events],
            b"" if span.link is None else field(13, _link(span.link)),
        )
    )


def _link(link: SpanLink) -> bytes:
    return (
        b"\x0a\x10"
        + link.trace_id.to_bytes(16, "big")
        + b"\x12\x08"
        + (link.span_id.to_bytes(8, "big"))
    )


def _event(event: SpanEvent) -> bytes:
    at = b"\x09" + _fixed64(max(0, event.at_ns))
    return at + text(2, event.name) + pairs(3, event.attributes)


def resource_spans(resource: bytes, scope: bytes, traces: Iterable[bytes]) -> bytes:
    """Return the traces of one resource as a field of an export request."""
    return field(1, field(1, resource) + field(2, field(1, scope) + b"".join(traces)))


def resource_bytes(attributes: Attributes) -> bytes:
    """Return a Resource message."""
    return pairs(1, attributes)


def scope_bytes(name: str, version: str) -> bytes:
    """Return an InstrumentationScope message."""
    return text(1, name) + text(2, version)


# --- metrics ------------------------------------------------------------------------------------


def histogram_point(
    attributes: Attributes,
    *,
    start_ns: int,
    end_ns: int,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> bytes:
    """Return one series of a histogram as a field of a Histogram message.

    Args:
        attributes: attributes of the series.
        start_ns: start of counting, on the wall clock.
        end_ns: current time, likewise.
        bounds: inclusive upper bounds.
        counts: one per bound, and one above the last.
        total: sum of all values.
    """
    point = (
        _times(0x11, start_ns, 0x19, end_ns)
        + b"\x21"
        + _fixed64(sum(counts))
        + b"\x29"
        + _double(total)
        + packed(6, counts, is_whole=True)
        + packed(7, bounds, is_whole=False)
        + pairs(9, attributes)
    )
    return field(1, point)


def histogram_metric(name: str, description: str, points: Iterable[bytes]) -> bytes:
    """Return a histogram of seconds as a field of a ScopeMetrics message."""
    histogram = b"".join(points) + b"\x10" + varint(_CUMULATIVE)
    return field(2, text(1, name) + text(2, description) + text(3, "s") + field(9, histogram))


def number_point(attributes: Attributes, value: float, *, start_ns: int, end_ns: int) -> bytes:
    """Return one series of a gauge or a sum as a field of either; integers stay integers."""
    number = b"\x31" + _fixed64(value) if isinstance(value, int) else b"\x21" + _double(value)
    return field(1, _times(0x11, start_ns, 0x19, end_ns) + number + pairs(7, attributes))


def gauge_metric(name: str, description: str, unit: str, points: Iterable[bytes]) -> bytes:
    """Return a gauge as a field of a ScopeMetrics message."""
    return field(
        2, text(1, name) + text(2, description) + text(3, unit) + field(5, b"".join(points))
    )


def sum_metric(
    name: str, description: str, unit: str, points: Iterable[bytes], *, is_monotonic: bool
) -> bytes:
    """Return a sum, monotonic or not, as a field of a ScopeMetrics message."""
    how = b"\x10" + varint(_CUMULATIVE) + (b"\x18\x01" if is_monotonic else b"")
    return field(
        2, text(1, name) + text(2, description) + text(3, unit) + field(7, b"".join(points) + how)
    )


def resource_metrics(resource: bytes, scope: bytes, metrics: Iterable[bytes]) -> bytes:
    """Return the metrics of one resource as a field of an export request."""
    return field(1, field(1, resource) + field(2, field(1, scope) + b"".join(metrics)))
