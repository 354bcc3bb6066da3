"""Recording files (`.isr`): the frames of all rings of a run, in fold order.

    magic, version | block | block | … | index | trailer
    block = BLOCK header, then zlib(frame, frame, …); frame = ring id, type, sequence, payload

A block holds at most a second or a mebibyte and is self-contained: each starts with a marker, so
that damage to one costs only that block, wherever it is. The index at the end only speeds up
reading; if it is missing (the recorder was killed), the reader finds the blocks by scanning.
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
"""Multiple of the file's size that may be read in damaged blocks before the rest is skipped."""
_WINDOW_BYTES = 1 << 20
_LAST_NS = (1 << 63) - 1


class RecordedFrame(NamedTuple):
    """A frame with its ring's number (0: the reader itself) and time."""

    ring: int
    code: int
    sequence: int
    t_ns: int
    payload: bytes


class BlockIndex(NamedTuple):
    """File offset of a block and the time it spans."""

    offset: int
    first_ns: int
    last_ns: int


class RecordingWriter:
    """A writer of a recording. A crash loses at most the unwritten block."""

    def __init__(self, path: Path, *, make: Callable[[Path], int] | None = None) -> None:
        """Create the file, private to its owner, and lock it until it is closed.

        Args:
            path: the file.
            make: function that creates the file and returns its handle; it is then not locked.

        Raises:
            InferScopeError: the file cannot be created, or another writer has locked it.
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
        """Append a frame; callers pass frames in fold order.

        Raises:
            InferScopeError: the file cannot be written, for example for lack of space.
        """
        t_ns = min(max(frame.t_ns, -_LAST_NS), _LAST_NS)  # a damaged record may hold any value
        if self._parts and (self._bytes >= BLOCK_BYTES or t_ns - self._first_ns >= BLOCK_NS):
            self.flush()
        if not self._parts:
            self._first_ns = t_ns
        self._last_ns = t_ns
        header = _ENTRY.pack(frame.ring, frame.code, frame.sequence, t_ns, len(frame.payload))
        self._parts += (header, frame.payload)
        self._bytes += len(header) + len(frame.payload)

    def flush(self) -> None:
        """Write the unfinished block.

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
            InferScopeError: the end cannot be written; earlier content stays readable.
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
        """Append the content in one unbuffered write; truncate after a partial write."""
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._handle, content[done:], self._offset + done)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._offset)
            raise InferScopeError(
                f"cannot write {self.path}: {error.strerror}. "
                "The recording so far is kept; free some space."
            ) from error
        self._offset += len(content)


class RecordingReader:
    """A reader of a recording, front to back, past any damage.

    Attributes:
        damaged_blocks: number of blocks lost so far; grows while `frames` runs.
        is_newer: whether a later format wrote the file; unknown content is skipped.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and find its index.

        Raises:
            UnreadableFile: the file cannot be opened, is no recording, or holds several recordings.
        """
        self.path = path
        self.damaged_blocks = 0
        self._wasted_bytes = 0
        try:
            # Non-blocking: opening a pipe would wait forever for a writer.
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
                f"Split the file: head -c {second} FILE, tail -c +{second + 1} FILE."
            )

    @property
    def is_complete(self) -> bool:
        """Return whether the recorder closed the file."""
        return self._rows is not None

    def frames(self) -> Iterator[RecordedFrame]:
        """Yield all frames in the order they were written."""
        for _, plain in self._blocks():
            yield from _split(plain)

    def index(self) -> list[BlockIndex]:
        """Return the blocks and the time they span, from the file's index or by a scan."""
        if self._rows is None:
            num_damaged = self.damaged_blocks
            rows = [block for block, _ in self._blocks()]
            self.damaged_blocks = num_damaged  # `frames` counts them
            return rows
        return list(self._rows)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes at an offset; fewer at the end of the file, none if it is unreadable."""
        try:
            return os.pread(self._handle, num_bytes, offset)
        except OSError:
            return b""

    def _find_index(self, file_bytes: int) -> list[BlockIndex] | None:
        """Return the index if it was written and is intact, else None."""
        raw = self._read(max(0, file_bytes - _TRAILER.size), _TRAILER.size)
        if len(raw) < _TRAILER.size:
            return None
        offset, magic = _TRAILER.unpack(raw)
        length = file_bytes - _TRAILER.size - _BLOCK.size - offset
        if magic != MAGIC or not 0 <= length <= _MAX_INDEX_BYTES or length % _INDEX_ROW.size:
            return None
        header = self._read(offset, _BLOCK.size)
        if not self._is_index(header, offset) or _BLOCK.unpack(header)[1] != length:
            return None  # it belongs to another recording before this one
        body = self._read(offset + _BLOCK.size, length)
        return [BlockIndex(*row) for row in _INDEX_ROW.iter_unpack(body)]

    def _is_index(self, header: bytes, offset: int) -> bool:
        """Return whether an intact index starts here."""
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
        """Return the offset of another recording in this file, -1 if there is none.

        Only the headers of blocks are read; after damage, everything up to the next marker.
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
        """Return whether a block, a recording or the end of the file is at an offset."""
        return offset == self._file_bytes or bool(
            _START_OR_MARKER.match(self._read(offset, _START_BYTES))
        )

    def _blocks(self) -> Iterator[tuple[BlockIndex, bytes]]:
        """Yield the intact blocks with their content; skip damage."""
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
        """Return a block's content, None if the block is damaged."""
        if len(header) < _BLOCK.size or not header.startswith(_MARKER):
            return None
        _, length, expected, plain_length, _, _ = _BLOCK.unpack(header)
        if length > _MAX_BLOCK_BYTES or not 0 < plain_length <= _MAX_BLOCK_BYTES:
            return None
        if self._wasted_bytes > _MOST_WASTED * self._file_bytes:
            return None  # content made to waste time: every marker starts a damaged block
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
        """Return the offset of a pattern's next match at or after `start`, -1 if none.

        The bytes read are cached because the next search often starts in them.
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
