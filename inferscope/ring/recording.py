"""Recording files (`.isr`): frames of all rings of a run, in the order in which they were folded.

    magic, version | block | block | … | index | trailer
    block = BLOCK header, then zlib(frame, frame, …); frame = ring id, type, sequence, payload

A block holds at most a second or a mebibyte and stands on its own: each starts with a marker, so
that a damaged one costs only itself, wherever it is. The index at the end is a convenience; where
it is missing (the recorder was killed) the blocks are found by walking them.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import InferScopeError, UnreadableFile
from inferscope.private import open_private
from inferscope.records import FORMAT_VERSION

MAGIC = b"INFSREC\n"
_FILE = struct.Struct("<8sI")
_BLOCK = struct.Struct("<8sIIIqq")
"""Marker, compressed length, checksum of what follows, plain length, first and last time."""
_MARKER = b"\x89ISBLOCK"
_INDEX_MARKER = b"\x89ISINDEX"
_ANY_MARKER = re.compile(b"\x89IS(?:BLOCK|INDEX)")
_START = re.compile(MAGIC + b".{4}" + _ANY_MARKER.pattern, re.DOTALL)
_START_OR_MARKER = re.compile(_START.pattern + b"|" + _ANY_MARKER.pattern, re.DOTALL)
_START_BYTES = _FILE.size + len(_MARKER)
_ENTRY = struct.Struct("<HHQqI")
"""Ring id, type, sequence, time, payload length."""
_TRAILER = struct.Struct("<Q8s")
_INDEX_ROW = struct.Struct("<Qqq")

BLOCK_BYTES = 1 << 20
BLOCK_NS = 1_000_000_000
_MAX_BLOCK_BYTES = 8 << 20
_MAX_INDEX_BYTES = 64 << 20
_MOST_WASTED = 2
"""Times the file's size that is read in blocks which prove damaged, before its rest is given up."""
_WINDOW_BYTES = 1 << 20
_LAST_NS = (1 << 63) - 1


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

    def __init__(self, path: Path, *, make: Callable[[Path], int] | None = None) -> None:
        """Create the file, for its owner alone, and lock it until it is closed.

        Args:
            path: the file.
            make: creates it instead and returns its handle; then it is not locked.

        Raises:
            InferScopeError: it cannot be created, or another writer has it, with the reason.
        """
        self.path = path
        try:
            handle = open_private(path, alone=True) if make is None else make(path)
        except BlockingIOError as error:
            raise InferScopeError(
                f"cannot write {path}: another recorder is writing it. Choose another file."
            ) from error
        except OSError as error:
            raise InferScopeError(
                f"cannot write {path}: {error.strerror}. Choose another folder."
            ) from error
        self._handle = handle
        self._offset = 0
        self._parts: list[bytes] = []
        self._bytes = 0
        self._first_ns = self._last_ns = 0
        self._index: list[BlockIndex] = []
        self._append(_FILE.pack(MAGIC, FORMAT_VERSION))

    def write(self, frame: RecordedFrame) -> None:
        """Append a frame; frames come in fold order.

        Raises:
            InferScopeError: the file cannot be written, no space say.
        """
        t_ns = min(max(frame.t_ns, -_LAST_NS), _LAST_NS)  # a damaged record may say anything
        if self._parts and (self._bytes >= BLOCK_BYTES or t_ns - self._first_ns >= BLOCK_NS):
            self.flush()
        if not self._parts:
            self._first_ns = t_ns
        self._last_ns = t_ns
        header = _ENTRY.pack(frame.ring, frame.code, frame.sequence, t_ns, len(frame.payload))
        self._parts += (header, frame.payload)
        self._bytes += len(header) + len(frame.payload)

    def flush(self) -> None:
        """Write the block being filled.

        Raises:
            InferScopeError: the file cannot be written.
        """
        if not self._parts:
            return
        plain = b"".join(self._parts)
        self._parts = []
        self._bytes = 0
        body = zlib.compress(plain, 1)
        offset = self._offset
        self._append(_pack_block(_MARKER, body, len(plain), self._first_ns, self._last_ns))
        self._index.append(BlockIndex(offset, self._first_ns, self._last_ns))

    def close(self) -> None:
        """Write the last block and the index, and close the file; safe to call twice.

        Raises:
            InferScopeError: the end cannot be written. What was written before can be read.
        """
        if self._handle < 0:
            return
        try:
            self.flush()
            offset = self._offset
            rows = b"".join(_INDEX_ROW.pack(*row) for row in self._index)
            block = _pack_block(_INDEX_MARKER, rows, len(rows), 0, 0)
            self._append(block + _TRAILER.pack(offset, MAGIC))
        finally:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _append(self, content: bytes) -> None:
        """Write in one go, unbuffered; what a full disk cut short is cut off again."""
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._handle, content[done:], self._offset + done)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._offset)
            raise InferScopeError(
                f"cannot write {self.path}: {error.strerror}. What was recorded so far is kept."
            ) from error
        self._offset += len(content)


class RecordingReader:
    """Reads a recording front to back, past any damage.

    Attributes:
        damaged_blocks: blocks lost so far; grows while `frames` runs.
        is_newer: written by a later format; what this version does not know is skipped.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and find its index.

        Raises:
            UnreadableFile: it cannot be opened, is not a recording or several in one file.
        """
        self.path = path
        self.damaged_blocks = 0
        self._wasted_bytes = 0
        try:
            # Not blocking: a pipe would wait for a writer forever.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadableFile(f"cannot open {path}: {error.strerror}") from error
        status = os.fstat(self._handle)
        head = self._read(0, _FILE.size) if stat.S_ISREG(status.st_mode) else b""
        if len(head) < _FILE.size or not head.startswith(MAGIC):
            self.close()
            raise UnreadableFile(
                f"{path} is not an InferScope recording. "
                "Recordings are made by `inferscope record` and end in .isr."
            )
        self.version = _FILE.unpack(head)[1]
        self.is_newer = self.version > FORMAT_VERSION
        self._file_bytes = status.st_size
        self._window = 0, b""
        self._rows = self._find_index(status.st_size)
        if self._rows is None and (second := self._second_start()) >= 0:
            self.close()
            raise UnreadableFile(
                f"{path} is several recordings in one file: another begins at byte {second}. "
                f"Take them apart: head -c {second} FILE, tail -c +{second + 1} FILE."
            )

    @property
    def is_complete(self) -> bool:
        """Tell whether the recorder got to close the file."""
        return self._rows is not None

    def frames(self) -> Iterator[RecordedFrame]:
        """Yield all frames in the order they were written."""
        for _, plain in self._blocks():
            yield from _split(plain)

    def index(self) -> list[BlockIndex]:
        """Return the blocks with the time they span, from the file's index or by reading them."""
        if self._rows is None:
            num_damaged = self.damaged_blocks
            rows = [block for block, _ in self._blocks()]
            self.damaged_blocks = num_damaged  # counted by `frames`
            return rows
        return list(self._rows)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """Read at a place; less at the end of the file, nothing where it cannot be read."""
        try:
            return os.pread(self._handle, num_bytes, offset)
        except OSError:
            return b""

    def _find_index(self, file_bytes: int) -> list[BlockIndex] | None:
        """Return the index if the recorder got to write one, and it is intact."""
        raw = self._read(max(0, file_bytes - _TRAILER.size), _TRAILER.size)
        if len(raw) < _TRAILER.size:
            return None
        offset, magic = _TRAILER.unpack(raw)
        length = file_bytes - _TRAILER.size - _BLOCK.size - offset
        if magic != MAGIC or not 0 <= length <= _MAX_INDEX_BYTES or length % _INDEX_ROW.size:
            return None
        header = self._read(offset, _BLOCK.size)
        if not self._is_index(header, offset) or _BLOCK.unpack(header)[1] != length:
            return None  # it is another recording's, in front of this one
        body = self._read(offset + _BLOCK.size, length)
        return [BlockIndex(*row) for row in _INDEX_ROW.iter_unpack(body)]

    def _is_index(self, header: bytes, offset: int) -> bool:
        """Tell whether an intact index stands here."""
        if len(header) < _BLOCK.size or not header.startswith(_INDEX_MARKER):
            return False
        length, expected = struct.unpack_from("<II", header, len(_MARKER))
        if length > _MAX_INDEX_BYTES:
            return False
        if self._wasted_bytes > _MOST_WASTED * self._file_bytes:
            return False
        body = self._read(offset + _BLOCK.size, length)
        if zlib.crc32(header[16:], zlib.crc32(body)) == expected:
            return True
        self._wasted_bytes += len(body)
        return False

    def _second_start(self) -> int:
        """Return where another recording begins in this file, -1 for nowhere.

        Only the headers of blocks are read; behind damage, all up to the next marker.
        """
        offset = _FILE.size
        while header := self._read(offset, _BLOCK.size):
            if _START.match(header):
                return offset
            _, length, *_ = _BLOCK.unpack(header.ljust(_BLOCK.size, b"\0"))
            if header.startswith(_MARKER) and length <= _MAX_BLOCK_BYTES:
                behind = offset + _BLOCK.size + length
            elif header.startswith(_INDEX_MARKER) and length <= _MAX_INDEX_BYTES:
                behind = offset + _BLOCK.size + length + _TRAILER.size
            else:
                behind = -1
            if behind < 0 or not self._is_boundary(behind):
                behind = self._next(_START_OR_MARKER, offset + 1)
            if behind < 0:
                return -1
            offset = behind
        return -1

    def _is_boundary(self, offset: int) -> bool:
        """Return whether a block, a recording or the end of the file is here."""
        return offset == self._file_bytes or bool(
            _START_OR_MARKER.match(self._read(offset, _START_BYTES))
        )

    def _blocks(self) -> Iterator[tuple[BlockIndex, bytes]]:
        """Yield the intact blocks with their content, past whatever is damaged."""
        offset = _FILE.size
        self._wasted_bytes = 0
        while True:
            header = self._read(offset, _BLOCK.size)
            if not header or self._is_index(header, offset):
                return
            plain = self._content(header, offset)
            if plain is None:
                self.damaged_blocks += 1
                following = self._next(_ANY_MARKER, offset + 1)
                if following < 0:
                    return
                offset = following
                continue
            _, length, _, _, first_ns, last_ns = _BLOCK.unpack(header)
            yield BlockIndex(offset, first_ns, last_ns), plain
            offset += _BLOCK.size + length

    def _content(self, header: bytes, offset: int) -> bytes | None:
        """Return a block's content, None for what is no intact block."""
        if len(header) < _BLOCK.size or not header.startswith(_MARKER):
            return None
        _, length, expected, plain_length, _, _ = _BLOCK.unpack(header)
        if length > _MAX_BLOCK_BYTES or not 0 < plain_length <= _MAX_BLOCK_BYTES:
            return None
        if self._wasted_bytes > _MOST_WASTED * self._file_bytes:
            return None  # made to keep us busy: markers in which every block fails
        body = self._read(offset + _BLOCK.size, length)
        if zlib.crc32(header[16:], zlib.crc32(body)) != expected:
            self._wasted_bytes += len(body)
            return None
        try:
            inflating = zlib.decompressobj()
            plain = inflating.decompress(body, plain_length + 1)
        except zlib.error:
            return None
        return plain if inflating.eof and len(plain) == plain_length else None

    def _next(self, pattern: re.Pattern[bytes], start: int) -> int:
        """Return where the next match of a pattern at or behind `start` is, -1 for nowhere.

        What was read is kept, for the next search often begins in it.
        """
        overlap = _START_BYTES - 1
        while True:
            at, chunk = self._window
            if not at <= start < at + len(chunk) - overlap:
                at, chunk = self._window = start, self._read(start, _WINDOW_BYTES)
            if found := pattern.search(chunk, start - at):
                return at + found.start()
            if len(chunk) < _WINDOW_BYTES:
                return -1
            start = at + len(chunk) - overlap


def _pack_block(marker: bytes, body: bytes, plain: int, first_ns: int, last_ns: int) -> bytes:
    header = bytearray(_BLOCK.pack(marker, len(body), 0, plain, first_ns, last_ns))
    struct.pack_into("<I", header, 12, zlib.crc32(header[16:], zlib.crc32(body)))
    return bytes(header) + body


def _split(plain: bytes) -> Iterator[RecordedFrame]:
    offset = 0
    while offset + _ENTRY.size <= len(plain):
        ring, code, sequence, t_ns, length = _ENTRY.unpack_from(plain, offset)
        offset += _ENTRY.size
        if offset + length > len(plain):
            return
        yield RecordedFrame(ring, code, sequence, t_ns, plain[offset : offset + length])
        offset += length
