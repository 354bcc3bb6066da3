from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from inferscope.errors import NotFound
from inferscope.readers.source import RecordingSource, RingSource, open_source
from inferscope.records import (
    SAMPLER_ROLE,
    Clock,
    CounterSample,
    EngineInfo,
    Keyframe,
    Record,
    encode,
)
from inferscope.ring.discovery import boot_id, find_engines, sampler_rings
from inferscope.ring.extent import extent_of_rings
from inferscope.ring.layout import STARTS_KEYFRAME, Identity
from inferscope.ring.recording import RecordingWriter
from inferscope.ring.writer import RingWriter

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
START = time.monotonic_ns() - 10 * SECOND


def ring(folder: Path, role: str, start_ns: int, records: list[Record]) -> Path:
    name = SAMPLER_ROLE if role == SAMPLER_ROLE else "engine"
    me = Identity(name, role, 0, os.getpid(), "host", boot_id(), start_ns, start_ns)
    home = folder / name
    home.mkdir(exist_ok=True)
    writer = RingWriter(home / f"{role}-{start_ns}.ring", me, capacity=1 << 16)
    previous = -1
    for record in records:
        is_keyframe = isinstance(record, Keyframe)
        writer.write(record.CODE, encode(record), flags=STARTS_KEYFRAME if is_keyframe else 0)
        previous = writer.last_keyframe
    assert previous >= 0
    writer.close()
    return writer.path


def engine(folder: Path, start_ns: int) -> Path:
    records = [Keyframe(start_ns, 0, -1), EngineInfo(start_ns, "test"), Clock(start_ns, start_ns)]
    return ring(folder, "core", start_ns, records)


def sampler(folder: Path, start_ns: int, num: int) -> Path:
    records: list[Record] = [Keyframe(start_ns, 0, -1)]
    records += [
        CounterSample(start_ns + i, "GPU-1", start_ns + i - 1, start_ns + i, "gpm", {"pid": i})
        for i in range(1, num + 1)
    ]
    return ring(folder, SAMPLER_ROLE, start_ns, records)


def folded(source: RingSource) -> RingSource:
    while not source.has_ended:
        source.advance()
    source.close()
    return source


def test_a_sampler_is_no_engine_and_its_samples_are_counted(tmp_path: Path) -> None:
    engine(tmp_path, START)
    path = sampler(tmp_path, START + SECOND, 7)
    assert [found.engine_id for found in find_engines(tmp_path)] == ["engine"]
    assert sampler_rings(tmp_path) == [path]
    source = RingSource(lambda: tmp_path.glob("**/*.ring"), name="folder")
    collector = folded(source).collector
    assert list(collector.engines) == ["engine"]
    assert collector.samplers.num_samples == 7
    assert collector.totals().num_records == 11


def test_a_sampler_that_was_gone_before_an_engine_began_is_not_read_for_it(tmp_path: Path) -> None:
    engine(tmp_path, START)
    sampler(tmp_path, START - MINUTE, 5)
    collector = folded(RingSource(lambda: tmp_path.glob("**/*.ring"), name="folder")).collector
    assert collector.samplers.num_samples == 0
    assert collector.totals().num_records == 3


def test_running_sampler_does_not_keep_an_engine_alive(tmp_path: Path) -> None:
    engine(tmp_path, START)
    sampler(tmp_path, START, 1)
    me = Identity(SAMPLER_ROLE, SAMPLER_ROLE, 0, os.getpid(), "host", boot_id(), START, START)
    living = RingWriter(tmp_path / SAMPLER_ROLE / "living.ring", me, capacity=1 << 16)
    living.beat(10**18)  # alive by any clock of this machine
    try:
        assert folded(RingSource(lambda: tmp_path.glob("**/*.ring"), name="folder")).has_ended
    finally:
        living.close()


def test_a_recording_of_both_replays_to_the_same_numbers(tmp_path: Path) -> None:
    engine(tmp_path, START)
    sampler(tmp_path, START + SECOND, 7)
    file = tmp_path / "both.isr"
    live = RingSource(lambda: tmp_path.glob("**/*.ring"), name="", recording=RecordingWriter(file))
    folded(live)
    replayed = RecordingSource(file)
    replayed.advance()
    assert replayed.collector.digest() == live.collector.digest()
    assert replayed.collector.samplers.num_samples == 7
    replayed.close()


def test_a_samplers_time_is_not_the_engines(tmp_path: Path) -> None:
    path = engine(tmp_path, START)
    later = sampler(tmp_path, START + 5 * SECOND, 7)
    assert extent_of_rings([path, later]) == extent_of_rings([path])


def test_a_folder_with_nothing_but_a_sampler_is_no_engines(tmp_path: Path) -> None:
    path = sampler(tmp_path, START, 1)
    with pytest.raises(NotFound, match="no readable rings"):
        open_source(tmp_path)
    with pytest.raises(NotFound, match="a sampler's ring"):
        open_source(path)


def test_news_of_a_source_reports_since_when_and_why_it_is_silent(tmp_path: Path) -> None:
    at_ns = START + SECOND
    engine(tmp_path, START)
    opened = CounterSample(at_ns, "GPU-1", at_ns, at_ns, "gpm", {}, {"name": "H200"})
    lost = CounterSample(at_ns + 1, "", at_ns, at_ns, "gpm", {}, {}, "the driver is gone")
    news: list[Record] = [Keyframe(at_ns, 0, -1), opened, lost]
    ring(tmp_path, SAMPLER_ROLE, at_ns, news)
    samplers = folded(RingSource(lambda: tmp_path.glob("**/*.ring"), name="")).collector.samplers
    assert samplers.silent == {("gpm", ""): "the driver is gone"}
    assert samplers.facts[("gpm", "GPU-1")].facts == {"name": "H200"}
    assert samplers.num_samples == 0
