from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.records import (
    FORMAT_VERSION,
    LORA,
    RECORD_TYPES,
    SALT,
    CacheLookup,
    Emitted,
    EngineInfo,
    PromptLikeness,
    Record,
    StepSpan,
    UnknownRecord,
    decode,
    encode,
)
from inferscope.ring.reader import Frame, RingReader
from inferscope.ring.recording import RecordingReader
from tests.golden.write_golden import ME, every_record, written
from tests.probe.fakes import everything

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, FORMAT_VERSION + 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_ring_of_each_format_reads_back_to_the_same_records(version: int) -> None:
    reader = RingReader(GOLDEN / f"format-{version}.ring")
    assert reader.identity == ME
    assert reader.format_version == version
    found = everything(reader)
    assert [decode(f.code, f.payload) for f in found if isinstance(f, Frame)] == written(version)
    assert len(found) == len(written(version))
    reader.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recording_of_each_format_reads_back_to_the_same_records(version: int) -> None:
    reader = RecordingReader(GOLDEN / f"format-{version}.isr")
    assert [decode(frame.code, frame.payload) for frame in reader.frames()] == written(version)
    assert reader.is_complete
    reader.close()


def test_every_record_type_is_tested_in_full() -> None:
    assert {type(record) for record in every_record()} == set(RECORD_TYPES)
    codes = [kind.CODE for kind in RECORD_TYPES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("record", every_record(), ids=lambda record: type(record).__name__)
def test_fields_of_a_newer_writer_are_ignored(record: Record) -> None:
    fields = msgspec.msgpack.decode(encode(record))
    newer = msgspec.msgpack.encode([*fields, "a field", {"of": ["two versions", "on"]}])
    assert decode(record.CODE, newer) == record


def test_fields_that_an_older_writer_never_had_take_their_defaults() -> None:
    span = StepSpan(1, 2, 3, 4, 5, 6)
    assert decode(StepSpan.CODE, msgspec.msgpack.encode([1, 2, 3, 4, 5, 6])) == span
    assert decode(EngineInfo.CODE, msgspec.msgpack.encode([1, "old"])) == EngineInfo(1, "old")
    assert decode(Emitted.CODE, msgspec.msgpack.encode([1, b"", b""])) == Emitted(1, b"", b"")


def test_unknown_types_and_codes_are_distinguished_from_damage() -> None:
    with pytest.raises(UnknownRecord, match="type 999"):
        decode(999, b"")
    future = StepSpan(1, 2, 3, 4, 5, 6, mode="a mode of the future")
    assert decode(StepSpan.CODE, encode(future)) == future


@given(
    code=st.sampled_from([kind.CODE for kind in RECORD_TYPES]),
    payload=st.binary(max_size=200),
)
def test_any_bytes_are_a_record_or_unknown(code: int, payload: bytes) -> None:
    with contextlib.suppress(UnknownRecord):
        decode(code, payload)


@given(data=st.data())
def test_a_damaged_payload_is_a_record_or_unknown(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(every_record()))
    payload = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnknownRecord):
        decode(record.CODE, bytes(payload))


def test_records_of_the_prefix_cache_keep_to_their_bytes() -> None:
    now_ns, large = 2**62, 2**17
    lookup = CacheLookup(
        now_ns, 2**16, hit=large, evicted=2**14, rounding=15, evictor=2**16, evicted_ns=now_ns
    )
    assert len(encode(lookup)) <= 53
    spans = tuple((at, at + 99) for at in range(1000, 2**16, 8000))[:8]
    likeness = PromptLikeness(now_ns, 2**16, 2**16, 2**15, 2**15 + 7, 7, spans, SALT | LORA)
    assert len(encode(likeness)) <= 96


@pytest.mark.parametrize(("at_ns", "left_ns"), [(None, 9), (0, 0), (7, 7), (10, 9), (-1, 9)])
def test_tokens_have_left_before_that_is_written(at_ns: int | None, left_ns: int) -> None:
    assert Emitted(9, b"", b"", at_ns=at_ns).left_ns == left_ns
