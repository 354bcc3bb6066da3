"""Repeated folds of rings: rewritten over time, read at irregular times, recorded and replayed."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from inferscope.readers.ring_follower import MOST_BYTES
from inferscope.readers.source import RecordingSource, RingSource
from inferscope.records import Keyframe, decode
from inferscope.ring import layout
from inferscope.ring.discovery import boot_id
from inferscope.ring.reader import Frame, RingReader
from inferscope.ring.recording import RecordingWriter
from inferscope.ring.writer import RingWriter
from tests.fold.scripts import Finals

Frames = list[tuple[int, int, Frame]]
"""Time, ring and frame of each record."""


class MovedClock:
    """Clock that the test sets."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def real_ns(self) -> int:
        return self.now_ns


def folded_from(rings: list[Path]) -> Frames:
    """Return all records of some rings, in the order of time."""
    out: Frames = []
    for number, path in enumerate(rings):
        reader = RingReader(path)
        while frames := reader.read():
            for frame in frames:
                assert isinstance(frame, Frame)
                t_ns = decode(frame.code, frame.payload).t_ns
                out.append((max(t_ns, out[-1][0] if frame.sequence > 1 else 0), number, frame))
        reader.close()
    return sorted(out, key=lambda one: (one[0], one[1], one[2].sequence))


def fold_again(
    rings: list[Path],
    frames: Frames,
    folder: Path,
    rng: random.Random,
    *sinks: Finals,
    most_bytes: int = MOST_BYTES,
) -> tuple[str, Path]:
    """Rewrite rings over time, fold them at irregular times; return digest and recording."""
    folder.mkdir()
    order = list(range(len(rings)))
    rng.shuffle(order)
    identities = [RingReader(path).identity for path in rings]
    writers: dict[int, RingWriter] = {}
    for number in order:
        path = folder / f"{rings[number].stem}.ring"
        same_boot = msgspec.structs.replace(identities[number], boot_id=boot_id())
        writers[number] = RingWriter(path, same_boot, capacity=4 << 20)
    clock = MovedClock(frames[0][0])
    recording = folder / "run.isr"
    paths = [folder / f"{rings[number].stem}.ring" for number in order]
    source = RingSource(
        lambda: paths,
        name="again",
        sinks=sinks,
        recording=RecordingWriter(recording),
        clock=clock,
        most_bytes=most_bytes,
    )
    next_poll_ns = clock.now_ns
    for t_ns, number, frame in frames:
        while next_poll_ns <= t_ns:
            clock.now_ns = next_poll_ns
            for writer in writers.values():
                writer.beat(clock.now_ns)
            source.advance()
            next_poll_ns += rng.choice([1_000_000, 20_000_000, 400_000_000])
        flags = layout.STARTS_KEYFRAME if frame.code == Keyframe.CODE else 0
        writers[number].write(frame.code, frame.payload, flags=flags)
    for writer in writers.values():
        writer.beat(0)
        writer.close()
    clock.now_ns = frames[-1][0] + 10_000_000
    while not source.has_ended:
        source.advance()
    source.close()
    return source.collector.digest(), recording


def replayed(path: Path, *sinks: Finals) -> str:
    source = RecordingSource(path, sinks=sinks)
    source.advance()
    source.close()
    return source.collector.digest()
