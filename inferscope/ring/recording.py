"""Recording files (`.isr`): frames of all rings of a run, in the order in which they were folded.

    magic, version | block | block | … | index | trailer
    block = BLOCK header, then zlib(frame, frame, …); frame = ring id, type, sequence, payload

A block holds at most a second or a mebibyte and stands on its own: each starts with a marker, so
that a damaged one costs only itself, wherever it is. The index at the end is a convenience; where
it is missing (the recorder was killed) the blocks are found by walking them.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import InferScopeError, UnreadableFile
from inferscope.records import FORMAT_VERSION

MAGIC = b"INFSREC\n"
_FILE = struct.Struct("<8sI")
_BLOCK = struct.Struct("<8sIIIqq")
"""Marker, compressed length, checksum of what follows, plain length, first and last time."""
_MARKER = b"\x89ISBLOCK"
_INDEX_MARKER = b"\x89ISINDEX"
_ENTRY = struct.Struct("<HHQqI")
"""Ring id, type, sequence, time, payload length."""
_TRAILER = struct.Struct("<Q8s")
_INDEX_ROW = struct.Struct("<Qqq")

BLOCK_BYTES = 1 << 20
BLOCK_NS = 1_000_000_000
_MAX_BLOCK_BYTES = 8 << 20


class RecordedFrame(NamedTuple):
    """A frame with the ring it came from (0: the reader itself) and its place in time."""

    ring: int
    code: int
    sequence: int
    t_ns: int
    payload: bytes


class BlockIndex(NamedTuple):
    """Where a block starts in the file, and the time it spans."""

    offset: int
    first_ns: int
    last_ns: int


class RecordingWriter:
    """Writes a recording. A crash loses at most the block being filled."""

    def __init__(self, path: Path) -> None:
        """Create the file, for its owner alone.

        Raises:
            InferScopeError: it cannot be created, with the reason.
        """
        self.path = path
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InferScopeError(
                f"cannot write {path}: {error.strerror}. Choose another folder."
            ) from error
        self._file = os.fdopen(handle, "wb")
        self._file.write(_FILE.pack(MAGIC, FORMAT_VERSION))
        self._parts: list[bytes] = []
        self._bytes = 0
        self._first_ns = self._last_ns = 0
        self._index: list[BlockIndex] = []

    def write(self, frame: RecordedFrame) -> None:
        """Append a frame; frames come in fold order."""
        if self._parts and (self._bytes >= BLOCK_BYTES or frame.t_ns - self._first_ns >= BLOCK_NS):
            self.flush()
        if not self._parts:
            self._first_ns = frame.t_ns
        self._last_ns = frame.t_ns
        header = _ENTRY.pack(frame.ring, frame.code, frame.sequence, frame.t_ns, len(frame.payload))
        self._parts += (header, frame.payload)
        self._bytes += len(header) + len(frame.payload)

    def flush(self) -> None:
        """Write the block being filled."""
        if not self._parts:
            return
        plain = b"".join(self._parts)
        body = zlib.compress(plain, 1)
        self._index.append(BlockIndex(self._file.tell(), self._first_ns, self._last_ns))
        self._file.write(_pack_block(_MARKER, body, len(plain), self._first_ns, self._last_ns))
        self._file.flush()
        self._parts = []
        self._bytes = 0

    def close(self) -> None:
        """Write the last block and the index, and close the file."""
        if self._file.closed:
            return
        self.flush()
        offset = self._file.tell()
        rows = b"".join(_INDEX_ROW.pack(*row) for row in self._index)
        self._file.write(_pack_block(_INDEX_MARKER, rows, len(rows), 0, 0))
        self._file.write(_TRAILER.pack(offset, MAGIC))
        self._file.close()


class RecordingReader:
    """Reads a recording front to back, past any damage.

    Attributes:
        damaged_blocks: blocks lost so far; grows while `frames` runs.
        is_newer: written by a later format; what this version does not know is skipped.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and find its index.

        Raises:
            UnreadableFile: it cannot be opened or is not a recording.
        """
        self.path = path
        self.damaged_blocks = 0
        try:
            self._file = path.open("rb")
            head = self._file.read(_FILE.size)
        except OSError as error:
            raise UnreadableFile(f"cannot open {path}: {error.strerror}") from error
        if len(head) < _FILE.size or not head.startswith(MAGIC):
            self._file.close()
            raise UnreadableFile(
                f"{path} is not an InferScope recording. "
                "Recordings are made by `inferscope record` and end in .isr."
            )
        self.version = _FILE.unpack(head)[1]
        self.is_newer = self.version > FORMAT_VERSION
        self._index_offset = self._find_index()

    @property
    def is_complete(self) -> bool:
        """Tell whether the recorder got to close the file."""
        return self._index_offset is not None

    def frames(self) -> Iterator[RecordedFrame]:
        """Yield all frames in the order they were written."""
        self._file.seek(_FILE.size)
        while True:
            plain = self._next_block()
            if plain is None:
                return
            yield from _split(plain)

    def index(self) -> list[BlockIndex]:
        """Return the blocks with the time they span, from the file's index or by walking."""
        if self._index_offset is not None:
            self._file.seek(self._index_offset)
            rows = self._file.read(_BLOCK.unpack(self._file.read(_BLOCK.size))[1])
            return [BlockIndex(*row) for row in _INDEX_ROW.iter_unpack(rows)]
        self._file.seek(_FILE.size)
        found = []
        while (offset := self._file.tell()) >= 0:
            header = self._file.read(_BLOCK.size)
            if len(header) < _BLOCK.size or not header.startswith(_MARKER):
                break
            _, length, _, _, first_ns, last_ns = _BLOCK.unpack(header)
            found.append(BlockIndex(offset, first_ns, last_ns))
            self._file.seek(length, os.SEEK_CUR)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find_index(self) -> int | None:
        """Return where an intact index starts, None if the recorder did not get to write one."""
        size = self._file.seek(0, os.SEEK_END)
        if size < _FILE.size + _BLOCK.size + _TRAILER.size:
            return None
        self._file.seek(size - _TRAILER.size)
        offset, magic = _TRAILER.unpack(self._file.read(_TRAILER.size))
        if magic != MAGIC or offset > size - _BLOCK.size - _TRAILER.size:
            return None
        self._file.seek(offset)
        header = self._file.read(_BLOCK.size)
        body = self._file.read(size - _TRAILER.size - offset - _BLOCK.size)
        intact = zlib.crc32(header[16:], zlib.crc32(body)) == _BLOCK.unpack(header)[2]
        return offset if header.startswith(_INDEX_MARKER) and intact else None

    def _next_block(self) -> bytes | None:
        """Return the next intact block's content, None at the end of the file."""
        while True:
            start = self._file.tell()
            header = self._file.read(_BLOCK.size)
            if header.startswith(_INDEX_MARKER) or len(header) == 0:
                return None
            plain = self._read_block(header)
            if plain is not None:
                return plain
            self.damaged_blocks += 1
            if not self._seek_marker(start + 1):
                return None

    def _read_block(self, header: bytes) -> bytes | None:
        if len(header) < _BLOCK.size or not header.startswith(_MARKER):
            return None
        _, length, expected, plain_length, _, _ = _BLOCK.unpack(header)
        if length > _MAX_BLOCK_BYTES or plain_length > _MAX_BLOCK_BYTES:
            return None
        body = self._file.read(length)
        if zlib.crc32(header[16:], zlib.crc32(body)) != expected:
            return None
        try:
            plain = zlib.decompressobj().decompress(body, plain_length)
        except zlib.error:
            return None
        return plain if len(plain) == plain_length else None

    def _seek_marker(self, start: int) -> bool:
        """Go to the next marker at or behind `start`."""
        self._file.seek(start)
        behind = b""
        while chunk := self._file.read(1 << 20):
            window = behind + chunk
            found = [at for m in (_MARKER, _INDEX_MARKER) if (at := window.find(m)) >= 0]
            if found:
                self._file.seek(self._file.tell() - len(window) + min(found))
                return True
            behind = window[-len(_MARKER) + 1 :]
        return False


def _pack_block(marker: bytes, body: bytes, plain: int, first_ns: int, last_ns: int) -> bytes:
    header = bytearray(_BLOCK.pack(marker, len(body), 0, plain, first_ns, last_ns))
    struct.pack_into("<I", header, 12, zlib.crc32(header[16:], zlib.crc32(body)))
    return bytes(header) + body


def _split(plain: bytes) -> Iterator[RecordedFrame]:
    offset = 0
    while offset + _ENTRY.size <= len(plain):
        ring, code, sequence, t_ns, length = _ENTRY.unpack_from(plain, offset)
        offset += _ENTRY.size
        yield RecordedFrame(ring, code, sequence, t_ns, plain[offset : offset + length])
        offset += length
