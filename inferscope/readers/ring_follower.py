"""Follower of rings: their records from the oldest keyframe to now, in fold order.

The watermark limits how far the fold may go: up to now, and not beyond the oldest step whose span
is pending, but never more than half a second behind. A dead ring does not hold it back.

Records that are not folded yet stay in their ring. Each poll reads a bounded amount of history or
backlog, from the ring that is furthest behind.
"""

from __future__ import annotations

import fcntl
import heapq
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from inferscope.calibration import cost_tables
from inferscope.errors import UnreadableFile
from inferscope.fold import READER
from inferscope.probe import Clock
from inferscope.readers.calibrated import Calibrated
from inferscope.readers.known_rings import KnownRings
from inferscope.readers.merge import RECORD_BYTES, Item, Merger
from inferscope.readers.shifting import shifted
from inferscope.records import (
    FORMAT_VERSION,
    SAMPLER_ROLE,
    Record,
    RingOpened,
    UnknownRecord,
    decode,
)
from inferscope.records import encode as encode_record
from inferscope.ring import (
    ALIVE_NS,
    Loss,
    RingReader,
    boot_id,
    ended_skew_ns,
    read_here,
    running_skew_ns,
)

GUARD_NS = 5_000_000
"""Longest time between stamping a record and storing it."""
LONGEST_WAIT_NS = 500_000_000
RESCAN_NS = 1_000_000_000
AFTER_THE_END_NS = 6_000_000_000
"""Time that Ticks continue after the last record of dead rings, so that the fold ends them."""
RESTATE_NS = 10_000_000_000
"""Interval between lists of the open rings: a recording can be read from any list on."""
RETIRE_NS = 60_000_000_000
"""Time without a heartbeat after which the ring of a dead process is closed, in a directory whose
rings come and go."""
_END_OF_TIME_NS = 1 << 62
MOST_BYTES = 16 << 20
"""Most bytes of unfolded records after a poll: history is read in chunks, so that a screen can show
the first ones early. Decoded records take about five times as much memory."""
_MOST_COPY_BYTES, _LEAST_COPY_BYTES = 1 << 18, 1 << 14
"""Limits of the bytes read from one ring at once: half of the above, divided by all rings."""


class RingFollower:
    """Reader of a changing set of rings.

    Attributes:
        num_unknown: frames with an unknown type or an impossible time.
        notes: lines about the files to show to the user.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        clock: Clock,
        *,
        since_ns: int | None = None,
        stays: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Prepare the follower; the first `poll` opens the rings.

        Args:
            find: function that lists the rings, called every second.
            clock: clock that limits how far the fold may go.
            since_ns: time from which to read, starting at the keyframe before it; None for all.
            stays: whether time continues after all rings are dead, because others may come.
            most_bytes: most encoded bytes of records in memory at once, plus one chunk.
        """
        self._calibrated = Calibrated(cost_tables)
        self._find = find
        self._clock = clock
        self._since_ns = since_ns
        self._stays = stays
        self._most_bytes = most_bytes
        self._merger = Merger()
        self._readers: dict[int, RingReader] = {}
        self._closed: dict[Path, tuple[int, RingReader]] = {}
        """Unreadable rings, and rings of processes that seemed dead: they may continue."""
        self._noted: set[str] = set()
        self._num_rings = 0
        self._known = KnownRings()
        self._samplers: list[RingReader] = []
        """Sampler rings to follow once an engine runs in their time."""
        self._locked: set[int] = set()
        """Rings that were locked by their writer: once unlocked, that process has ended."""
        self._last_ns: dict[int, int] = {}
        self._rescan_ns = 0
        self._restate_ns: int | None = None
        self._has_ended = False
        self._has_live_writer = True
        self._has_more = False
        self.num_unknown = 0
        self.notes: list[str] = []

    @property
    def has_ended(self) -> bool:
        """Return whether all rings are dead and read to their end."""
        return self._has_ended

    @property
    def has_live_writer(self) -> bool:
        """Return whether an engine process was running at the last poll."""
        return self._has_live_writer

    @property
    def has_writer(self) -> bool:
        """Return whether an engine process is running now, or none has been found yet.

        It is False as soon as the last process is killed; `has_ended` waits for a successor.
        """
        if self._has_ended or not self._num_rings:
            return not self._has_ended
        return any(
            self._is_written(number, reader)
            for number, reader in list(self._readers.items())
            if not _is_sampler(reader)
        )

    @property
    def has_more(self) -> bool:
        """Return whether the last poll left records in the rings."""
        return self._has_more

    def request_rescan(self) -> None:
        """Search for rings at the next poll, instead of within a second."""
        self._rescan_ns = 0

    def poll(self) -> list[Item]:
        """Return the records that became due since the last call."""
        if self._has_ended:
            return []
        now_ns = self._clock.monotonic_ns()
        out: list[Item] = []
        if now_ns >= self._rescan_ns:
            self._rescan_ns = now_ns + RESCAN_NS
            self._discover(out)
        until_ns = now_ns - GUARD_NS
        alive = False
        for number, reader in list(self._readers.items()):
            heartbeat_ns, pending_ns = self._beats(number)
            is_this_boot = reader.identity.boot_id == boot_id()
            skew_ns = reader.skew_ns
            is_alive = is_this_boot and now_ns - heartbeat_ns - skew_ns < ALIVE_NS
            alive |= is_alive and not _is_sampler(reader)
            if is_alive and pending_ns:
                pending_ns += skew_ns
                until_ns = min(until_ns, max(pending_ns - 1, now_ns - LONGEST_WAIT_NS))
        read_ns = self._read_on()
        self._has_more = has_more = read_ns is not None
        if read_ns is not None:
            until_ns = min(until_ns, read_ns)
        # A sampler outlives the engines that it samples for.
        self._has_live_writer = alive or any(
            is_held(reader) for reader in self._readers.values() if not _is_sampler(reader)
        )
        if self._has_live_writer or has_more or self._stays:
            out += self._merger.take(until_ns)
            if self._stays and not has_more:
                self._retire(now_ns)
        elif self._num_rings:
            out += self._merger.take(None)
            last_ns = max(self._last_ns.values(), default=0)
            out += self._merger.take(last_ns + AFTER_THE_END_NS)
            self._has_ended = True
        self._restate(out)
        return self._calibrated.with_tables(out)

    def close(self) -> None:
        """Close all rings; safe to call twice."""
        readers, self._readers = self._readers, {}
        samplers, self._samplers = self._samplers, []
        for reader in (*readers.values(), *samplers):
            reader.close()

    def _discover(self, out: list[Item]) -> None:
        found = []
        is_open = {reader.path for reader in (*self._readers.values(), *self._samplers)}
        now_ns = self._clock.monotonic_ns()
        files = self._known.unread(self._paths(), now_ns, is_in_use=lambda path, _: path in is_open)
        for path in self._known.forget(now_ns):
            self._closed.pop(path, None)
        for file in files:
            try:
                reader = RingReader(file[0])
            except UnreadableFile as error:
                self._note(str(error))
                continue
            is_new = self._known.is_new(file, reader.identity)
            if self._goes_on(reader):
                continue
            if is_new:
                found.append(reader)
            else:
                reader.close()
        self._set_skews(found)
        new = []
        for reader in found:
            if _is_sampler(reader):
                self._samplers.append(reader)
            elif self._since_ns is None or _reaches(reader, self._since_ns - reader.skew_ns):
                new.append(reader)
            else:
                reader.close()
        new += self._samplers_beside(new)
        for reader in sorted(new, key=lambda reader: (_start_ns(reader), str(reader.path))):
            self._num_rings = number = self._num_rings + 1
            self._readers[number] = reader
            self._last_ns[number] = _start_ns(reader)
            if reader.format_version > FORMAT_VERSION:
                self.notes.append(
                    f"{reader.path.name} was written by a newer version (format "
                    f"{reader.format_version}); records of unknown types are skipped"
                )
            out.append(_opened(number, reader))

    def _goes_on(self, opened: RingReader) -> bool:
        """Resume a ring that was followed before; return whether it was."""
        number, reader = self._closed.pop(opened.path, (0, opened))
        if not number or reader.identity != opened.identity:
            return False
        reader.reopen(opened)
        self._readers[number] = reader
        return True

    def _set_skews(self, found: list[RingReader]) -> None:
        """Set the skew of rings written under another monotonic clock."""
        here = read_here(boot_id(), self._clock.monotonic_ns, self._clock.real_ns)
        undecided = []
        for reader in found:
            try:
                skew_ns = running_skew_ns(reader, here)
            except OSError:  # the next read of the ring reports it
                continue
            if skew_ns is None:
                undecided.append(reader)
            else:
                reader.skew_ns = skew_ns
        # Steps use the core's clock; it is the reference if all processes have ended.
        undecided.sort(key=lambda reader: reader.identity.role != "core")
        decided = [one for one in (*self._readers.values(), *found) if one not in undecided]
        for reader in undecided:
            engine_id = reader.identity.engine_id
            same = [one for one in decided if one.identity.engine_id == engine_id]
            with suppress(OSError):
                reader.skew_ns = ended_skew_ns(reader, same)
            decided.append(reader)

    def _samplers_beside(self, new: list[RingReader]) -> list[RingReader]:
        """Return the sampler rings that overlap an engine's time, positioned at its start."""
        engines = [one for one in (*self._readers.values(), *new) if not _is_sampler(one)]
        if not engines:
            return []
        starts_ns = {one.identity.boot_id: _start_ns(one) for one in engines}
        for one in engines:
            boot = one.identity.boot_id
            starts_ns[boot] = min(starts_ns[boot], _start_ns(one))
        samplers, self._samplers = self._samplers, []
        found = []
        for sampler in samplers:
            start_ns = starts_ns.get(sampler.identity.boot_id)
            since_ns = max(start_ns or 0, self._since_ns or 0) - sampler.skew_ns
            if start_ns is not None and _reaches(sampler, since_ns):
                found.append(sampler)
            else:
                sampler.close()
        return found

    def _is_written(self, number: int, reader: RingReader) -> bool:
        """Return whether a ring's process runs: by its lock, or by heartbeat without locks."""
        if is_held(reader):
            self._locked.add(number)
            return True
        if number in self._locked or reader.identity.boot_id != boot_id():
            return False
        return self._clock.monotonic_ns() - self._beats(number)[0] - reader.skew_ns < ALIVE_NS

    def _retire(self, now_ns: int) -> None:
        """Close the rings of processes without a heartbeat for `RETIRE_NS`."""
        for number, reader in list(self._readers.items()):
            if now_ns - self._beats(number)[0] - reader.skew_ns > RETIRE_NS and not is_held(reader):
                self._close(number)

    def _beats(self, number: int) -> tuple[int, int]:
        """Return a ring's heartbeat and pending times; drop the ring if they are unreadable."""
        try:
            return self._readers[number].words()[3:5]
        except OSError as error:
            self._drop(number, error)
            return 0, 0

    def _drop(self, number: int, error: OSError) -> None:
        """Close a ring that is unreadable now: a disk or network error."""
        path = self._readers[number].path
        self._close(number)
        self._known.fail(path)
        self._note(f"{path} cannot be read: {error.strerror}")

    def _close(self, number: int) -> None:
        reader = self._readers.pop(number, None)
        if reader is not None:
            reader.close()
            self._closed[reader.path] = number, reader

    def _note(self, line: str) -> None:
        """Add a line to the notes, if it is new."""
        if line not in self._noted:
            self._noted.add(line)
            self.notes.append(line)

    def _restate(self, out: list[Item]) -> None:
        """Append RingOpened records of all open rings every `RESTATE_NS`."""
        if not out:
            return
        t_ns = out[-1].t_ns
        if self._restate_ns is not None and t_ns >= self._restate_ns:
            for number, reader in self._readers.items():
                out.append(replace(_opened(number, reader), t_ns=t_ns))
        if self._restate_ns is None or t_ns >= self._restate_ns:
            self._restate_ns = t_ns + RESTATE_NS

    def _paths(self) -> list[Path]:
        try:
            return list(self._find())
        except OSError:  # the directory is being removed
            return []

    def _future_ns(self, reader: RingReader) -> int:
        """Return the time from which a stamp is invalid: it would block its ring until then."""
        if reader.identity.boot_id != boot_id():
            return _END_OF_TIME_NS
        return self._clock.monotonic_ns() + LONGEST_WAIT_NS + 1

    def _read_on(self) -> int | None:
        """Read the rings that are furthest behind, up to their heads or the limit of bytes.

        Returns:
            time through which all rings are read; None if they are read to their heads.
        """
        behind = [(self._last_ns[number], number) for number in self._readers]
        heapq.heapify(behind)
        left = self._most_bytes - self._merger.num_bytes
        copy_bytes = self._most_bytes // (2 * len(behind)) if behind else 0
        copy_bytes = min(max(copy_bytes, _LEAST_COPY_BYTES), _MOST_COPY_BYTES)
        while behind:
            number = behind[0][1]
            num_bytes = self._read(number, copy_bytes)
            if not num_bytes:
                heapq.heappop(behind)
                continue
            heapq.heapreplace(behind, (self._last_ns[number], number))
            left -= num_bytes
            if left <= 0:
                return behind[0][0]
        return None

    def _read(self, number: int, copy_bytes: int) -> int:
        """Read a chunk of a ring; return its size in bytes, 0 at the head."""
        reader = self._readers[number]
        try:
            frames = reader.read(copy_bytes)
        except OSError as error:
            self._drop(number, error)
            return 0
        if not frames:
            return 0
        future_ns, last_ns = self._future_ns(reader), self._last_ns[number]
        add, num_bytes = self._merger.add, RECORD_BYTES * len(frames)
        skew_ns = reader.skew_ns
        for frame in frames:
            if isinstance(frame, Loss):
                self._merger.miss(number, frame.num_frames, frame.reason)
                continue
            sequence, code, payload = frame
            num_bytes += len(payload)
            try:
                record: Record = decode(code, payload)
            except UnknownRecord:
                self.num_unknown += 1
                continue
            if skew_ns:
                try:
                    record = shifted(record, skew_ns)
                    payload = encode_record(record)
                except OverflowError:  # the shifted time exceeds 64 bits
                    self.num_unknown += 1
                    continue
            t_ns = record.t_ns
            if not 0 <= t_ns < future_ns:
                self.num_unknown += 1
                continue
            if t_ns > last_ns:
                last_ns = t_ns
            add(number, sequence, record, payload)
        self._last_ns[number] = last_ns
        return num_bytes


def _reaches(reader: RingReader, since_ns: int) -> bool:
    """Position a reader at a time; return whether its ring has records from there on."""
    try:
        return reader.seek(since_ns)
    except OSError:
        return False


def is_held(reader: RingReader) -> bool:
    """Return whether the writer's process holds the ring's lock, even if it is stopped."""
    try:
        handle = os.open(reader.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    try:
        _, num_bytes, _, heartbeat_ns, *_ = reader.words()
    except OSError:
        return False
    return heartbeat_ns > 0 or not num_bytes  # else it has shut down


def _is_sampler(reader: RingReader) -> bool:
    return reader.identity.role == SAMPLER_ROLE


def _start_ns(reader: RingReader) -> int:
    return reader.identity.start_ns + reader.skew_ns


def _opened(number: int, reader: RingReader) -> Item:
    me, start_ns = reader.identity, _start_ns(reader)
    opened = RingOpened(
        start_ns,
        number,
        me.engine_id,
        me.role,
        me.rank,
        me.pid,
        me.host,
        me.boot_id,
        start_ns,
        me.start_real_ns,
        me.synthetic,
        reader.skew_ns,
    )
    return Item(start_ns, READER, 0, opened, encode_record(opened))
