"""Time ranges of rings and recordings, found without reading all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from inferscope.errors import UnreadableFile
from inferscope.records import SAMPLER_ROLE, Tick, UnknownRecord, decode
from inferscope.ring.reader import Frame, RingReader
from inferscope.ring.recording import RecordingReader


class Extent(NamedTuple):
    """Wall time that a set of records spans."""

    first_real_ns: int
    last_real_ns: int


def extent_of_rings(paths: Iterable[Path]) -> Extent | None:
    """Return the time from the first record of the rings to the last, None if they are empty.

    Samplers' rings are excluded: they continue after the engines have ended.
    """
    found = []
    for path in paths:
        with suppress(UnreadableFile):
            reader = RingReader(path)
            try:
                is_sampler = reader.identity.role == SAMPLER_ROLE
                times = None if is_sampler else _times_of_ring(reader)
            finally:
                reader.close()
            if times is not None:
                found.append(times)
    if not found:
        return None
    return Extent(min(one.first_real_ns for one in found), max(one.last_real_ns for one in found))


def extent_of_recording(path: Path) -> Extent | None:
    """Return the time that a recording spans, None if it is empty.

    Raises:
        UnreadableFile: the file is not a recording.
    """
    reader = RecordingReader(path)
    try:
        index = reader.index()
        # An opened ring states when its process began, which may be hours before.
        ticks = (frame for frame in reader.frames() if frame.code == Tick.CODE)
        for frame in ticks:
            with suppress(UnknownRecord):
                tick = decode(frame.code, frame.payload)
                if isinstance(tick, Tick):
                    return Extent(tick.real_ns, index[-1].last_ns + tick.real_ns - tick.t_ns)
    finally:
        reader.close()
    return None


def _times_of_ring(reader: RingReader) -> Extent | None:
    offset_ns = reader.identity.start_real_ns - reader.identity.start_ns
    frames = reader.read()
    first_ns, last_ns = _first(frames), _first(reversed(frames))
    reader.skip_to_last_keyframe()
    while frames := reader.read():
        last_ns = _first(reversed(frames)) or last_ns
    if first_ns is None or last_ns is None:
        return None
    return Extent(first_ns + offset_ns, max(first_ns, last_ns) + offset_ns)


def _first(frames: Iterable[object]) -> int | None:
    """Return the time in nanoseconds of the first readable record among frames."""
    for frame in frames:
        if isinstance(frame, Frame):
            with suppress(UnknownRecord):
                return decode(frame.code, frame.payload).t_ns
    return None
