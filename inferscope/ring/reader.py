"""The ring reader: copies frames out and counts exactly those it did not see.

A reader never modifies the ring. It uses `pread` instead of a mapping: a file that shrinks under a
mapping kills the reader with SIGBUS, whereas a short read is harmless. It may pause for an hour;
if the writer has lapped it meanwhile, it resumes at the oldest intact keyframe. The sequence number
of the next whole frame counts whatever was skipped for any reason: frames are numbered without
gaps.

The writer publishes its head only every 100 ms. Beyond the head, a frame is valid if it is whole
and numbered above all that the header counts: frames of an earlier lap have lower numbers.

No content of the file is trusted: the header's words only locate what to read, and the checksum
decides whether bytes are a frame.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import UnreadableFile
from inferscope.records import Keyframe, UnknownRecord, decode
from inferscope.ring import layout
from inferscope.ring.access import why_closed

READ_BYTES = 2 * layout.MAX_PAYLOAD_BYTES
"""Bytes per copy, more than the largest frame, so that every copy holds a whole one."""
_LAP_MARGIN = 16
"""Inverse of the ring's part that a lapped reader resumes ahead of the writer."""
_RESTATED_NS = 15_000_000_000
"""Longest age of a keyframe in nanoseconds: ten seconds, plus delays of a busy machine."""
_TAIL_BYTES = 4096
"""Bytes of the first copy beyond the published head."""
_READ_ON_BYTES = 1 << 16
"""Bytes of each further copy, if frames fill the first."""
_ZEROS = bytes(4096)
_MOST_ROUNDS = 320
"""Largest number of mebibytes that one call searches; a header can state any capacity."""
_MOST_CHECKED = 8
"""Bound on the bytes checksummed per byte searched for the next whole frame."""

_WORDS = struct.Struct("<6Q")
_FRAME = layout.FRAME
_FRAME_BYTES = layout.FRAME_BYTES
_LARGEST_FRAME_BYTES = layout.frame_bytes(layout.MAX_PAYLOAD_BYTES)


class Frame(NamedTuple):
    """One record as stored in a ring."""

    sequence: int
    code: int
    payload: bytes


_frame = tuple.__new__
"""Constructor of a Frame from a tuple, twice as fast as its own, which is Python code."""


class Loss(NamedTuple):
    """Frames that were written but not seen."""

    num_frames: int
    reason: str
    """lapped or damaged (or refused by the writer: too large for its ring)."""


class RingReader:
    """A reader of one ring file, starting at its oldest keyframe.

    Attributes:
        path: the file.
        identity: process that writes it.
        format_version: format version of the writer.
        skew_ns: correction that a follower adds to all its times if the writer's clock differs.
    """

    def __init__(self, path: Path) -> None:
        """Open the ring.

        Raises:
            UnreadableFile: it is not a ring, or its header is damaged.
        """
        self.path = path
        self.skew_ns = 0
        self._file = -1
        try:
            # Non-blocking: opening a pipe of that name would wait forever for a writer.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except PermissionError as error:
            raise UnreadableFile(why_closed(path)) from error
        except OSError as error:
            raise UnreadableFile(f"cannot open {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError("not a file")
            header = layout.unpack_header(os.pread(self._file, layout.PAGE, 0))
        except (ValueError, OSError) as error:
            self.close()
            raise UnreadableFile(f"cannot read {path}: {error}") from error
        self.identity, self._capacity, self.format_version = header
        self._position = -1
        self._is_beyond = False
        """Whether the position is beyond the published head, after frames found there."""
        self._expected: int | None = None
        self._skipped_bytes = 0
        self._reason = "damaged"
        try:
            claim, head, _ = self._bounds()
            if claim <= self._capacity:
                self._position = self._oldest(claim, head)  # without one, the first `read` finds it
        except OSError as error:
            self.close()
            raise UnreadableFile(f"cannot read {path}: {error.strerror}") from error

    def words(self) -> tuple[int, int, int, int, int, int]:
        """Return the current claim, head, sequence, heartbeat, pending and last keyframe."""
        raw = os.pread(self._file, layout.WORDS_END - layout.CLAIM, layout.CLAIM)
        if len(raw) < layout.WORDS_END - layout.CLAIM:
            return 0, 0, 0, 0, 0, layout.NO_KEYFRAME
        words: tuple[int, int, int, int, int, int] = _WORDS.unpack(raw)
        return words

    def heartbeat_ns(self) -> int:
        """Return the time of the writer's last heartbeat."""
        return self.words()[3]

    def pending_ns(self) -> int:
        """Return the start of the oldest step without a span, 0 for none."""
        return self.words()[4]

    def skip_to_last_keyframe(self) -> None:
        """Skip to the last keyframe; skipped frames do not count as lost."""
        claim, head, _ = self._bounds()
        position = self.words()[5]
        lowest = max(self._position, claim - self._capacity)
        if lowest <= position < head and self._keyframe_at(position) is not None:
            self._position, self._expected = position, None

    def read(
        self, num_bytes: int = READ_BYTES, *, most_rounds: int = _MOST_ROUNDS
    ) -> list[Frame | Loss]:
        """Return the frames written since the last call, about `num_bytes` of them.

        The list is empty at the head. The call never raises for the file's content. If hundreds of
        megabytes hold no frame, it returns an empty list before it reaches the head.

        Args:
            num_bytes: bytes to copy at once; a larger frame is copied whole.
            most_rounds: largest number of copies that may yield no frame.
        """
        out: list[Frame | Loss] = []
        # One round suffices, except after damage or if the writer laps this reader during the read.
        for _ in range(min(64 + self._capacity // layout.MAX_PAYLOAD_BYTES, most_rounds)):
            claim, head, sequence = self._bounds()
            is_astray = head < self._position and not (self._is_beyond and self._position <= claim)
            if self._position < 0 or is_astray:
                # The second: the header is or was damaged. Frames already seen are skipped.
                self._position, self._is_beyond = self._oldest(claim, head), False
            elif claim - self._position > self._capacity:
                self._resume(self._oldest(claim, head))
            start = self._position
            ring_end = (start // self._capacity + 1) * self._capacity
            end = min(head, start + num_bytes, ring_end)
            if end <= start:
                self._read_beyond(out, claim, sequence, num_bytes)
                if not out:
                    self._note_tail(out, head, sequence)
                return out
            self._is_beyond = False
            copied = os.pread(self._file, end - start, layout.PAGE + start % self._capacity)
            if self._bounds()[0] - start > self._capacity:
                continue
            is_short = len(copied) < end - start
            if is_short:  # the file is shorter than in its header
                end = min(head, ring_end)
            is_cut = not is_short and end < min(head, ring_end)
            parsed = self._parse(copied, out, is_cut=is_cut, highest=sequence + 1)
            self._position = start + parsed if is_cut else end
            if is_short:
                self._skipped_bytes += end - start - len(copied)
            if out:
                break
            num_bytes = READ_BYTES  # the next frame is larger, or damaged
        return out

    def seek(self, t_ns: int) -> bool:
        """Move to the newest keyframe at or before a time, else to the oldest one.

        Returns:
            Whether records of that time may exist: a writer restates its state every ten seconds.
        """
        claim, head, _ = self._bounds()
        lowest = max(0, claim - self._capacity + self._capacity // _LAP_MARGIN)
        keyframe, newest_ns = self.words()[5], None
        while lowest <= keyframe < head and (frame := self._keyframe_at(keyframe)) is not None:
            newest_ns = frame.t_ns if newest_ns is None else newest_ns
            self._position, self._expected = keyframe, None
            if frame.t_ns <= t_ns or frame.previous_position >= keyframe:
                break
            keyframe = frame.previous_position
        return newest_ns is None or newest_ns >= t_ns - _RESTATED_NS

    def close(self) -> None:
        """Close the file; safe to call twice."""
        handle, self._file = self._file, -1
        if handle >= 0:
            os.close(handle)

    def reopen(self, other: RingReader) -> None:
        """Continue at this reader's position with the file that another reader has opened."""
        self.close()
        self._file, other._file = other._file, -1

    def _bounds(self) -> tuple[int, int, int]:
        """Return claim, head and sequence, made consistent: a damaged word may hold any value."""
        claim, head, sequence, *_ = self.words()
        head &= ~7
        if head > claim:
            head = claim  # or the writer stored both during the read
        elif claim - head > self._capacity:
            claim = head
        return claim, head, sequence

    def _parse(self, copied: bytes, out: list[Frame | Loss], *, is_cut: bool, highest: int) -> int:
        """Append the whole frames in `copied` and return the offset of their end."""
        offset = 0
        room = len(copied)
        while offset + _FRAME_BYTES <= room:
            length, code, flags, crc, sequence = _FRAME.unpack_from(copied, offset)
            after = offset + ((_FRAME_BYTES + length + 7) & ~7)
            if code == layout.FILLER and crc == sequence == 0 and after >= room and not is_cut:
                return room
            if after > room and is_cut and length <= layout.MAX_PAYLOAD_BYTES:
                return offset  # the copy ends inside this frame: the next one begins with it
            payload = copied[offset + _FRAME_BYTES : offset + _FRAME_BYTES + length]
            is_whole = after <= room and sequence > 0  # otherwise zeros would pass the checksum
            if not is_whole or crc != layout.checksum(code, flags, sequence, payload):
                found = self._next_whole(copied, offset + 8, highest)
                if found < 0:
                    found = max(offset + 8, room - _LARGEST_FRAME_BYTES) if is_cut else room
                self._skipped_bytes += found - offset
                if is_cut and found + _LARGEST_FRAME_BYTES >= room:
                    return found
                offset = found
                continue
            if sequence == self._expected:  # the usual case
                self._expected = sequence + 1
                self._skipped_bytes = 0
                self._reason = "damaged"
                out.append(_frame(Frame, (sequence, code, payload)))
            else:
                self._accept(Frame(sequence, code, payload), out)
            offset = after
        return offset if is_cut else room

    def _read_beyond(self, out: list[Frame | Loss], claim: int, sequence: int, most: int) -> None:
        """Append the whole frames beyond the published head, about `most` bytes."""
        first, capacity = self._position, self._capacity
        end = min(claim, (first // capacity + 1) * capacity)
        needed, num_bytes = 1, min(_TAIL_BYTES, most)
        while needed and self._position - first < most and self._position + needed <= end:
            start = self._position
            num_bytes = min(max(needed, num_bytes), end - start)
            copied = os.pread(self._file, num_bytes, layout.PAGE + start % capacity)
            if len(copied) < num_bytes or self._bounds()[0] - start > capacity:
                return
            needed = self._parse_beyond(copied, out, max(sequence + 1, self._expected or 0))
            num_bytes = _READ_ON_BYTES

    def _parse_beyond(self, copied: bytes, out: list[Frame | Loss], lowest: int) -> int:
        """Append whole frames numbered from `lowest` on, and move past them.

        Returns:
            The least number of bytes that the next frame needs; 0 if there is none.
        """
        offset, room = 0, len(copied)
        needed = _FRAME_BYTES
        while offset + _FRAME_BYTES <= room:
            length, code, flags, crc, number = _FRAME.unpack_from(copied, offset)
            end = offset + _FRAME_BYTES + length
            if number < lowest or length > layout.MAX_PAYLOAD_BYTES:
                needed = 0
                break
            if end > room:
                needed = _FRAME_BYTES + length
                break
            payload = copied[offset + _FRAME_BYTES : end]
            if crc != layout.checksum(code, flags, number, payload):
                needed = 0
                break
            self._accept(Frame(number, code, payload), out)
            lowest, offset = number + 1, (end + 7) & ~7
        if offset:
            self._position += offset
            self._is_beyond = True
        return needed

    def _accept(self, frame: Frame, out: list[Frame | Loss]) -> None:
        """Append a whole frame, preceded by the loss between it and the last one."""
        expected = self._expected
        if expected is not None:
            if frame.sequence < expected:
                return  # seen already
            if frame.sequence > expected:
                out.append(Loss(frame.sequence - expected, self._reason))
        self._expected = frame.sequence + 1
        self._skipped_bytes = 0
        self._reason = "damaged"
        out.append(frame)

    def _note_tail(self, out: list[Frame | Loss], head: int, sequence: int) -> None:
        """Append the loss at the head if no whole frame shows its size.

        The header states it, unless it changed in between. Its number is bounded by the frames that
        fit into the skipped bytes.
        """
        if not self._skipped_bytes or self._expected is None or self._bounds()[1] != head:
            return
        num_frames = sequence + 1 - self._expected
        if 0 < num_frames <= self._skipped_bytes // _FRAME_BYTES:
            out.append(Loss(num_frames, self._reason))
            self._expected = sequence + 1
            self._reason = "damaged"
        self._skipped_bytes = 0

    def _next_whole(self, copied: bytes, offset: int, highest: int) -> int:
        """Return the offset of the next intact frame after a damaged one, -1 if there is none."""
        lowest = self._expected or 1
        if highest < lowest:
            highest = layout.NO_KEYFRAME  # the header's own number is damaged
        num_checked = 0
        # Zeros of a truncated and repaired file are skipped a hundred times faster than frames.
        while copied.startswith(_ZEROS, offset):
            offset += len(_ZEROS) - _FRAME_BYTES
        # A frame is aligned to 8 bytes and its number is at offset 12: from byte 4 on, the numbers
        # are whole words. Testing them rejects most garbage ten times faster than unpacking does.
        words = memoryview(copied)[4 : 4 + (len(copied) - 4 & ~7)].cast("Q")
        first = offset // 8 + 1
        for at, sequence in enumerate(words[first:], first):
            if not lowest <= sequence <= highest:
                continue
            start = 8 * (at - 1)
            length, code, flags, crc, _ = _FRAME.unpack_from(copied, start)
            end = start + _FRAME_BYTES + length
            if code == layout.FILLER or length > layout.MAX_PAYLOAD_BYTES or end > len(copied):
                continue
            if crc == layout.checksum(code, flags, sequence, copied[start + _FRAME_BYTES : end]):
                return start
            num_checked += length
            if num_checked > _MOST_CHECKED * len(copied):
                break  # content made to waste time
        return -1

    def _oldest(self, claim: int, head: int) -> int:
        """Return the first readable position: the front, or the oldest keyframe not overwritten."""
        if claim <= self._capacity:
            if self._expected is None:
                self._expected = 1
            return 0
        lowest = claim - self._capacity + self._capacity // _LAP_MARGIN
        found, keyframe = head, self.words()[5]
        while lowest <= keyframe < found:
            frame = self._keyframe_at(keyframe)
            if frame is None:
                break
            found = keyframe
            keyframe = frame.previous_position
        return found

    def _keyframe_at(self, position: int) -> Keyframe | None:
        raw = os.pread(self._file, 4096, layout.PAGE + position % self._capacity)
        if len(raw) < _FRAME_BYTES:
            return None
        length, code, flags, crc, sequence = _FRAME.unpack_from(raw)
        payload = raw[_FRAME_BYTES : _FRAME_BYTES + length]
        if code != Keyframe.CODE or crc != layout.checksum(code, flags, sequence, payload):
            return None
        try:
            record = decode(code, payload)
        except UnknownRecord:
            return None
        return record if isinstance(record, Keyframe) else None

    def _resume(self, oldest: int) -> None:
        """Move a lapped reader to a keyframe; the next frame's number gives the loss between."""
        position = max(oldest, self._position)
        self._skipped_bytes += position - self._position
        self._reason = "lapped"
        self._position = position
