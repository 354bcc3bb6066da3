from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.errors import UnreadableFile
from inferscope.records import Keyframe, encode
from inferscope.ring import layout
from inferscope.ring.reader import Frame, Loss, RingReader
from inferscope.ring.writer import RingWriter
from tests.probe.fakes import everything, make_ring

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def keyframe(ring: RingWriter) -> None:
    ring.write(
        Keyframe.CODE,
        encode(Keyframe(1, 0, ring.last_keyframe)),
        flags=layout.STARTS_KEYFRAME,
    )


def fill(ring: RingWriter, num: int, num_bytes: int = 100) -> None:
    for i in range(num):
        if ring.bytes_since_keyframe * 4 > ring.capacity:
            keyframe(ring)
        ring.write(7, i.to_bytes(4, "little") * (num_bytes // 4))
    ring.beat(1)  # the header states all of them


def num_seen(found: list[Frame | Loss]) -> int:
    """Frames given out and frames reported as missed."""
    return sum(item.num_frames if isinstance(item, Loss) else 1 for item in found)


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    reader = RingReader(ring.path)
    payloads = [os.urandom(n) for n in (0, 1, 7, 8, 9, 1000)]
    for i, payload in enumerate(payloads):
        ring.write(40 + i, payload)
    assert everything(reader) == [Frame(i + 1, 40 + i, p) for i, p in enumerate(payloads)]
    assert reader.read() == []


def test_readers_agree_whatever_exceptions_interrupt_the_writer(tmp_path: Path) -> None:
    ring = make_ring(tmp_path, capacity=8 << 20)
    live, found = RingReader(ring.path), list[Frame | Loss]()
    chance, num_written = random.Random(1), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def write_until_interrupted() -> None:
        nonlocal num_written
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 2e-4))
        while True:
            num_written += 1
            payload = num_written.to_bytes(4, "little") * (1 + num_written % 7)
            flags = layout.STARTS_KEYFRAME * (num_written % 50 == 0)
            ring.write(7, payload, flags=flags)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            with pytest.raises(KeyboardInterrupt):
                write_until_interrupted()
            found += everything(live)
    finally:
        signal.signal(signal.SIGALRM, before)
    ring.write(7, b"the last")
    found += everything(live)
    assert everything(RingReader(ring.path)) == found
    frames = [item for item in found if isinstance(item, Frame)]
    assert [frame.sequence for frame in frames] == list(range(1, len(found) + 1))
    numbers = [int.from_bytes(frame.payload[:4], "little") for frame in frames[:-1]]
    assert numbers == sorted(set(numbers))
    assert num_written - len(numbers) <= 200


@FUZZ
@given(
    sizes=st.lists(st.integers(0, 16_000), min_size=1, max_size=80),
    every=st.integers(1, 20),
)
def test_every_frame_is_either_read_or_counted_whatever_the_sizes(
    tmp_path: Path, sizes: list[int], every: int
) -> None:
    path = tmp_path / "a.ring"
    path.unlink(missing_ok=True)
    ring = make_ring(tmp_path)
    reader = RingReader(path)
    found: list[Frame | Loss] = []
    for i, size in enumerate(sizes):
        if ring.bytes_since_keyframe * 4 > ring.capacity:
            keyframe(ring)
        ring.write(7, bytes([i]) * size)
        if i % every == 0:
            found += reader.read()
    found += everything(reader)
    assert num_seen(found) == ring.sequence
    sequences = [item.sequence for item in found if isinstance(item, Frame)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("num_bytes", [1, 64, 5000, 1 << 20])
def test_small_copies_show_the_same_frames_and_the_same_losses(
    tmp_path: Path, num_bytes: int
) -> None:
    ring = make_ring(tmp_path, capacity=1 << 18)
    for number in range(200):
        ring.write(7, number.to_bytes(4, "little") * (1 if number % 9 else 2000))
    ring.beat(1)
    ring.close()
    with ring.path.open("r+b") as file:  # whatever is there is damaged now
        file.seek(layout.PAGE + (1 << 15))
        file.write(bytes(9000))
    whole, pieces = RingReader(ring.path), RingReader(ring.path)
    at_once = [item for _ in range(9) for item in whole.read()]
    found: list[Frame | Loss] = []
    while piece := pieces.read(num_bytes):
        found += piece
    assert num_seen(found) == num_seen(at_once) == 200
    assert [f for f in found if isinstance(f, Frame)] == [
        f for f in at_once if isinstance(f, Frame)
    ]
    assert any(isinstance(item, Loss) for item in found)
    whole.close()
    pieces.close()


def test_a_lapped_reader_counts_what_it_missed_and_goes_on_at_a_keyframe(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    reader = RingReader(ring.path)
    fill(ring, 10)
    assert len(reader.read()) == 10
    fill(ring, 5000)
    found = everything(reader)
    loss, first = found[:2]
    assert isinstance(loss, Loss)
    assert loss.reason == "lapped"
    assert isinstance(first, Frame)
    assert first.code == Keyframe.CODE
    assert loss.num_frames == first.sequence - 11
    assert 10 + num_seen(found) == ring.sequence


def test_a_lapped_reader_without_a_keyframe_goes_on_at_the_head_and_still_counts(
    tmp_path: Path,
) -> None:
    ring = make_ring(tmp_path)
    reader = RingReader(ring.path)
    for _ in range(3000):
        ring.write(7, bytes(100))
    ring.beat(1)
    assert everything(reader) == [Loss(3000, "lapped")]
    ring.write(7, b"next")
    assert everything(reader) == [Frame(3001, 7, b"next")]


def test_late_reader_begins_at_the_oldest_whole_keyframe(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    fill(ring, 5000)
    found = everything(RingReader(ring.path))
    assert isinstance(found[0], Frame)
    assert found[0].code == Keyframe.CODE
    assert not [item for item in found if isinstance(item, Loss)]
    assert isinstance(found[-1], Frame)
    assert found[-1].sequence == ring.sequence
    assert sum(item.code == Keyframe.CODE for item in found if isinstance(item, Frame)) >= 2


def test_a_frame_too_large_for_its_ring_is_refused_and_counted_by_readers(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    reader = RingReader(ring.path)
    assert ring.write(7, b"before")
    assert not ring.write(7, bytes(ring.largest_bytes + 1))
    assert ring.write(7, bytes(ring.largest_bytes))
    first, loss, last = everything(reader)
    assert isinstance(first, Frame)
    assert loss == Loss(1, "damaged")
    assert isinstance(last, Frame)
    assert last.sequence == 3


def test_the_header_states_a_pending_step_at_once_and_the_rest_with_the_heartbeat(
    tmp_path: Path,
) -> None:
    ring = make_ring(tmp_path)
    reader = RingReader(ring.path)
    ring.write(7, b"payload")
    ring.set_pending(9)
    assert reader.words()[1:5] == (0, 0, 0, 9)
    assert [item.sequence for item in everything(reader) if isinstance(item, Frame)] == [1]
    ring.set_pending(0)
    ring.beat(7)
    assert reader.words()[1:5] == (layout.frame_bytes(7), 1, 7, 0)
    assert everything(reader) == []
    reader.close()


@FUZZ
@given(data=st.data())
def test_a_flipped_bit_costs_its_frame_alone_and_is_counted(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "a.ring"
    path.unlink(missing_ok=True)
    ring = make_ring(tmp_path)
    fill(ring, 40)
    used = 40 * layout.frame_bytes(100)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, used * 8 - 1))
        raw[layout.PAGE + bit // 8] ^= 1 << bit % 8
    copy = tmp_path / "copy.ring"
    copy.write_bytes(raw)
    found = everything(RingReader(copy))
    assert num_seen(found) == 40
    for item in found:
        if isinstance(item, Frame):
            assert item.payload == (item.sequence - 1).to_bytes(4, "little") * 25
        else:
            assert item.num_frames <= 3


def test_each_bit_of_a_frame_header_is_covered_by_the_checksum(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    fill(ring, 3)
    raw = ring.path.read_bytes()
    start = layout.PAGE + layout.frame_bytes(100)
    for bit in range(layout.FRAME_BYTES * 8):
        changed = bytearray(raw)
        changed[start + bit // 8] ^= 1 << bit % 8
        copy = tmp_path / "copy.ring"
        copy.write_bytes(changed)
        found = everything(RingReader(copy))
        assert [item for item in found if isinstance(item, Loss)] == [Loss(1, "damaged")], bit


def test_the_writer_and_the_readers_compute_the_same_checksum(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    ring.sequence = (1 << 40) + 12345
    ring.write(0xABCD, b"payload", flags=0)
    raw = ring.path.read_bytes()
    length, code, flags, crc, sequence = layout.FRAME.unpack_from(raw, layout.PAGE)
    assert (length, code, sequence) == (7, 0xABCD, (1 << 40) + 12346)
    assert crc == layout.checksum(code, flags, sequence, b"payload")


@FUZZ
@given(
    word=st.sampled_from([layout.CLAIM, layout.HEAD, layout.SEQUENCE, layout.KEYFRAME, 16]),
    value=st.one_of(st.integers(0, 1 << 20), st.integers(0, (1 << 64) - 1)),
    is_full=st.booleans(),
)
def test_a_damaged_header_word_neither_raises_nor_hangs_nor_invents_frames(
    tmp_path: Path, word: int, value: int, is_full: bool
) -> None:
    path = tmp_path / "a.ring"
    path.unlink(missing_ok=True)
    ring = make_ring(tmp_path)
    fill(ring, 2000 if is_full else 20)
    raw = bytearray(path.read_bytes())
    raw[word : word + 8] = value.to_bytes(8, "little")
    copy = tmp_path / "copy.ring"
    copy.write_bytes(raw)
    try:
        reader = RingReader(copy)
    except UnreadableFile:
        return
    found = everything(reader)
    assert all(item.num_frames <= ring.sequence for item in found if isinstance(item, Loss))
    sequences = [item.sequence for item in found if isinstance(item, Frame)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("word", [layout.CLAIM, layout.HEAD])
def test_a_reader_recovers_when_a_damaged_word_heals(tmp_path: Path, word: int) -> None:
    ring = make_ring(tmp_path)
    fill(ring, 10)
    reader = RingReader(ring.path)
    assert len(everything(reader)) == 10
    with ring.path.open("r+b", buffering=0) as file:
        for at in {layout.CLAIM, word}:
            os.pwrite(file.fileno(), layout.WORD.pack(1 << 50), at)
    everything(reader)
    fill(ring, 5)
    ring.beat(1)
    ring.inspect()
    found = everything(reader)
    assert [item.sequence for item in found if isinstance(item, Frame)] == list(range(11, 16))


@FUZZ
@given(length=st.integers(0, layout.PAGE + layout.MIN_CAPACITY))
def test_a_truncated_ring_gives_what_is_left_of_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.ring"
    path.unlink(missing_ok=True)
    ring = make_ring(tmp_path)
    fill(ring, 120)
    copy = tmp_path / "copy.ring"
    copy.write_bytes(path.read_bytes()[:length])
    if length < layout.PAGE:
        with pytest.raises(UnreadableFile):
            RingReader(copy)
        return
    found = everything(RingReader(copy))
    whole = (length - layout.PAGE) // layout.frame_bytes(100)
    assert sum(isinstance(item, Frame) for item in found) == min(120, whole)
    assert num_seen(found) == 120


@FUZZ
@given(content=st.binary(max_size=9000), seed=st.booleans())
def test_foreign_bytes_are_refused_or_read_as_damage(
    tmp_path: Path, content: bytes, seed: bool
) -> None:
    path = tmp_path / "foreign.ring"
    if seed:
        content = b"INFSRING" + content
    path.write_bytes(content)
    with pytest.raises(UnreadableFile):
        RingReader(path)


@pytest.mark.parametrize("capacity", [0, 65_532, 1 << 62, 1 << 63, (1 << 64) - 8])
def test_a_capacity_that_no_file_has_is_refused(tmp_path: Path, capacity: int) -> None:
    ring = make_ring(tmp_path)
    words = {layout.CLAIM: 1 << 63, layout.HEAD: 1 << 63, layout.KEYFRAME: (1 << 63) - 8}
    with ring.path.open("r+b") as file:
        file.write(layout.FIXED.pack(layout.MAGIC, layout.FORMAT_VERSION, 1, capacity))
        for at, value in words.items():
            file.seek(at)
            file.write(layout.WORD.pack(value))
    with pytest.raises(UnreadableFile, match=f"capacity {capacity}"):
        RingReader(ring.path)
    ring.close()


@FUZZ
@given(content=st.binary(min_size=100, max_size=6000))
def test_a_body_of_rubbish_gives_no_frames(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ring"
    path.unlink(missing_ok=True)
    ring = make_ring(tmp_path)
    fill(ring, 300)
    raw = bytearray(path.read_bytes())
    raw[layout.PAGE :] = (content * (layout.MIN_CAPACITY // len(content) + 1))[
        : layout.MIN_CAPACITY
    ]
    copy = tmp_path / "copy.ring"
    copy.write_bytes(raw)
    found = everything(RingReader(copy))
    assert not [item for item in found if isinstance(item, Frame)]


def test_a_ring_made_to_keep_the_search_busy_is_given_up_in_time(tmp_path: Path) -> None:
    ring = make_ring(tmp_path, capacity=4 << 20)
    for _ in range(250):
        ring.write(7, bytes(16_000))
    ring.beat(1)
    raw = bytearray(ring.path.read_bytes())
    # Every 8 bytes look like a frame of half a mebibyte with a plausible number.
    raw[layout.PAGE :] = (layout.FRAME.pack(1 << 19, 7, 0, 1, 1) + bytes(4)) * ((4 << 20) // 24 + 1)
    raw = raw[: layout.PAGE + (4 << 20)]
    copy = tmp_path / "copy.ring"
    copy.write_bytes(raw)
    assert not [item for item in everything(RingReader(copy)) if isinstance(item, Frame)]


def test_damage_of_more_than_one_copy_does_not_look_like_the_end(tmp_path: Path) -> None:
    ring = make_ring(tmp_path, capacity=8 << 20)
    for _ in range(480):
        ring.write(7, bytes(16_000))
    ring.beat(1)
    raw = bytearray(ring.path.read_bytes())
    begin = layout.PAGE + 100_000
    raw[begin : begin + (5 << 20)] = bytes(5 << 20)
    copy = tmp_path / "copy.ring"
    copy.write_bytes(raw)
    found = everything(RingReader(copy))
    assert num_seen(found) == 480
    assert sum(isinstance(item, Loss) for item in found) == 1


def test_a_pipe_or_a_folder_in_a_rings_place_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.ring"
    os.mkfifo(pipe)
    (tmp_path / "folder.ring").mkdir()
    for path in (pipe, tmp_path / "folder.ring", tmp_path / "missing.ring"):
        with pytest.raises(UnreadableFile):
            RingReader(path)


def test_a_reader_may_be_closed_twice(tmp_path: Path) -> None:
    reader = RingReader(make_ring(tmp_path).path)
    reader.close()
    other = os.open(tmp_path, os.O_RDONLY)
    reader.close()
    os.fstat(other)
    os.close(other)


def test_a_second_writer_cannot_take_a_ring_that_exists(tmp_path: Path) -> None:
    make_ring(tmp_path)
    with pytest.raises(FileExistsError):
        make_ring(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
