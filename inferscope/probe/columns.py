"""Conversion of arguments into what a record can hold: numbers, columns and texts.

An argument may be any object. numpy integers, booleans and `1.0` become plain integers. A number
out of range becomes the nearest one in range. A text that is too long or not UTF-8 (clients choose
request ids) is cut and repaired. An argument that cannot be converted raises, and its call is left
out. `OddValues` counts every value that was changed, except conversions that lose nothing.
"""

from __future__ import annotations

import math
import operator
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from inferscope.host_signals import pass_on

MAX_TEXT_BYTES = 128
MAX_ATTRIBUTES = 16
LEAST_INT64, LARGEST_INT64, LARGEST_U32 = -(1 << 63), (1 << 63) - 1, 0xFFFFFFFF
LARGEST_U64 = (1 << 64) - 1
_LARGEST = {"B": 0xFF, "H": 0xFFFF, "I": LARGEST_U32, "q": LARGEST_INT64, "Q": LARGEST_U64}
_BYTES = {"B": 1, "H": 2, "I": 4, "q": 8, "Q": 8}
_OUT_OF_RANGE = 0xFFFFFFFF
"""`NO_REQUEST`: in the place of an index that no request can have."""
_MOST_PACKERS = 1024
_packers: dict[str, dict[int, Callable[..., bytes]]] = {typecode: {} for typecode in _BYTES}
PlanNumbers: TypeAlias = tuple[int, int, int, int, int, int, int, int]
_plan_numbers = struct.Struct("<qqqIIIII")
_pack_plan, _unpack_plan = _plan_numbers.pack, _plan_numbers.unpack


class OddValues:
    """Counter of argument values that a record cannot hold unchanged.

    Attributes:
        num: values clamped, cut or left out, and calls left out.
    """

    __slots__ = ("num",)

    def __init__(self) -> None:
        self.num = 0


_UNCOUNTED = OddValues()


def whole(value: Any, lowest: int, highest: int, odd: OddValues) -> int:
    """Return a value as a plain integer in a range.

    Raises:
        Exception: any, if it is not a number.
    """
    if type(value) is int and lowest <= value <= highest:
        return value
    try:
        number = operator.index(value)
    except TypeError as error:
        pass_on(error)
        if isinstance(value, (str, bytes, bytearray)):
            raise
        # Before the conversion to an int: that of Decimal("1E999999") takes minutes.
        if abs(float(value)) >= 2.0**64 and value not in (math.inf, -math.inf):
            odd.num += 1
            return highest if value > 0 else lowest
        number = int(value)
        if number != value:
            odd.num += 1
    if lowest <= number <= highest:
        return number
    odd.num += 1
    return min(max(lowest, number), highest)


def whole_or(value: Any, otherwise: int, lowest: int, highest: int, odd: OddValues) -> int:
    """Return a value as a plain integer in a range, or `otherwise` if it is not a number."""
    try:
        return whole(value, lowest, highest, odd)
    except Exception as error:
        pass_on(error)
        odd.num += 1
        return otherwise


def count_or_none(value: Any, odd: OddValues) -> int | None:
    """Return a number of tokens, or None if there is none or it is not a number."""
    if value is None:
        return None
    number = whole_or(value, -1, 0, LARGEST_U32, odd)
    return None if number < 0 else number


def time_or(value: Any, otherwise_ns: int, odd: OddValues) -> int:
    """Return a time in nanoseconds, or `otherwise_ns` if there is none or it is not a number."""
    if value is None:
        return otherwise_ns
    if type(value) is float:  # a clock's; its fraction of a nanosecond is nothing
        value = value // 1
    return whole_or(value, otherwise_ns, LEAST_INT64, LARGEST_INT64, odd)


def request_index(value: Any) -> int:
    """Return a request's index.

    Raises:
        Exception: any, if it is not an index. It is not clamped: that would be another request.
    """
    odd = OddValues()
    index = whole(value, 0, LARGEST_U32, odd)
    if odd.num:
        raise ValueError(f"{value} is no request's index")
    return index


def plan_numbers(numbers: tuple[Any, ...], odd: OddValues) -> PlanNumbers:
    """Return a plan's step and two times, then its five counts, as plain integers in range.

    Raises:
        Exception: any, if one is not a number.
    """
    try:
        packed = _pack_plan(*numbers)  # 0.25 µs with the unpacking; `whole`, eight times, 0.9
    except Exception as error:
        pass_on(error)
        times = [whole(number, LEAST_INT64, LARGEST_INT64, odd) for number in numbers[:3]]
        packed = _pack_plan(*times, *(whole(count, 0, LARGEST_U32, odd) for count in numbers[3:]))
    step, start_ns, end_ns, waiting, running, used, cached, total = _unpack_plan(packed)
    return step, start_ns, end_ns, waiting, running, used, cached, total


def column(typecode: str, values: Sequence[int], odd: OddValues = _UNCOUNTED) -> bytes:
    """Return values as a little-endian column; `bytes` and `bytearray` are taken to be one already.

    Raises:
        Exception: any, if they are not a column.
    """
    if type(values) is bytes or type(values) is bytearray:
        if len(values) % _BYTES[typecode]:
            raise ValueError(f"{len(values)} bytes are no column of {_BYTES[typecode]}")
        return bytes(values)
    try:
        # Measured, 64 values: 0.4 µs; `array` 0.5 µs for "I" and 1.2 µs for "H".
        num = len(values)
        return (_packers[typecode].get(num) or _packer(typecode, num))(*values)
    except struct.error:
        largest = _LARGEST[typecode]
        return array(typecode, [whole(value, 0, largest, odd) for value in values]).tobytes()


def index_column(values: Sequence[int], odd: OddValues = _UNCOUNTED) -> bytes:
    """Return requests' indices as a column; what no request can have becomes `NO_REQUEST`.

    Raises:
        Exception: any, if they are not a column.
    """
    if type(values) is bytes or type(values) is bytearray:
        return column("I", values)
    try:
        num = len(values)
        return (_packers["I"].get(num) or _packer("I", num))(*values)
    except struct.error:
        indices = []
        for value in values:
            changed = OddValues()
            index = whole(value, 0, LARGEST_U32, changed)
            odd.num += bool(changed.num)
            indices.append(_OUT_OF_RANGE if changed.num else index)
        return array("I", indices).tobytes()


def same_rows(num_rows: int, *columns: tuple[str, bytes]) -> None:
    """Check that columns have as many rows as there are, or none.

    Raises:
        ValueError: one has not.
    """
    for typecode, cells in columns:
        if cells and len(cells) != num_rows * _BYTES[typecode]:
            raise ValueError(f"columns of {len(cells) // _BYTES[typecode]} and {num_rows} rows")


def slice_columns(
    requests: Sequence[int],
    phases: Sequence[int],
    tokens: Sequence[int],
    contexts: Sequence[int],
    flags: Sequence[int],
    sampled: Sequence[int],
    odd: OddValues = _UNCOUNTED,
) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
    """Return a step's columns: all as `column` would, with the packers looked up once.

    Raises:
        Exception: any, if they are not columns or have different lengths.
    """
    if type(requests) is not bytes:
        try:
            num = len(requests)
            u32 = _packers["I"].get(num) or _packer("I", num)
            u8 = _packers["B"].get(num) or _packer("B", num)
            u16 = _packers["H"].get(num) or _packer("H", num)
            return (
                u32(*requests),
                u8(*phases),
                u32(*tokens),
                u32(*contexts),
                u8(*flags) if len(flags) else b"",
                u16(*sampled) if len(sampled) else b"",
            )
        except struct.error:
            pass  # one of them is empty, bytes already, or out of range
    made = (
        index_column(requests, odd),
        column("B", phases, odd),
        column("I", tokens, odd),
        column("I", contexts, odd),
        column("B", flags, odd),
        column("H", sampled, odd),
    )
    same_rows(len(made[0]) // 4, *zip("BIIBH", made[1:], strict=True))
    return made


def _packer(typecode: str, num: int) -> Callable[..., bytes]:
    packers = _packers[typecode]
    if len(packers) >= _MOST_PACKERS:
        packers.clear()
    pack = packers[num] = struct.Struct(f"<{num}{typecode}").pack
    return pack


def digest64(requests: bytes, tokens: bytes) -> int:
    """Return the digest by which a span and its slices recognise each other.

    Two CRCs: it tells apart steps of one engine, it need not withstand anybody. A cryptographic one
    costs 20 µs more in a running engine, where its code is never in the cache.
    """
    return zlib.crc32(requests) | zlib.crc32(tokens) << 32


def text(value: object, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return a text of at most this many bytes of UTF-8."""
    if type(value) is str and value.isascii() and len(value) <= limit_bytes:
        return value
    # `str.__str__` makes a plain string of a subclass, which may have methods of its own.
    raw = str.__str__(str(value))[:limit_bytes].encode("utf-8", "replace")
    return raw[:limit_bytes].decode("utf-8", "ignore")


def text_or_empty(value: object, odd: OddValues) -> str:
    """Return a text as `text` does, an empty one where there is none."""
    try:
        return text(value)
    except Exception as error:
        pass_on(error)
        odd.num += 1
        return ""


def name(value: object) -> str:
    """Return a text as `text` does, but one that still differs where the whole one does."""
    if type(value) is str and value.isascii() and len(value) <= MAX_TEXT_BYTES:
        return value
    given = str.__str__(str(value))
    short = text(given)
    if short == given:
        return given
    digest = zlib.crc32(given.encode("utf-8", "surrogatepass"))
    return f"{text(given, MAX_TEXT_BYTES - 9)}~{digest:08x}"


def attributes(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the first few attributes, each bounded."""
    if not given:
        return None
    return {text(key): text(value) for key, value in islice(given.items(), MAX_ATTRIBUTES)}
