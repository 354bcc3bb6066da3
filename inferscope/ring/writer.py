"""The writing end of a ring: one preallocated memory-mapped file, one writer.

`write` is a memory copy: no system call, no allocation that grows, no peer. Blocks are really
allocated when the ring is made, so a disk that fills up later cannot kill the observed process
with SIGBUS. As long as the file is mapped its writer holds an `flock` on it, which a SIGKILL
releases: nobody who tidies up can take a stopped process for a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from contextlib import suppress
from pathlib import Path

from inferscope.errors import RingUnavailable
from inferscope.ring import layout
from inferscope.ring.layout import Identity

_crc32 = zlib.crc32
_PAGE, _FRAME_BYTES = layout.PAGE, layout.FRAME_BYTES
_pack_frame = layout.FRAME.pack_into
_NOT_ENOUGH_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_CLAIM, _HEAD, _SEQUENCE, _HEARTBEAT, _PENDING, _KEYFRAME = range(6)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14; Python does not name it."""
_PAGES_AT_ONCE_BYTES = 64 * 1024
_MOST_AHEAD_BYTES = 1 << 20


class NoRoom(RingUnavailable):
    """There is not enough space for a ring of this capacity; a smaller one may do."""


class RingWriter:
    """Writes frames into a ring file. Not thread-safe: the probe's lock stands around it.

    Attributes:
        path: the file.
        capacity: bytes for frames.
        largest_bytes: of a payload.
        sequence: frames written so far, fillers not counted, refused ones counted.
        last_keyframe: position of the newest keyframe, -1 before the first.
        bytes_since_keyframe: a keyframe is due before this reaches the capacity.
    """

    def __init__(
        self, path: Path, identity: Identity, *, capacity: int, group_id: int | None = None
    ) -> None:
        """Make the ring file; the folder must exist. `group_id` may read it too.

        Raises:
            FileExistsError: another writer has this name.
            NoRoom: there is no space for this capacity.
            RingUnavailable: it cannot be made here, with the reason.
        """
        self.path = path
        self.capacity = capacity = max(layout.MIN_CAPACITY, capacity & ~4095)
        room = capacity // 4 - layout.FRAME_BYTES - 8
        self.largest_bytes = min(layout.MAX_PAYLOAD_BYTES, room)
        self.sequence = 0
        self.last_keyframe = -1
        self.bytes_since_keyframe = 0
        self._head = 0
        self._populated = 0
        self._head_before = 0
        header = layout.pack_header(identity, capacity)
        # Made under another name and renamed, so that no reader sees a half-made ring. Whoever
        # holds the other name holds this one: two writers cannot both find it free.
        partial = path.with_name(path.name + ".partial")
        try:
            handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise _cannot_make(path, error) from error
        try:
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            with suppress(OSError):  # a file system without locks: the heartbeat has to do
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if group_id is not None:
                os.fchown(handle, -1, group_id)
                os.fchmod(handle, 0o640)
            _allocate(handle, layout.PAGE + capacity)
            os.pwrite(handle, header, 0)
            self._map = mmap.mmap(handle, layout.PAGE + capacity)
            os.rename(partial, path)
        except FileExistsError:
            partial.unlink(missing_ok=True)
            raise
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _cannot_make(path, error) from error
        finally:
            os.close(handle)
        # One store per word. `struct.pack_into` clears the target first: measured here, a reader
        # beside a busy writer found 0 in half of its reads.
        self._words = memoryview(self._map)[layout.CLAIM : layout.WORDS_END].cast("Q")

    def write(self, code: int, payload: bytes, *, flags: int = 0) -> bool:
        """Append a frame, overwriting the oldest ones (1 µs for a 64-request step).

        Returns:
            False for a payload larger than `largest_bytes`. Its sequence number is used up, so that
            readers count it among what they miss.
        """
        length = len(payload)
        self.sequence = sequence = self.sequence + 1
        if length > self.largest_bytes:
            return False
        size = (_FRAME_BYTES + length + 7) & ~7
        ring, words = self._map, self._words
        position, capacity = self._head, self.capacity
        place = position % capacity
        if size > capacity - place:
            position, place = self._fill(position, capacity - place), 0
        words[_CLAIM] = position + size
        start = _PAGE + place
        # `layout.checksum`, without the call: 0.2 µs of 1.2, several when it is not in the cache.
        number = sequence * 2_654_435_761 ^ (sequence >> 32) * 40_503
        seed = (number ^ code << 16 ^ flags ^ length << 7) & 0xFFFFFFFF
        _pack_frame(ring, start, length, code, flags, _crc32(payload, seed), sequence)
        start += _FRAME_BYTES
        ring[start : start + length] = payload
        self._head = head = position + size
        words[_HEAD] = head
        words[_SEQUENCE] = sequence
        if flags & layout.STARTS_KEYFRAME:
            words[_KEYFRAME] = self.last_keyframe = position
            self.bytes_since_keyframe = 0
        else:
            self.bytes_since_keyframe += size
        return True

    def _fill(self, position: int, room: int) -> int:
        """Skip to the front of the file; a reader that finds less than a header skips too."""
        self._words[_CLAIM] = position + room
        if room >= layout.FRAME_BYTES:
            length = room - layout.FRAME_BYTES
            start = layout.PAGE + position % self.capacity
            _pack_frame(self._map, start, length, layout.FILLER, 0, 0, 0)
        return position + room

    def beat(self, now_ns: int) -> None:
        """Tell readers that the process is alive; 0: that it has said its last word."""
        self._words[_HEARTBEAT] = max(0, now_ns)

    def set_pending(self, start_ns: int) -> None:
        """Publish the start of the oldest step without a span; 0 when there is none."""
        # Twice a step; `max` would be 0.1 µs more.
        self._words[_PENDING] = start_ns if start_ns > 0 else 0

    def populate(self) -> None:
        """Make the pages that will be written next writable; from a thread beside the writer's.

        Else the writer takes a page fault for every 4 KiB, again after each write-back (measured on
        ext4: 8 µs per step of 64 requests on average, 45 µs at its worst). Nothing is written.
        """
        head = self._head
        wanted = min(max(_PAGES_AT_ONCE_BYTES, 4 * (head - self._head_before)), _MOST_AHEAD_BYTES)
        self._head_before = head
        if self._populated < head or self._populated > head + self.capacity:
            self._populated = head & ~4095
        while self._populated < head + wanted:
            place = self._populated % self.capacity
            length = min(_PAGES_AT_ONCE_BYTES, self.capacity - place)
            try:
                self._map.madvise(_POPULATE_WRITE, layout.PAGE + place, length)
            except OSError:  # an older kernel
                self._populated = head + self.capacity
                return
            self._populated += length

    def close(self) -> None:
        """Unmap the file; it stays, as the flight recorder. Safe to call twice."""
        self._words.release()
        self._map.close()


def _allocate(handle: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        chunk = bytes(1 << 20)
        for at in range(0, num_bytes, len(chunk)):
            os.pwrite(handle, chunk[: num_bytes - at], at)


def _cannot_make(path: Path, error: OSError) -> RingUnavailable:
    if error.errno in _NOT_ENOUGH_ROOM:
        return NoRoom(
            f"cannot make the ring {path}: no space. Free some, set a smaller "
            "INFERSCOPE_RING_MB, or point INFERSCOPE_DIR elsewhere."
        )
    return RingUnavailable(
        f"cannot make the ring {path}: {error.strerror}. Set INFERSCOPE_DIR to a writable folder."
    )
