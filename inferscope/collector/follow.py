"""Following rings: from their oldest keyframe to now, in fold order, behind a watermark.

The watermark is how far the fold may go: not beyond now, nor beyond the oldest step whose span is
still on its way, but never more than half a second behind. A dead ring holds nobody back.

What is not folded yet stays in its ring: of history, or of what a slow reader has not come to, each
poll takes a bounded piece, of the ring first that is furthest behind.
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
from inferscope.collector.calibrated import Calibrated, TablesOf
from inferscope.collector.fold import READER
from inferscope.collector.known_rings import KnownRings
from inferscope.collector.merge import RECORD_BYTES, Item, Merger
from inferscope.collector.shifting import shifted
from inferscope.errors import UnreadableFile
from inferscope.probe.clock import Clock
from inferscope.records import (
    FORMAT_VERSION,
    SAMPLER_ROLE,
    Record,
    RingOpened,
    UnknownRecord,
    decode,
)
from inferscope.records import encode as encode_record
from inferscope.ring.discovery import ALIVE_NS, boot_id
from inferscope.ring.reader import Loss, RingReader
from inferscope.ring.skew import ended_skew_ns, read_here, running_skew_ns

GUARD_NS = 5_000_000
"""Time a writer may take between stamping a record and storing it."""
LONGEST_WAIT_NS = 500_000_000
LOOK_AGAIN_NS = 1_000_000_000
AFTER_THE_END_NS = 6_000_000_000
"""Ticks after the last record of dead rings: long enough to decide that they are lost."""
RESTATE_NS = 10_000_000_000
"""Between statements of which rings there are: a recording can be read from any of them on."""
RETIRE_NS = 60_000_000_000
"""Without a heartbeat: where rings come and go, that of a dead process is not kept open longer."""
_END_OF_TIME_NS = 1 << 62
MOST_BYTES = 16 << 20
"""Of records read in a poll and left from those before: history comes in pieces, so that a screen
can show the first ones. Decoded they take some five times as much."""
_MOST_COPY_BYTES, _LEAST_COPY_BYTES = 1 << 18, 1 << 14
"""Of one ring at once: half of the above over all rings, within these."""


class RingFollower:
    """Reads a changing set of rings.

    Attributes:
        num_unknown: frames of types that this version does not know.
        notes: what the reader must say of the files.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        clock: Clock,
        *,
        since_ns: int | None = None,
        stays: bool = False,
        tables_of: TablesOf = cost_tables,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Prepare; the first `poll` opens the rings.

        Args:
            find: finds the rings, asked again every second.
            clock: says how far the fold may go.
            since_ns: how far back to read, to the keyframe before it; None for all there is.
            stays: time goes on when all rings are dead, for others may come.
            tables_of: what this host has measured for an engine of its own that does not tell it.
            most_bytes: of records in memory at once, before they are decoded; and a piece more.
        """
        self._calibrated = Calibrated(tables_of)
        self._find = find
        self._clock = clock
        self._since_ns = since_ns
        self._stays = stays
        self._most_bytes = most_bytes
        self._merger = Merger()
        self._readers: dict[int, RingReader] = {}
        self._closed: dict[Path, tuple[int, RingReader]] = {}
        """Rings that could not be read, or whose processes seemed dead: they may go on."""
        self._noted: set[str] = set()
        self._num_rings = 0
        self._known = KnownRings()
        self._samplers: list[RingReader] = []
        """Not followed yet: of what they hold only an engine's time is of interest."""
        self._locked: set[int] = set()
        """Rings that a writer's lock was seen on: without it, that process has ended."""
        self._last_ns: dict[int, int] = {}
        self._look_again_ns = 0
        self._restate_ns: int | None = None
        self._has_ended = False
        self._is_manned = True
        self._has_more = False
        self.num_unknown = 0
        self.notes: list[str] = []

    @property
    def has_ended(self) -> bool:
        """Tell whether all rings are dead and read to their end."""
        return self._has_ended

    @property
    def is_manned(self) -> bool:
        """Tell whether a process of an engine was there at the last call."""
        return self._is_manned

    @property
    def has_writer(self) -> bool:
        """Return whether a process of an engine is there now, or none has been there yet.

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
        """Tell whether rings held more than the last call took."""
        return self._has_more

    def look_again(self) -> None:
        """Ask for the rings at the next call, without waiting for the second to be over."""
        self._look_again_ns = 0

    def poll(self) -> list[Item]:
        """Return what has become due since the last call."""
        if self._has_ended:
            return []
        now_ns = self._clock.monotonic_ns()
        out: list[Item] = []
        if now_ns >= self._look_again_ns:
            self._look_again_ns = now_ns + LOOK_AGAIN_NS
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
        # A sampler outlives the engines that it is for.
        self._is_manned = alive or any(
            is_held(reader) for reader in self._readers.values() if not _is_sampler(reader)
        )
        if self._is_manned or has_more or self._stays:
            out += self._merger.take(until_ns)
            if self._stays and not has_more:
                self._retire(now_ns)
        elif self._num_rings:
            out += self._merger.take(None)
            last_ns = max(self._last_ns.values(), default=0)
            out += self._merger.take(last_ns + AFTER_THE_END_NS)
            self._has_ended = True
        self._restate(out)
        return self._calibrated.told(out)

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
                    f"{reader.format_version}); what this one does not know is skipped"
                )
            out.append(_opened(number, reader))

    def _goes_on(self, opened: RingReader) -> bool:
        """Return whether a ring was followed before; it is from where that ended."""
        number, reader = self._closed.pop(opened.path, (0, opened))
        if not number or reader.identity != opened.identity:
            return False
        reader.reopen(opened)
        self._readers[number] = reader
        return True

    def _set_skews(self, found: list[RingReader]) -> None:
        """Find out which rings were written by another monotonic clock than ours."""
        here = read_here(boot_id(), self._clock.monotonic_ns, self._clock.real_ns)
        undecided = []
        for reader in found:
            try:
                skew_ns = running_skew_ns(reader, here)
            except OSError:  # it is found out again where the ring is read
                continue
            if skew_ns is None:
                undecided.append(reader)
            else:
                reader.skew_ns = skew_ns
        # The core's clock is that of the steps; it is the reference where all have ended.
        undecided.sort(key=lambda reader: reader.identity.role != "core")
        decided = [one for one in (*self._readers.values(), *found) if one not in undecided]
        for reader in undecided:
            engine_id = reader.identity.engine_id
            same = [one for one in decided if one.identity.engine_id == engine_id]
            with suppress(OSError):
                reader.skew_ns = ended_skew_ns(reader, same)
            decided.append(reader)

    def _samplers_beside(self, new: list[RingReader]) -> list[RingReader]:
        """Return the samplers' rings that reach into the time of an engine, from there on."""
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
        """Return whether a ring's process is there; on a file system without locks, by its beat."""
        if is_held(reader):
            self._locked.add(number)
            return True
        if number in self._locked or reader.identity.boot_id != boot_id():
            return False
        return self._clock.monotonic_ns() - self._beats(number)[0] - reader.skew_ns < ALIVE_NS

    def _retire(self, now_ns: int) -> None:
        """Close the rings of processes that are dead and read to their end."""
        for number, reader in list(self._readers.items()):
            if now_ns - self._beats(number)[0] - reader.skew_ns > RETIRE_NS and not is_held(reader):
                self._close(number)

    def _beats(self, number: int) -> tuple[int, int]:
        """Return a ring's heartbeat and pending words; drop the ring where they cannot be read."""
        try:
            return self._readers[number].words()[3:5]
        except OSError as error:
            self._drop(number, error)
            return 0, 0

    def _drop(self, number: int, error: OSError) -> None:
        """Close a ring that cannot be read now: a network disk, or a damaged one."""
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
        """Say again which rings there are."""
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
        except OSError:  # the folder is being taken away
            return []

    def _future_ns(self, reader: RingReader) -> int:
        """Return from when on a record cannot be right: it would hold up its ring until then."""
        if reader.identity.boot_id != boot_id():
            return _END_OF_TIME_NS
        return self._clock.monotonic_ns() + LONGEST_WAIT_NS + 1

    def _read_on(self) -> int | None:
        """Read on where it is furthest behind, up to the heads, or until that is enough at once.

        Returns:
            up to when all rings are read; None where that is to their heads.
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
        """Read a piece of a ring; return how large it was, 0 at the head."""
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
                except OverflowError:  # a time next to the end of time
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
    """Move a reader to a time; return whether its ring has records from there on."""
    try:
        return reader.seek(since_ns)
    except OSError:
        return False


def is_held(reader: RingReader) -> bool:
    """Tell whether the writer's process is there, though stopped: its heart does not beat."""
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
    return heartbeat_ns > 0 or not num_bytes  # else it has said its last word


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
