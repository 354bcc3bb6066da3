"""The byte layout of a ring file.

    0        64                         1024          4096                      4096 + capacity
    ├────────┼──────────────────────────┼─────────────┼─────────────────────────────┤
    │ fixed  │ words: claim, head, …    │ identity    │ frames, never wrapping      │
    └────────┴──────────────────────────┴─────────────┴─────────────────────────────┘

A position counts the bytes ever written, so it only grows; `position % capacity` is the offset in
the file. In `claim` the writer announces, before each write, the position up to which it may
overwrite. `head` and `sequence` state its progress at their last update, at most 100 ms ago.
A reader copies frames and then reads `claim`: bytes below `claim - capacity` may have been
overwritten during the copy, all above are intact. Beyond `head` a frame is new if it is whole and
numbered above `sequence`. The checksum decides, also on machines that reorder stores.

A frame is length, type, flags, checksum, sequence, payload, padded to 8 bytes. The other four
header fields seed the checksum, so that a flipped bit anywhere in a frame is detected.
"""

from __future__ import annotations

import struct
import sys
import zlib

import msgspec

from inferscope.records import FOLD_VERSION, FORMAT_VERSION

MAGIC = b"INFSRING"
PAGE = 4096
"""Bytes before the first frame."""

FIXED = struct.Struct("<8sIIQ")
"""Magic, format version, fold version, capacity."""

CLAIM, HEAD, SEQUENCE, HEARTBEAT, PENDING, KEYFRAME = (64 + 8 * word for word in range(6))
"""Byte offsets of the words. PENDING: start of the oldest step without a span, 0 for none."""
WORDS_END = KEYFRAME + 8
WORD = struct.Struct("<Q")
NO_KEYFRAME = (1 << 64) - 1

IDENTITY = 1024
IDENTITY_HEADER = struct.Struct("<II")
"""Length and checksum of the identity that follows."""
_LARGEST_NUMBER = 1 << 62
"""Bound on capacity and identity numbers: offsets and sums of times must fit into their fields."""

FRAME = struct.Struct("<IHHIQ")
FRAME_BYTES = FRAME.size
MAX_PAYLOAD_BYTES = 1 << 20

FILLER = 0
"""Frame type of the filler at the file's end: the next frame starts at the front."""
STARTS_KEYFRAME = 1
"""Flag of the first frame of a keyframe."""

MIN_CAPACITY = 64 * 1024
IS_LITTLE_ENDIAN = sys.byteorder == "little"


class Identity(msgspec.Struct, frozen=True):
    """The process that writes a ring."""

    engine_id: str
    role: str
    rank: int
    pid: int
    host: str
    boot_id: str
    start_ns: int
    start_real_ns: int
    synthetic: bool = False


def frame_bytes(payload_bytes: int) -> int:
    """Return the bytes that a frame occupies, padding included."""
    return (FRAME_BYTES + payload_bytes + 7) & ~7


def checksum(code: int, flags: int, sequence: int, payload: bytes | memoryview) -> int:
    """Return the checksum of a frame, header fields included."""
    number = sequence * 2_654_435_761 ^ (sequence >> 32) * 40_503
    seed = (number ^ code << 16 ^ flags ^ len(payload) << 7) & 0xFFFFFFFF
    return zlib.crc32(payload, seed)


def pack_header(identity: Identity, capacity: int) -> bytes:
    """Return the header page of a new ring."""
    page = bytearray(PAGE)
    FIXED.pack_into(page, 0, MAGIC, FORMAT_VERSION, FOLD_VERSION, capacity)
    WORD.pack_into(page, KEYFRAME, NO_KEYFRAME)
    body = msgspec.json.encode(identity)
    if IDENTITY + IDENTITY_HEADER.size + len(body) > PAGE:
        raise ValueError(f"ring identity is {len(body)} bytes, more than the header page holds")
    IDENTITY_HEADER.pack_into(page, IDENTITY, len(body), zlib.crc32(body))
    start = IDENTITY + IDENTITY_HEADER.size
    page[start : start + len(body)] = body
    return bytes(page)


def unpack_header(page: bytes) -> tuple[Identity, int, int]:
    """Return identity, capacity and format version.

    Raises:
        ValueError: the page is not an intact header; the message has the reason.
    """
    if len(page) < PAGE:
        raise ValueError(f"{len(page)} bytes long, shorter than a ring's header")
    magic, format_version, _, capacity = FIXED.unpack_from(page)
    if magic != MAGIC:
        raise ValueError("not a ring: it does not start with the ring's magic")
    length, expected = IDENTITY_HEADER.unpack_from(page, IDENTITY)
    start = IDENTITY + IDENTITY_HEADER.size
    body = page[start : start + length]
    if start + length > PAGE or zlib.crc32(body) != expected:
        raise ValueError("the ring's header is damaged")
    if not MIN_CAPACITY <= capacity < _LARGEST_NUMBER or capacity % 8:
        raise ValueError(f"the ring's header is damaged: capacity {capacity}")
    try:
        identity = msgspec.json.decode(body, type=Identity)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the ring's identity cannot be read: {error}") from error
    numbers = identity.rank, identity.pid, identity.start_ns, identity.start_real_ns
    if not all(0 <= number < _LARGEST_NUMBER for number in numbers):
        raise ValueError(f"the ring's identity cannot be right: {numbers}")
    return identity, capacity, format_version
