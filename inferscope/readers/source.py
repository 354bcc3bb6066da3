"""Sources: rings or a recording, the fold over them, and their snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from inferscope.cost import CostBook
from inferscope.errors import NotFound
from inferscope.fold import ALL, READER, Collector, Retention, Sink, Snapshot, snapshot
from inferscope.probe import Clock, SystemClock
from inferscope.readers.expansion import Expansion
from inferscope.readers.merge import Item
from inferscope.readers.ring_follower import MOST_BYTES, RingFollower
from inferscope.records import (
    FORMAT_VERSION,
    SAMPLER_ROLE,
    Missed,
    Record,
    Tick,
    UnknownRecord,
    decode,
)
from inferscope.ring import (
    RecordedFrame,
    RecordingReader,
    RecordingWriter,
    RingReader,
    closed_under,
    find_engines,
    is_there,
    why_closed,
)

Listener = Callable[[int, Record], None]
"""Callback for every folded record, with the number of its ring."""

_POLL_S = 0.01
_BEHIND_NS = 1_000_000_000
"""Lag at which a live fold counts as up to date; its normal lag is up to half a second."""


class RingSource:
    """Source that folds the rings of running or exited processes, and can record them.

    Attributes:
        collector: fold over the records.
        focus: ID of the request whose token times snapshots include.
        has_steps: whether snapshots include recent steps, which `keep` has to retain.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        *,
        name: str,
        sinks: tuple[Sink, ...] = (),
        listen: Listener | None = None,
        recording: RecordingWriter | None = None,
        clock: Clock | None = None,
        since_ns: int | None = None,
        stays: bool = False,
        keep: Retention = ALL,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Follow the rings that `find` returns; `name` is shown in headers.

        `since_ns`, `stays` and `most_bytes` are passed to RingFollower, `keep` to Collector.
        """
        self.title = name
        self.focus: str | None = None
        self.has_steps = False
        self._listen = listen
        self.collector = Collector(*sinks, keep=keep)
        self._expansion = Expansion()
        self._follower = RingFollower(
            find, clock or SystemClock(), since_ns=since_ns, stays=stays, most_bytes=most_bytes
        )
        self._recording = recording

    @property
    def has_ended(self) -> bool:
        """Return whether all processes have exited and all their records are folded."""
        return self._follower.has_ended

    @property
    def has_live_writer(self) -> bool:
        """Return whether a writing process was alive at the last call."""
        return self._follower.has_live_writer

    @property
    def has_more(self) -> bool:
        """Return whether rings held more records than the last call folded."""
        return self._follower.has_more

    def listen_with(self, listen: Listener | None) -> None:
        """Replace the listener for records from now on; None removes it."""
        self._listen = listen

    def request_rescan(self) -> None:
        """Rescan for rings at the next call."""
        self._follower.request_rescan()

    def advance(self) -> int:
        """Fold what has become due; return how many records that was."""
        items = self._follower.poll()
        collector, expanded = self.collector, self._expansion.of
        for item in items:
            if self._recording is not None:
                self._recording.write(recorded(item))
            for record in expanded(item.ring, item.sequence, item.record):
                collector.fold(item.ring, record)
                if self._listen is not None:
                    self._listen(item.ring, record)
        collector.num_unknown = self._follower.num_unknown
        return len(items)

    def snapshot(self, window_ns: int) -> Snapshot:
        """Fold what is due and freeze the result."""
        self.advance()
        return snapshot(
            self.collector,
            window_ns=window_ns,
            mode="live" if self._follower.has_writer else "ended",
            source=self.title,
            notes=self.notes(),
            focus=self.focus,
            has_steps=self.has_steps,
        )

    def notes(self) -> tuple[str, ...]:
        """Return warnings about the files."""
        return (*self._follower.notes, *_clock_notes(self.collector))

    def close(self) -> None:
        """Close the rings and the recording; safe to call twice."""
        self._follower.close()
        if self._recording is not None:
            self._recording.close()


class RecordingSource:
    """Source that folds a recording: all at once, or at a pace relative to its making.

    Attributes:
        collector: fold over the records.
        focus: ID of the request whose token times snapshots include.
        has_steps: whether snapshots include recent steps, which `keep` has to retain.
    """

    def __init__(
        self,
        path: Path,
        *,
        rings: Callable[[], Iterable[Path]] | None = None,
        sinks: tuple[Sink, ...] = (),
        listen: Listener | None = None,
        speed: float | None = None,
        until_ns: int | None = None,
        clock: Clock | None = None,
        books: Mapping[str, CostBook] | None = None,
        keep: Retention = ALL,
    ) -> None:
        """Open the file.

        Args:
            path: path of the recording.
            rings: function that finds rings to read like a recording, instead of the file.
            sinks: receivers of final records.
            listen: callback for every record.
            speed: multiple of the recording's pace; None folds all of it at the first call.
            until_ns: offset into the recording at which to stop; None for its end.
            clock: clock of the pace.
            books: cost models of a previous pass, by engine ID.
            keep: what the fold retains.

        Raises:
            UnreadableFile: the file is not a recording.
        """
        self.title = path.name
        self.focus: str | None = None
        self.has_steps = False
        self.collector = Collector(*sinks, keep=keep, books=books)
        self._expansion = Expansion()
        self._is_refit = books is not None
        self._listen = listen
        self._reader = RecordingReader(path) if rings is None else RingFrames(rings)
        self._clock = clock or SystemClock()
        self._speed = speed
        self._until_ns = until_ns
        self._frames: Iterator[RecordedFrame] = self._reader.frames()
        self._held: RecordedFrame | None = None
        self._began: tuple[int, int] | None = None
        self._gaps = Gaps()
        self._is_interrupted = False
        self.has_ended = False

    def interrupt(self) -> None:
        """Fold no more records, a running call's included; safe from any thread."""
        self._is_interrupted = True

    def advance(self) -> int:
        """Fold the records due at this pace; return their number."""
        num = 0
        while (frame := self._held or next(self._frames, None)) is not None:
            self._held = None
            if self._is_interrupted or not self._is_due(frame):
                self._held = frame
                return num
            try:
                record = decode(frame.code, frame.payload)
                missed = self._gaps.before(frame, record, self._reader.damaged_blocks)
                if missed is not None:
                    self.collector.fold(READER, missed)
                for each in self._expansion.of(frame.ring, frame.sequence, record):
                    self.collector.fold(frame.ring, each)
                    if self._listen is not None:
                        self._listen(frame.ring, each)
            except UnknownRecord:
                self.collector.unknown()
            num += 1
        self.collector.end()
        self.has_ended = True
        return num

    def notes(self) -> tuple[str, ...]:
        """Return warnings about the file."""
        notes = []
        if self._is_refit:
            notes.append("refit: all steps are priced by the cost models of the whole recording")
        if self._reader.damaged_blocks:
            num = self._reader.damaged_blocks
            notes.append(f"{num} damaged block{' was' if num == 1 else 's were'} skipped")
        if self._reader.is_newer:
            notes.append(
                f"written by a newer version (format {self._reader.version}); "
                f"{self.collector.num_unknown} records of unknown kinds were skipped"
            )
        if not self._reader.is_complete:
            notes.append("the recording is truncated; everything before that point was read")
        return (*notes, *_clock_notes(self.collector))

    def snapshot(self, window_ns: int) -> Snapshot:
        """Fold what is due and freeze the result."""
        self.advance()
        return snapshot(
            self.collector,
            window_ns=window_ns,
            mode="ended" if self.has_ended else "replay",
            source=self.title,
            notes=self.notes(),
            focus=self.focus,
            has_steps=self.has_steps,
        )

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _is_due(self, frame: RecordedFrame) -> bool:
        if frame.code != Tick.CODE or (self._speed is None and self._until_ns is None):
            return True
        now_ns = self._clock.monotonic_ns()
        if self._began is None:
            self._began = (frame.t_ns, now_ns)
        first_ns, began_ns = self._began
        into_ns = frame.t_ns - first_ns
        if self._until_ns is not None and into_ns > self._until_ns:
            return False
        return self._speed is None or into_ns <= (now_ns - began_ns) * self._speed


class RingFrames:
    """Rings read like a recording: those of exited processes to the end, others up to now."""

    version = FORMAT_VERSION
    is_newer = False
    is_complete = True
    damaged_blocks = 0
    """Number of damaged blocks, always 0: losses of a ring are frames, as `Missed`."""

    def __init__(self, find: Callable[[], Iterable[Path]]) -> None:
        self._follower = RingFollower(find, SystemClock())

    def frames(self) -> Iterator[RecordedFrame]:
        """Yield all frames in the order of the fold."""
        until_ns = time.monotonic_ns() - _BEHIND_NS
        now_ns = 0
        while not self._follower.has_ended:
            items = self._follower.poll()
            for item in items:
                yield recorded(item)
                now_ns = item.t_ns
            if not items and now_ns >= until_ns:
                return
            if not items:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Close the rings."""
        self._follower.close()


class Gaps:
    """Counter of the frames of each ring that were lost with a recording's damaged blocks."""

    def __init__(self) -> None:
        self._expected: dict[int, int] = {}
        self._num_damaged = 0
        self._unchecked: set[int] = set()

    def before(self, frame: RecordedFrame, record: Record, num_damaged: int) -> Missed | None:
        """Return the loss between the ring's previous frame and this one; None without a loss."""
        if isinstance(record, Missed):
            self._expected[record.ring] = self._expected.get(record.ring, 1) + record.num_frames
        if frame.ring == READER:
            return None
        if num_damaged > self._num_damaged:
            self._num_damaged = num_damaged
            self._unchecked = set(self._expected)
        num_frames = frame.sequence - self._expected.get(frame.ring, frame.sequence)
        self._expected[frame.ring] = frame.sequence + 1
        if frame.ring not in self._unchecked:
            return None
        self._unchecked.discard(frame.ring)
        if num_frames <= 0:
            return None
        return Missed(record.t_ns, frame.ring, num_frames, "damaged")


def recorded(item: Item) -> RecordedFrame:
    """Return a folded item in the form of a recorded frame."""
    return RecordedFrame(item.ring, item.record.CODE, item.sequence, item.t_ns, item.payload)


def open_replay(
    path: Path,
    *,
    speed: float | None = None,
    until_ns: int | None = None,
    sinks: tuple[Sink, ...] = (),
    listen: Listener | None = None,
    books: Mapping[str, CostBook] | None = None,
    keep: Retention = ALL,
) -> RecordingSource:
    """Open a recording, a ring, or a directory of rings, to be folded at a pace.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it is none of them.
    """
    open_source(path).close()
    if path.is_dir():
        rings = tuple(path.glob("**/*.ring"))
    else:
        rings = (path,) if path.suffix == ".ring" else ()
    find = (lambda: rings) if rings else None
    return RecordingSource(
        path,
        rings=find,
        sinks=sinks,
        listen=listen,
        speed=speed,
        until_ns=until_ns,
        books=books,
        keep=keep,
    )


def final_books(path: Path) -> dict[str, CostBook]:
    """Fold a recording, a ring, or a directory of rings; return its final cost models.

    Returns:
        Frozen cost models for one further pass, by engine ID.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it is none of them.
    """
    source = open_replay(path)
    try:
        source.advance()
    finally:
        source.close()
    return {name: engine.book.frozen() for name, engine in source.collector.engines.items()}


def open_source(
    path: Path,
    *,
    sinks: tuple[Sink, ...] = (),
    listen: Listener | None = None,
    keep: Retention = ALL,
) -> RingSource | RecordingSource:
    """Open a recording, a ring, or a directory of rings.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it is none of them.
    """
    if not is_there(path):
        raise NotFound(f"{path} does not exist.")
    if path.is_dir():
        if not find_engines(path):
            for closed in closed_under(path):
                raise NotFound(why_closed(closed))
            raise NotFound(
                f"{path} holds no readable rings. They end in .ring; recordings end in .isr."
            )
        return RingSource(
            lambda: path.glob("**/*.ring"), name=path.name, sinks=sinks, listen=listen, keep=keep
        )
    if path.suffix == ".ring":
        reader = RingReader(path)
        reader.close()
        if reader.identity.role == SAMPLER_ROLE:
            raise NotFound(f"{path} is a sampler's ring. Give the path of an engine's ring.")
        return RingSource(lambda: [path], name=path.name, sinks=sinks, listen=listen, keep=keep)
    return RecordingSource(path, sinks=sinks, listen=listen, keep=keep)


def catch_up(source: RingSource | RecordingSource, *, patience_s: float | None = None) -> None:
    """Fold all records available now: a file to its end, a running engine up to the present.

    Args:
        source: source to fold.
        patience_s: time limit in seconds: a fold never catches up with an engine that writes
            faster than it can be folded; None for no limit.
    """
    began_ns = time.monotonic_ns()
    while not source.has_ended:
        is_idle = not source.advance()
        if is_idle and source.collector.now_ns >= began_ns - _BEHIND_NS:
            return
        if patience_s is not None and time.monotonic_ns() - began_ns > patience_s * 1e9:
            return
        if is_idle:
            time.sleep(_POLL_S)


def _clock_notes(collector: Collector) -> list[str]:
    return [skewed.in_words() for skewed in collector.skewed_clocks()]
