"""The ring writer: one preallocated file, one writer, one system call per record.

A record is one `pwrite` of its frame. The header's words are written every 100 ms (`beat`), at each
keyframe and before old frames are overwritten; readers look for frames beyond the published head.
The file is not mapped: truncating a mapped file (`: > file`, logrotate's copytruncate) kills every
process that maps it with SIGBUS. A failed write costs only its record, and `inspect` repairs a
truncated file.

While the file is open, its writer holds an `flock` on it, which SIGKILL releases: a stopped process
cannot be mistaken for a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path

from inferscope.errors import RingUnavailable
from inferscope.host_signals import pass_on, suppressed
from inferscope.ring import layout
from inferscope.ring.file_write import (
    IN_MEMORY,
    LOCAL,
    REMOTE,
    PWrite,
    file_system,
    pwrite,
    releasing_pwrite,
    until_slow,
)
from inferscope.ring.layout import Identity

_crc32 = zlib.crc32
_PAGE, _FRAME_BYTES = layout.PAGE, layout.FRAME_BYTES
_FRAME = layout.FRAME
_pack_frame = _FRAME.pack
_ALL_WORDS = struct.Struct("<6Q")
_NO_CLAIM = struct.Struct("<4Q")
"""Head, sequence, heartbeat, pending: the words written outside the writer's thread."""
_NOT_ENOUGH_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_CLOSE_PATIENCE_S = 0.2
_MOST_BEATS = 4
_CLAIMS_PER_LAP = 64
"""Number of claims per lap: each announces this fraction of the ring ahead of the head."""
_HIGH_HANDLE = 512
"""Lowest preferred descriptor. A host that closes our descriptor by mistake gets the lowest free
number for its next file, which must not receive our records."""
_REPAIR_BYTES = 1 << 20
"""Bytes allocated per call in a repair: the file system may block the writer's thread meanwhile."""


class NoRoom(RingUnavailable):
    """Too little space for a ring of this capacity; a smaller one may fit."""


class RingWriter:
    """A writer of frames into a ring file. Not thread-safe: the probe's lock guards it.

    Attributes:
        path: the file.
        capacity: bytes for frames.
        largest_bytes: largest size of a payload.
        sequence: number of frames so far, including refused and failed ones but not fillers.
        last_keyframe: position of the newest keyframe, -1 before the first.
        bytes_since_keyframe: bytes since; a keyframe is due before they reach the capacity.
        num_failed: number of frames that could not be written.
        failure: reason of the last failure; empty while writes succeed.
        is_remote: whether the file system is a network or FUSE one, where writes may be slow.
    """

    def __init__(
        self, path: Path, identity: Identity, *, capacity: int, group_id: int | None = None
    ) -> None:
        """Create the ring file in an existing folder; `group_id` may read it too.

        Raises:
            FileExistsError: another writer has this name.
            NoRoom: there is too little space for this capacity.
            RingUnavailable: the file cannot be created; the message has the reason.
        """
        self.path = path
        self.capacity = capacity = max(layout.MIN_CAPACITY, capacity & ~4095)
        room = capacity // 4 - layout.FRAME_BYTES - 8
        self.largest_bytes = min(layout.MAX_PAYLOAD_BYTES, room)
        self.sequence = 0
        self.last_keyframe = -1
        self.bytes_since_keyframe = 0
        self.num_failed = 0
        self.failure = ""
        self._head = 0
        self._claim = 0
        self._heartbeat = self._pending = 0
        self._stride = capacity // _CLAIMS_PER_LAP
        self._repaired_at: int | None = None
        self._logged: set[str] = set()
        self._has_failed = False
        self._unfinished: tuple[int, bytes, int] | None = None
        """Position, frame and flags of the frame that `write` is writing."""
        self._header = header = bytearray(layout.pack_header(identity, capacity))
        header[layout.CLAIM : layout.WORDS_END] = self._words(0)
        # Created under another name and renamed, so that no reader sees a half-made ring. The
        # holder of the temporary name also owns the final one: two writers cannot both find it
        # free.
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
            with suppress(OSError):  # without locks, the heartbeat alone decides
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if group_id is not None:
                os.fchown(handle, -1, group_id)
                os.fchmod(handle, 0o640)
            _allocate(handle, layout.PAGE + capacity)
            os.pwrite(handle, header, 0)
            os.rename(partial, path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            os.close(handle)
            if isinstance(error, OSError) and not isinstance(error, FileExistsError):
                raise _cannot_make(path, error) from error
            raise
        kind = file_system(handle)
        self.is_remote = kind in REMOTE
        self._pwrite: PWrite = releasing_pwrite
        if kind in IN_MEMORY:
            self._pwrite = pwrite
        elif kind in LOCAL:
            self._pwrite = until_slow()
        self._is_closing = False
        self._in_use = threading.RLock()
        """Lock of all uses of the descriptor except `write`, which the probe's lock guards.

        A finalizer that runs within a use may close the writer; that use then closes the file."""
        self._unclosed = -1
        self._file = with_high_number(handle)
        status = os.fstat(self._file)
        self._inode = status.st_dev, status.st_ino

    def write(self, code: int, payload: bytes, *, flags: int = 0) -> bool:
        """Append a frame, overwriting the oldest ones.

        Returns:
            Whether the frame was written. Without that (the payload exceeds `largest_bytes`, or the
            file cannot be written) its sequence number is used up, so that readers count the loss.
        """
        if self._unfinished is not None:
            self._finish(*self._unfinished)
        length = len(payload)
        if length > self.largest_bytes:
            self.sequence += 1
            return False
        size = (_FRAME_BYTES + length + 7) & ~7
        position, capacity = self._head, self.capacity
        place = position % capacity
        if size > capacity - place:
            if not self._fill(position, capacity - place):
                return self._fail()
            position, place = self._head, 0
        if position + size > self._claim and not self._claim_to(position + size):
            return self._fail()
        sequence = self.sequence + 1
        # `layout.checksum`, inlined: the call costs 0.2 of 1.2 µs, and more on a cache miss.
        number = sequence * 2_654_435_761 ^ (sequence >> 32) * 40_503
        seed = (number ^ code << 16 ^ flags ^ length << 7) & 0xFFFFFFFF
        frame = _pack_frame(length, code, flags, _crc32(payload, seed), sequence) + payload
        self._unfinished = position, frame, flags
        if self._pwrite(self._file, frame, _FRAME_BYTES + length, _PAGE + place) != len(frame) and (
            not self._put_again(frame, _PAGE + place)
        ):
            return self._fail()
        # In this order: `beat`, on another thread, reads them in reverse.
        self._head = position + size
        self.sequence = sequence
        if self.failure:
            self.failure = ""
        if flags & layout.STARTS_KEYFRAME:
            self.last_keyframe = position
            self.bytes_since_keyframe = 0
            self._publish()
        else:
            self.bytes_since_keyframe += size
        self._unfinished = None
        return True

    @property
    def next_sequence(self) -> int:
        """Return the number of the next frame, after completion of an interrupted one."""
        return self.sequence + (1 if self._unfinished is None else 2)

    @property
    def wants_keyframe(self) -> bool:
        """Return whether a keyframe is due, after enough bytes or a repair."""
        return self.bytes_since_keyframe * 4 > self.capacity

    def beat(self, now_ns: int) -> None:
        """Write the heartbeat time and the words left by `write`; 0 marks the ring closed."""
        is_last, heartbeat_ns = now_ns <= 0, max(0, now_ns)
        if not self._in_use.acquire(timeout=_CLOSE_PATIENCE_S if is_last else 0):
            return
        try:
            if self._is_closing:
                return
            self._is_closing, self._heartbeat = is_last, heartbeat_ns
            handle, written = self._file, None
            # Repeated if another thread, or a finalizer of this one, published newer words between
            # their reading and this write, which has overwritten them.
            for _ in range(_MOST_BEATS):  # bounded: a network disk is slower than the engine
                words = self._beating_words()
                if words == written:
                    break
                releasing_pwrite(handle, _NO_CLAIM.pack(*words), _NO_CLAIM.size, layout.HEAD)
                written = words
        finally:
            self._leave()

    def _beating_words(self) -> tuple[int, int, int, int]:
        sequence = self.sequence  # first: so that the head covers it
        return self._head, sequence, self._heartbeat, self._pending

    def set_pending(self, start_ns: int) -> None:
        """Publish the start of the oldest step without a span; 0 if there is none.

        The next `beat` publishes a 0: until then readers wait for frames they already have.
        """
        if start_ns == self._pending:
            return
        self._pending = start_ns = start_ns if start_ns > 0 else 0
        if start_ns:
            word, lock = layout.WORD.pack(start_ns), self._in_use
            if lock._is_owned():  # type: ignore[attr-defined]
                # An interrupted outer use owns the lock and closes the file at its end.
                self._pwrite(self._file, word, layout.WORD.size, layout.PENDING)
                return
            # A signal handler may raise directly after any call, so the acquisition cannot be
            # recorded reliably. Its result is not needed: only the owner can release the lock.
            try:
                # The log's lock is not held: `close` leaves the descriptor to this use.
                lock.acquire(blocking=False)
                self._pwrite(self._file, word, layout.WORD.size, layout.PENDING)
            finally:
                try:
                    lock.release()
                except RuntimeError as error:  # another thread owns it
                    pass_on(error)
                if self._unclosed >= 0 and lock.acquire(blocking=False):
                    self._leave()

    def inspect(self) -> str:
        """Repair a truncated or overwritten file; called on the probe's own thread.

        A repair makes a keyframe due, through `bytes_since_keyframe`.

        Returns:
            A line for the log if the file was changed, else an empty string.

        Raises:
            RingUnavailable: the descriptor no longer refers to the ring, so it cannot be written.
        """
        if self._file < 0 or not self._in_use.acquire(blocking=False):
            return ""
        try:
            line = self._inspected()
            return line if self._unclosed < 0 else ""  # a finalizer closed it
        finally:
            self._leave()

    def _inspected(self) -> str:
        handle = self._file
        if not self._is_ours(handle):
            self._file = -1  # the number may refer to another file
            raise RingUnavailable(
                f"its descriptor was closed from outside: nothing more is recorded in {self.path}"
            )
        try:
            status = os.fstat(handle)
            is_repaired = self._repair(status.st_size)
        except OSError as error:
            return self._once(f"{self.path} cannot be inspected or repaired: {error}")
        if self._repaired_at == self.last_keyframe:
            self.bytes_since_keyframe = self.capacity
        else:
            self._repaired_at = None
        if is_repaired:
            return self._once(
                f"{self.path} was shortened or overwritten from outside. It is repaired; what it "
                "held is lost."
            )
        if not status.st_nlink:
            return self._once(
                f"{self.path} was deleted: nothing can open it any more, until a restart"
            )
        return self._how_writing_goes()

    def forked(self) -> None:
        """Prepare the writer in a forked child for closing: no other thread of the child uses it.

        A thread of the parent may have held the lock, and the child lacks that thread.
        """
        self._in_use = threading.RLock()

    def close(self) -> None:
        """Close the file, which stays as the flight recorder. Safe to call twice."""
        if self._file < 0:
            return
        self._unclosed, self._file = self._file, -1
        # Another thread or this one may be about to use the descriptor, whose number the process
        # gives to its next opened file. That use then closes it.
        is_within = self._in_use._is_owned()  # type: ignore[attr-defined]
        if not is_within and self._in_use.acquire(timeout=_CLOSE_PATIENCE_S):
            self._leave()

    def _leave(self) -> None:
        """End a use of the descriptor; close it if `close` was called meanwhile."""
        handle, self._unclosed = self._unclosed, -1
        try:
            with suppressed(OSError):  # an error of the file system; the number is free
                if handle >= 0 and self._is_ours(handle):
                    os.close(handle)
        finally:
            self._in_use.release()

    def _is_ours(self, handle: int) -> bool:
        """Return whether a descriptor is still the ring's; a host may close and reuse it."""
        try:
            status = os.fstat(handle)
        except OSError as error:
            pass_on(error)
            return error.errno != errno.EBADF
        return (status.st_dev, status.st_ino) == self._inode

    def _words(self, claim: int) -> bytes:
        """Return the header's current words."""
        keyframe = layout.NO_KEYFRAME if self.last_keyframe < 0 else self.last_keyframe
        sequence = self.sequence
        return _ALL_WORDS.pack(
            claim, self._head, sequence, self._heartbeat, self._pending, keyframe
        )

    def _put(self, content: bytes, offset: int) -> bool:
        """Write content at an offset; return whether all of it was written."""
        done = self._pwrite(self._file, content, len(content), offset)
        return done == len(content) or self._put_again(content, offset)

    def _put_again(self, content: bytes, offset: int) -> bool:
        """Write again with `os.pwrite`, which reports the reason if the write fails again."""
        try:
            if os.pwrite(self._file, content, offset) == len(content):
                return True
            self.failure = os.strerror(errno.ENOSPC)
        except OSError as error:
            pass_on(error)
            self.failure = error.strerror or str(error)
        return False

    def _publish(self) -> bool:
        """Write all words of the header."""
        return self._put(self._words(self._claim), layout.CLAIM)

    def _claim_to(self, position: int) -> bool:
        """Announce that frames will be overwritten up to one stride beyond a position."""
        claim = position + self._stride
        if position <= self.capacity < claim:
            claim = self.capacity  # nothing is overwritten in the first lap
        if not self._put(self._words(claim), layout.CLAIM):
            return False
        self._claim = claim  # only now: `_repair` takes a word below it for damage
        return True

    def _fill(self, position: int, room: int) -> bool:
        """Fill the rest of the file; a reader that finds less than a header also skips it."""
        if position + room > self._claim and not self._claim_to(position + room):
            return False
        if room >= _FRAME_BYTES:
            filler = _pack_frame(room - _FRAME_BYTES, layout.FILLER, 0, 0, 0)
            if not self._put(filler, _PAGE + position % self.capacity):
                return False
        self._head = position + room
        return self._publish()

    def _finish(self, position: int, frame: bytes, flags: int) -> None:
        """Rewrite a frame whose write an exception of a signal handler has interrupted.

        It may be in the file, and a reader that looks beyond the head may have read it: neither its
        number nor its place can be reused.
        """
        if not self._put(frame, _PAGE + position % self.capacity):
            self.num_failed += 1
        size = len(frame) + 7 & ~7
        self._head = position + size
        self.sequence = _FRAME.unpack_from(frame)[-1]
        self.bytes_since_keyframe += size
        if flags & layout.STARTS_KEYFRAME:
            self.last_keyframe, self.bytes_since_keyframe = position, 0
            self._publish()
        self._unfinished = None

    def _fail(self) -> bool:
        """Count a frame that could not be written."""
        self._unfinished = None
        self.sequence += 1
        self.num_failed += 1
        return False

    def _repair(self, num_bytes: int) -> bool:
        """Restore damaged length, header and words; return whether anything was restored."""
        claim, whole_bytes = self._claim, _PAGE + self.capacity
        found = os.pread(self._file, _PAGE, 0)
        is_header = (
            len(found) == _PAGE
            and found[: layout.CLAIM] == self._header[: layout.CLAIM]
            and found[layout.WORDS_END :] == self._header[layout.WORDS_END :]
        )
        # The writer may be ahead of the claim read above. `beat` updates the other words.
        if (
            num_bytes >= whole_bytes
            and is_header
            and layout.WORD.unpack_from(found, layout.CLAIM)[0] >= claim
        ):
            return False
        os.pwrite(self._file, self._header[: layout.CLAIM], 0)
        os.pwrite(self._file, self._header[layout.WORDS_END :], layout.WORDS_END)
        os.pwrite(self._file, self._words(self._claim), layout.CLAIM)
        self._repaired_at = self.last_keyframe
        os.ftruncate(self._file, whole_bytes)  # it is never longer: no frame is written beyond it
        for at in range(0, whole_bytes, _REPAIR_BYTES):
            _preallocate(self._file, at, min(_REPAIR_BYTES, whole_bytes - at))
        return True

    def _once(self, line: str) -> str:
        """Return a log line the first time, then an empty string."""
        if line in self._logged:
            return ""
        self._logged.add(line)
        return line

    def _how_writing_goes(self) -> str:
        """Return a line when writes begin to fail and when they succeed again, each once.

        On a nearly full disk that alternates with every record. Reports count all failures.
        """
        failure = self.failure
        if failure:
            self._has_failed = True
            return self._once(
                f"cannot write {self.path}: {failure}. Records are left out until that changes."
            )
        return self._once(f"{self.path} can be written again") if self._has_failed else ""


def with_high_number(handle: int) -> int:
    """Return the same open file under a high number, at least under the highest free one."""
    for lowest in range(_HIGH_HANDLE, handle, -1):  # lower if the process has a small limit
        with suppress(OSError):
            high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, lowest)
            os.close(handle)
            return high
    return handle


def _allocate(handle: int, num_bytes: int) -> None:
    if not _preallocate(handle, 0, num_bytes):
        chunk = bytes(1 << 20)
        for at in range(0, num_bytes, len(chunk)):
            os.pwrite(handle, chunk[: num_bytes - at], at)


def _preallocate(handle: int, offset: int, num_bytes: int) -> bool:
    """Reserve blocks without changing their content; return whether the file system supports it."""
    try:
        os.posix_fallocate(handle, offset, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        return False
    return True


def _cannot_make(path: Path, error: OSError) -> RingUnavailable:
    if error.errno in _NOT_ENOUGH_ROOM:
        return NoRoom(
            f"cannot make the ring {path}: no space left. Free some, set a smaller "
            "INFERSCOPE_RING_MB, or point INFERSCOPE_DIR elsewhere."
        )
    return RingUnavailable(
        f"cannot make the ring {path}: {error.strerror}. Set INFERSCOPE_DIR to a writable folder."
    )
