from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.errors import InferScopeError, UnreadableFile
from inferscope.ring import recording
from inferscope.ring.recording import RecordedFrame, RecordingReader, RecordingWriter

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SECOND = 1_000_000_000


def made(path: Path, num: int = 50, *, closes: bool = True) -> list[RecordedFrame]:
    writer = RecordingWriter(path)
    frames = [
        RecordedFrame(1 + i % 3, 7, i, i * SECOND // 5, bytes([i % 251]) * (i * 37 % 900))
        for i in range(num)
    ]
    for frame in frames:
        writer.write(frame)
    if closes:
        writer.close()
    else:
        writer.flush()
    return frames


def read(path: Path) -> tuple[list[RecordedFrame], RecordingReader]:
    reader = RecordingReader(path)
    frames = list(reader.frames())
    reader.close()
    return frames, reader


def test_frames_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a.isr"
    frames = made(path)
    found, reader = read(path)
    assert found == frames
    assert reader.is_complete
    assert reader.damaged_blocks == 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_index_is_the_same_whether_written_or_rebuilt(tmp_path: Path) -> None:
    made(tmp_path / "whole.isr")
    made(tmp_path / "cut.isr", closes=False)
    whole, cut = RecordingReader(tmp_path / "whole.isr"), RecordingReader(tmp_path / "cut.isr")
    assert whole.is_complete
    assert not cut.is_complete
    frames = cut.frames()
    next(frames)
    assert whole.index() == cut.index()
    assert len(whole.index()) == 10
    assert len(list(frames)) == 49  # looking at the index does not move the reading


@FUZZ
@given(data=st.data())
def test_a_damaged_block_costs_itself_alone_wherever_it_is(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "a.isr"
    frames = made(path)
    reader = RecordingReader(path)
    blocks = reader.index()
    reader.close()
    raw = bytearray(path.read_bytes())
    hit = data.draw(st.integers(0, len(blocks) - 1))
    begin = blocks[hit].offset
    end = blocks[hit + 1].offset if hit + 1 < len(blocks) else begin + 40
    bit = data.draw(st.integers(begin * 8, end * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    found, reader = read(path)
    assert found == [f for f in frames if not blocks[hit].first_ns <= f.t_ns <= blocks[hit].last_ns]
    assert reader.damaged_blocks == 1


@FUZZ
@given(length=st.integers(0, 6000), junk=st.binary(max_size=200))
def test_a_cut_or_lengthened_recording_neither_raises_nor_invents(
    tmp_path: Path, length: int, junk: bytes
) -> None:
    path = tmp_path / "a.isr"
    frames = made(path)
    path.write_bytes(path.read_bytes()[:length] + junk)
    try:
        found, reader = read(path)
    except UnreadableFile:
        return
    assert [f for f in frames if f in found] == found
    reader = RecordingReader(path)
    reader.index()
    reader.close()


@FUZZ
@given(body=st.binary(max_size=3000))
def test_rubbish_behind_the_magic_gives_nothing(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a.isr"
    path.write_bytes(recording.MAGIC + struct.pack("<I", 1) + body)
    found, reader = read(path)
    assert found == []
    assert bool(reader.damaged_blocks) == bool(body)


def block(marker: bytes, body: bytes, plain: int) -> bytes:
    return recording._pack_block(marker, body, plain, 0, 0)


@pytest.mark.thorough
def test_a_block_that_would_swell_beyond_its_word_is_damage(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(200 << 20), 9)
    head = recording.MAGIC + struct.pack("<I", 1)
    for plain in (0, 100):  # 0 means "no limit" to zlib
        path = tmp_path / "bomb.isr"
        path.write_bytes(head + block(recording._MARKER, bomb, plain))
        found, reader = read(path)
        assert found == []
        assert reader.damaged_blocks == 1


def test_an_index_that_points_anywhere_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.isr"
    frames = made(path)
    raw = path.read_bytes()
    for offset in (0, 12, len(raw), 1 << 63, (1 << 64) - 1):
        path.write_bytes(raw[:-16] + struct.pack("<Q8s", offset, recording.MAGIC))
        found, reader = read(path)
        assert found == frames
        assert not reader.is_complete


def test_a_truncated_frame_within_a_whole_block_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.isr"
    plain = recording._ENTRY.pack(1, 7, 1, 0, 1000) + b"short"
    body = zlib.compress(plain)
    head = recording.MAGIC + struct.pack("<I", 9)
    path.write_bytes(head + block(recording._MARKER, body, len(plain)))
    found, reader = read(path)
    assert found == []
    assert reader.is_newer


def test_a_time_that_does_not_fit_does_not_stop_the_recorder(tmp_path: Path) -> None:
    path = tmp_path / "a.isr"
    writer = RecordingWriter(path)
    writer.write(RecordedFrame(1, 7, 1, (1 << 64) - 1, b"x"))
    writer.close()
    assert len(read(path)[0]) == 1


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.isr")
    (tmp_path / "empty.isr").touch()
    for path in (tmp_path / "pipe.isr", tmp_path, tmp_path / "empty.isr", tmp_path / "none.isr"):
        with pytest.raises(UnreadableFile):
            RecordingReader(path)


def test_a_recording_that_was_appended_to_itself_is_refused(tmp_path: Path) -> None:
    one, doubled = tmp_path / "a.isr", tmp_path / "aa.isr"
    for num_bytes in range(1, 60):  # of which some make a whole number of rows
        writer = RecordingWriter(one)
        writer.write(RecordedFrame(1, 5, 1, SECOND, bytes(range(num_bytes))))
        writer.close()
        doubled.write_bytes(2 * one.read_bytes())
        with pytest.raises(UnreadableFile, match="several recordings"):
            RecordingReader(doubled)


@pytest.mark.process
def test_a_full_disk_ends_a_recording_with_a_sentence_and_keeps_what_was_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.isr"
    script = f"""
import os, resource
from pathlib import Path
from inferscope.errors import InferScopeError
from inferscope.ring.recording import RecordedFrame, RecordingWriter
writer = RecordingWriter(Path({str(path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    for i in range(1000):
        writer.write(RecordedFrame(1, 7, i, i * 10**9, os.urandom(4000)))
except InferScopeError as error:
    print(error)
try:
    writer.close()
except InferScopeError:
    pass
writer.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert "kept" in done.stdout
    found, _ = read(path)
    assert [frame.sequence for frame in found] == list(range(len(found)))
    assert len(found) >= 10


def test_a_recording_that_cannot_be_made_states_why(tmp_path: Path) -> None:
    with pytest.raises(InferScopeError, match="cannot write"):
        RecordingWriter(tmp_path / "missing" / "a.isr")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_recordings_in_one_file_are_refused_with_the_place_where_the_second_begins(
    tmp_path: Path, is_cut: bool, is_damaged: bool
) -> None:
    made(tmp_path / "a.isr", closes=not is_cut)
    frames = made(tmp_path / "b.isr", closes=not is_cut)
    first, second = (tmp_path / "a.isr").read_bytes(), (tmp_path / "b.isr").read_bytes()
    if is_damaged:
        first = first[:100] + bytes(50) + first[150:]
    path = tmp_path / "c.isr"
    path.write_bytes(first + second)
    with pytest.raises(UnreadableFile, match=f"another begins at byte {len(first)}"):
        RecordingReader(path)
    path.write_bytes(path.read_bytes()[len(first) :])  # as the message says
    assert read(path)[0] == frames


def test_a_second_writer_is_refused_and_the_first_ones_file_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.isr"
    first = RecordingWriter(path)
    first.write(RecordedFrame(1, 7, 1, 5, b"first"))
    first.flush()
    with pytest.raises(InferScopeError, match="another recorder is writing it"):
        RecordingWriter(path)
    first.write(RecordedFrame(1, 7, 2, 6, b"second"))
    first.close()
    assert [frame.payload for frame in read(path)[0]] == [b"first", b"second"]
    RecordingWriter(path).close()  # the lock is released
    assert read(path)[0] == []


def bare(marker: bytes, num_bytes: int) -> bytes:
    return (marker * (num_bytes // len(marker) + 1))[:num_bytes]


def swelling(marker: bytes, num_bytes: int) -> bytes:
    """Headers that each announce a large body."""
    header = struct.pack("<8sIIIqq", marker, 1 << 20, 0, 1 << 20, 0, 0)
    return bare(header, num_bytes)


@pytest.mark.parametrize("marker", [recording._MARKER, recording._INDEX_MARKER, recording.MAGIC])
@pytest.mark.parametrize("body", [bare, swelling])
def test_a_file_of_bare_markers_costs_reads_and_bytes_in_proportion_to_its_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marker: bytes,
    body: Callable[[bytes, int], bytes],
) -> None:
    num_bytes = 1 << 18
    path = tmp_path / "a.isr"
    path.write_bytes(recording.MAGIC + struct.pack("<I", 1) + b"x" + body(marker, num_bytes))
    read_bytes = num_reads = 0
    plain_read = RecordingReader._read

    def counted(self: RecordingReader, offset: int, wanted: int) -> bytes:
        nonlocal read_bytes, num_reads
        found = plain_read(self, offset, wanted)
        read_bytes += len(found)
        num_reads += 1
        return found

    monkeypatch.setattr(RecordingReader, "_read", counted)
    reader = RecordingReader(path)
    assert list(reader.frames()) == []
    reader.close()
    assert read_bytes < 20 * num_bytes
    assert num_reads < num_bytes
