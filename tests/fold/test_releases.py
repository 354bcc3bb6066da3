"""Rings and recordings of another release: read to the same numbers, and reported as such."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from inferscope.errors import UnreadableFile
from inferscope.readers.source import RecordingSource
from inferscope.records import FORMAT_VERSION, decode, encode
from inferscope.ring.recording import RecordedFrame, RecordingReader, RecordingWriter
from tests.fold.test_expansion import replayed
from tests.insight.test_why import SAMPLE

NUM = 4000
"""Number of frames of a real run: some seconds."""
NEW_CODE = 999


def appended(frame: RecordedFrame) -> list[RecordedFrame]:
    """Append fields that this release does not know to a record."""
    known = encode(decode(frame.code, frame.payload))  # a later release writes all that this has
    fields = [*msgspec.msgpack.decode(known), "of a later release", {"a": [1]}]
    return [frame._replace(payload=msgspec.msgpack.encode(fields))]


def between(frame: RecordedFrame) -> list[RecordedFrame]:
    """Insert a record of a kind that this release does not know."""
    return [frame, frame._replace(code=NEW_CODE, payload=b"\x91\x01")]


def same(frame: RecordedFrame) -> list[RecordedFrame]:
    """Return the frame unchanged."""
    return [frame]


def written(
    path: Path, change: Callable[[RecordedFrame], list[RecordedFrame]], *, version: int
) -> None:
    """Write the beginning of the sample as another release would."""
    reader, writer = RecordingReader(SAMPLE), RecordingWriter(path)
    for _, frame in zip(range(NUM), reader.frames(), strict=False):
        for each in change(frame):
            writer.write(each)
    writer.close()
    reader.close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", version))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "version", "num_unknown"),
    [
        (appended, FORMAT_VERSION, 0),
        (appended, FORMAT_VERSION + 1, 0),
        (between, FORMAT_VERSION + 1, NUM),
        (same, 1, 0),
        (same, 0, 0),
        (same, 0xFFFFFFFF, 0),
    ],
)
def test_a_recording_of_another_release_gives_the_same_numbers(
    tmp_path: Path,
    change: Callable[[RecordedFrame], list[RecordedFrame]],
    version: int,
    num_unknown: int,
) -> None:
    plain, other = tmp_path / "plain.isr", tmp_path / "other.isr"
    written(plain, same, version=FORMAT_VERSION)
    written(other, change, version=version)
    *steps, run = replayed(plain)
    *others, other_run = replayed(other)
    assert others == steps
    assert len(steps) > 100
    assert other_run["digest"] == run["digest"]
    source = RecordingSource(other)
    source.advance()
    assert source.collector.num_unknown == num_unknown
    lines = [note for note in source.notes() if "newer version" in note]
    source.close()
    assert bool(lines) is (version > FORMAT_VERSION)
    assert all(f"{num_unknown} records of unknown kinds" in note for note in lines)


def test_what_is_of_no_release_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other.isr"
    other.write_bytes(b"INFSREC2" + bytes(100))
    with pytest.raises(UnreadableFile, match=r"^[^\n]* is not an InferScope recording\.[^\n]*$"):
        RecordingReader(other)
