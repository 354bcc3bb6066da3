"""Equality of the fold of `StepSame` records with that of full steps."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inferscope_jsonl import JsonlExporter

from inferscope.fold.fold import READER, Collector
from inferscope.probe import Probe
from inferscope.probe.repeats import MOST_SAME
from inferscope.readers import ring_follower as follow
from inferscope.readers.expansion import Expansion
from inferscope.readers.merge import Merger
from inferscope.readers.shifting import shifted
from inferscope.readers.source import RecordingSource, RingSource
from inferscope.records import (
    COLUMNS,
    DECODE,
    PREFILL,
    Emitted,
    Record,
    RequestIndex,
    RingOpened,
    StepPlan,
    StepSame,
    StepSlices,
    decode,
    encode,
)
from inferscope.records import layouts as record_module
from inferscope.ring import recording as recording_module
from inferscope.ring.reader import Frame, Loss, RingReader
from inferscope.ring.recording import RecordingWriter
from tests.fold.refolding import MovedClock
from tests.fold.scripts import Finals, assert_all_closes
from tests.probe.fakes import FakeClock, everything, make_probe

GOLDEN = Path(__file__).parents[1] / "golden"
MS = 1_000_000
START_NS = 10**12
Rows = list[tuple[int, int, int, int]]
"""Request, phase, tokens and context of each row."""


@dataclass
class Sequencer:
    """Request of the synthetic engine."""

    index: RequestIndex
    prompt: int
    left: int
    context: int = 0


@dataclass
class Engine:
    """Generator of synthetic steps, reported with `same_step` where possible or always in full.

    Slices are reported at dispatch or with the outputs, and a step's emissions with the next step,
    as in an engine that hides the probe's work behind its device.
    """

    rng: random.Random
    probe: Probe
    clock: FakeClock
    is_brief: bool
    at_dispatch: bool = True
    is_steady: bool = False
    """Whether no request arrives and no time passes without a step."""
    running: list[Sequencer] = field(default_factory=list)
    truth: dict[int, Rows] = field(default_factory=dict)
    emitted: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    num_same: int = 0
    step: int = 0

    def run(self, num_steps: int) -> None:
        left: tuple[int, list[int], int, list[Sequencer]] | None = None
        for _ in range(num_steps):
            rng = self.rng
            self.clock.now_ns += rng.choice((1, 200_000, 5 * MS))
            if not self.running or (rng.random() < 0.08 and not self.is_steady):
                self._arrive()
            start_ns = self.clock.now_ns
            self.clock.now_ns += rng.choice((1000, 50_000))
            rows: Rows = []
            for one in self.running:
                is_decode = one.context >= one.prompt
                rows.append(
                    (one.index, DECODE, 1, one.context)
                    if is_decode
                    else (one.index, PREFILL, one.prompt, 0)
                )
            if not is_plain(rows) and rng.random() < 0.3:
                rows.reverse()
            self.truth[self.step] = rows
            self.clock.now_ns += 30_000
            self._state(rows, start_ns, left)
            left = None
            ended = []
            for one in self.running:
                one.context += 1 if one.context >= one.prompt else one.prompt
                one.left -= 1
                if one.left <= 0:
                    ended.append(one)
            left_ns = self.clock.now_ns
            indices = [row[0] for row in rows]
            self.emitted[self.step] = indices, left_ns
            left = self.step, indices, left_ns, ended
            for one in ended:
                self.running.remove(one)
            self.step += 1
            if rng.random() < 0.02 and not self.is_steady:
                self.clock.now_ns += 60 * MS
                self.probe._keeper.tend()
                self.clock.now_ns += rng.choice((300 * MS, 11_000 * MS))
        if left is not None:
            self._outcome(left, is_stated=False)
        self.probe.close()

    def _arrive(self) -> None:
        for _ in range(self.rng.choice((1, 1, 3))):
            name = f"r{self.step}-{len(self.running)}"
            prompt = self.rng.randint(1, 30)
            index = self.probe.queued(name, prompt_tokens=prompt)
            self.clock.now_ns += 10_000
            self.probe.admitted(index)
            self.running.append(Sequencer(index, prompt, self.rng.choice((1, 5, 40))))

    def _outcome(self, left: tuple[int, list[int], int, list[Any]], *, is_stated: bool) -> None:
        step, indices, left_ns, ended = left
        if not is_stated:
            self.probe.emitted(indices, [1] * len(indices), step=step, at_ns=left_ns)
        for one in ended:
            self.probe.finished(one.index, "stop", at_ns=left_ns)

    def _state(self, rows: Rows, start_ns: int, left: Any) -> None:
        probe, step, rng = self.probe, self.step, self.rng
        end_ns = self.clock.now_ns
        counts = {
            "waiting": rng.randrange(3),
            "running": len(rows),
            "blocks_used": rng.randrange(9),
        }
        emission: dict[str, int] = {}
        if left is not None:
            if left[3] or rng.random() < 0.2 or not is_plain(self.truth[left[0]]):
                self._outcome(left, is_stated=False)
            else:
                emission = {"emitted_step": left[0], "emitted_ns": left[2]}
        before = self.truth.get(step - 1)
        is_same = before is not None and repeats(before, rows)
        is_stated = (
            self.is_brief
            and is_same
            and probe.same_step(step, start_ns=start_ns, end_ns=end_ns, **counts, **emission)
        )
        self.num_same += is_stated
        if not is_stated:
            if emission:
                self._outcome(left, is_stated=False)
            probe.plan(step, start_ns=start_ns, end_ns=end_ns, **counts)
            if self.at_dispatch:
                self._slices(step, rows)
        probe.start(step)
        self.clock.now_ns += rng.choice((2 * MS, 8 * MS))
        probe.stop(step)
        if not (is_stated or self.at_dispatch):
            self._slices(step, rows)

    def _slices(self, step: int, rows: Rows) -> None:
        indices, phases, tokens, contexts = zip(*rows, strict=True)
        self.probe.slices(
            step,
            requests=indices,
            phases=phases,
            tokens=tokens,
            contexts=contexts,
            sampled=[1] * len(rows),
        )


def is_plain(rows: Rows) -> bool:
    return all(phase == DECODE for _, phase, _, _ in rows)


def repeats(before: Rows, rows: Rows) -> bool:
    return is_plain(before) and rows == [(one, DECODE, 1, at + 1) for one, _, _, at in before]


def made(
    folder: Path, seed: int, *, is_brief: bool, capacity: int = 4 << 20, num_steps: int = 60
) -> Engine:
    rng = random.Random(seed)
    clock = FakeClock(START_NS)
    folder.mkdir(parents=True, exist_ok=True)
    probe = make_probe(folder, clock, name="brief" if is_brief else "full", capacity=capacity)
    engine = Engine(rng, probe, clock, is_brief, at_dispatch=rng.random() < 0.7)
    engine.run(num_steps)
    return engine


def path_of(folder: Path, is_brief: bool) -> Path:
    return folder / ("brief.ring" if is_brief else "full.ring")


def lines_of(path: Path, *, most_bytes: int = 1 << 24, recording: Path | None = None) -> list[Any]:
    """Fold a ring; return its exported lines."""
    out = io.BytesIO()
    sink = JsonlExporter(out)
    source = RingSource(
        lambda: [path],
        name="ring",
        sinks=(sink,),
        listen=sink.on_record,
        clock=MovedClock(START_NS + 10**13),
        most_bytes=most_bytes,
        recording=None if recording is None else RecordingWriter(recording),
    )
    while not source.has_ended:
        source.advance()
    source.close()
    source.collector.end()
    sink.close(source.collector.devices(), source.collector.totals())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def replayed(path: Path) -> list[Any]:
    out = io.BytesIO()
    sink = JsonlExporter(out)
    source = RecordingSource(path, sinks=(sink,), listen=sink.on_record)
    source.advance()
    source.close()
    sink.close(source.collector.devices(), source.collector.totals())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def expanded(frames: Sequence[Frame]) -> list[Record]:
    expansion = Expansion()
    return [
        record
        for frame in frames
        for record in expansion.of(1, frame.sequence, decode(frame.code, frame.payload))
    ]


def frames_of(path: Path) -> list[Frame]:
    reader = RingReader(path)
    found = everything(reader)
    reader.close()
    return [frame for frame in found if isinstance(frame, Frame)]


def rows_of(slices: StepSlices) -> Rows:
    def cells(name: str) -> list[int]:
        return np.frombuffer(getattr(slices, name), COLUMNS[name]).tolist()

    return list(
        zip(cells("requests"), slices.phases, cells("tokens"), cells("contexts"), strict=True)
    )


def assert_true(engine: Engine, found: Sequence[Record]) -> int:
    """Compare members and emissions of steps with the engine's; return the number of steps."""
    num = 0
    for record in found:
        if isinstance(record, StepSlices):
            assert rows_of(record) == engine.truth[record.step]
            num += 1
        elif isinstance(record, Emitted):
            indices, left_ns = engine.emitted[record.step]
            assert np.frombuffer(record.requests, "<u4").tolist() == indices
            assert record.tokens == b"\1\0\0\0" * len(indices)
            assert record.left_ns == left_ns
    return num


any_engine = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.thorough
@any_engine
@given(seed=st.integers(0, 2**32))
def test_repeated_steps_fold_to_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rings")
    brief, full = (made(folder, seed, is_brief=is_brief) for is_brief in (True, False))
    assert brief.truth == full.truth
    assert assert_true(brief, expanded(frames_of(path_of(folder, True)))) == len(brief.truth)
    lines = lines_of(path_of(folder, True), recording=folder / "brief.isr")
    others = lines_of(path_of(folder, False))
    if not brief.at_dispatch:  # reports, and slices in full, come at other times
        for each in (lines, others):
            each[-1]["records"] = each[-1]["digest"] = None
            each.sort(key=json.dumps)
    assert lines == others
    whole = lines_of(path_of(folder, True))
    assert lines_of(path_of(folder, True), most_bytes=1) == whole
    assert replayed(folder / "brief.isr") == whole


def test_most_steps_of_a_steady_batch_are_reported_as_repeated(tmp_path: Path) -> None:
    engines = [made(tmp_path / str(seed), seed, is_brief=True) for seed in range(8)]
    assert sum(engine.num_same for engine in engines) > 0.4 * 8 * 60


@any_engine
@given(seed=st.integers(0, 2**32))
def test_without_some_frames_no_member_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rings")
    engine = made(folder, seed, is_brief=True)
    rng = random.Random(seed)
    frames = frames_of(path_of(folder, True))
    num_steps = assert_true(engine, expanded(frames))
    share = rng.choice((0.02, 0.2, 0.6))
    kept = [frame for frame in frames if rng.random() > share]
    assert assert_true(engine, expanded(kept)) <= num_steps
    assert_true(engine, expanded(frames[rng.randrange(len(frames)) :]))
    collector, finals = folded(kept)
    assert_all_closes(collector, finals)


def folded(frames: Sequence[Frame]) -> tuple[Collector, Finals]:
    """Fold the frames of a ring that lacks some, as a follower does."""
    merger, expansion, finals = Merger(), Expansion(), Finals()
    collector = Collector(finals)
    opened = RingOpened(START_NS, 1, "engine", "core", 0, 1, "host", "boot", START_NS, 0)
    collector.fold(READER, opened)
    expected = 1
    for frame in frames:
        if frame.sequence > expected:
            merger.miss(1, frame.sequence - expected, "damaged")
        expected = frame.sequence + 1
        merger.add(1, frame.sequence, decode(frame.code, frame.payload), frame.payload)
    items = merger.take(None)
    items += merger.take(items[-1].t_ns + 6_000 * MS if items else START_NS)
    for item in items:
        for record in expansion.of(item.ring, item.sequence, item.record):
            collector.fold(item.ring, record)
    collector.end()
    return collector, finals


@any_engine
@given(seed=st.integers(0, 2**32))
def test_a_lapped_reader_takes_no_wrong_base(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rings")
    engine = made(folder, seed, is_brief=True, capacity=64 * 1024, num_steps=400)
    rng = random.Random(seed)
    found: list[Frame | Loss] = []
    # A ring of which only the end is left, and one that is read while it is written.
    reader = RingReader(path_of(folder, True))
    found = everything(reader)
    reader.close()
    assert_true(engine, expanded([frame for frame in found if isinstance(frame, Frame)]))

    clock, again = FakeClock(START_NS), folder / "again"
    again.mkdir()
    probe = make_probe(again, clock, name="brief", capacity=64 * 1024)
    slow = RingReader(again / "brief.ring")
    read: list[Frame | Loss] = []
    other = Engine(random.Random(seed), probe, clock, True)
    state = other._state

    def state_and_read(*arguments: Any) -> None:
        state(*arguments)
        if rng.random() < 0.01:
            read.extend(slow.read(rng.choice((200, 5000, 1 << 20))))

    other._state = state_and_read  # type: ignore[method-assign]
    other.run(400)
    read += everything(slow)
    slow.close()
    assert_true(other, expanded([frame for frame in read if isinstance(frame, Frame)]))


ROWS = StepSlices(
    9, 5, 77, b"\1\0\0\0\2\0\0\0", b"\1\1", b"\1\0\0\0" * 2, b"\7\0\0\0\xff\0\0\0",
    b"", b"\1\0" * 2,
)  # fmt: skip


def test_a_step_becomes_plan_slices_and_the_tokens_of_an_earlier_one() -> None:
    expansion = Expansion()
    assert expansion.of(3, 40, ROWS) == (ROWS,)
    same = StepSame(20, 7, 4, 18, 1, 2, 3, 4, 5, 6, 2, 1, 8)
    emitted, plan, slices = expansion.of(3, 44, same)
    assert emitted == Emitted(20, ROWS.requests, ROWS.tokens, 6, 10)
    assert plan == StepPlan(20, 7, 18, 19, 2, 3, 4, 5, 6, b"", "blocks")
    assert isinstance(slices, StepSlices)
    assert rows_of(slices) == [(1, 1, 1, 9), (2, 1, 1, 257)]
    assert (slices.t_ns, slices.step, slices.digest) == (20, 7, 77)
    assert slices.requests is ROWS.requests
    assert slices.tokens is ROWS.tokens


@pytest.mark.parametrize(
    "feed",
    [
        lambda expansion: None,
        lambda expansion: expansion.of(3, 39, ROWS),
        lambda expansion: expansion.of(4, 40, ROWS),
        lambda expansion: (expansion.of(3, 40, ROWS), expansion.of(3, 41, ROWS)),
        lambda expansion: expansion.of(3, 40, replaced(phases=b"\1\0")),
        lambda expansion: expansion.of(3, 40, replaced(tokens=b"\1\0\0\0\2\0\0\0")),
        lambda expansion: expansion.of(3, 40, replaced(contexts=b"\1\0\0")),
        lambda expansion: expansion.of(3, 40, replaced(proposed=b"\1\0\0\0")),
        lambda expansion: expansion.of(3, 40, replaced(step=7)),
        lambda expansion: expansion.of(3, 40, replaced(step=-(1 << 40))),
    ],
)  # fmt: skip
def test_without_its_base_a_step_has_no_members(feed: Callable[[Expansion], Any]) -> None:
    expansion = Expansion()
    feed(expansion)
    (plan,) = expansion.of(3, 44, StepSame(20, 7, 4, 18, 1, 2, 3, 4, 5, 6, 2, 1, 8))
    assert isinstance(plan, StepPlan)


def replaced(**changes: Any) -> StepSlices:
    from msgspec.structs import replace

    return replace(ROWS, **changes)


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1), min_size=11, max_size=11))
def test_any_numbers_expand_to_records_that_can_be_folded(numbers: list[int]) -> None:
    expansion = Expansion()
    expansion.of(1, 40, ROWS)
    collector = Collector(Finals())
    collector.fold(READER, RingOpened(9, 1, "e", "core", 0, 1, "h", "b", 9, 9))
    for more in ({}, {"step": 6, "frames_back": 1}):
        fields = dict(zip(StepSame.__struct_fields__[1:], numbers, strict=False)) | more
        for record in expansion.of(1, 41, StepSame(20, **fields)):
            collector.fold(1, record)


def test_a_lost_base_makes_each_step_that_repeats_it_unjoined(tmp_path: Path) -> None:
    clock = FakeClock(START_NS)
    probe = make_probe(tmp_path, clock)
    engine = Engine(random.Random(1), probe, clock, True)
    engine.is_steady = True
    engine.running = [Sequencer(probe.queued("a", prompt_tokens=3), 3, 10**6, context=3)]
    engine.run(2 * MOST_SAME + 20)
    frames = frames_of(tmp_path / "a.ring")
    bases = [frame for frame in frames if frame.code == StepSlices.CODE]
    whole, _ = folded(frames)
    lost, _ = folded([frame for frame in frames if frame is not bases[1]])
    assert whole.num_unjoined == 0
    assert lost.num_lost == 1
    num_missing = lost.num_unjoined
    assert 0 < num_missing <= MOST_SAME + 1


def test_a_reader_of_format_1_skips_counts_and_reports_such_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(tmp_path, 2, is_brief=True)
    lines_of(path_of(tmp_path, True), recording=tmp_path / "brief.isr")
    monkeypatch.delitem(record_module._KIND_OF_CODE, StepSame.CODE)
    monkeypatch.delitem(record_module._DECODERS, StepSame.CODE)
    for module in (follow, recording_module):
        monkeypatch.setattr(module, "FORMAT_VERSION", 1)
    ring = RingSource(
        lambda: [path_of(tmp_path, True)], name="old", clock=MovedClock(START_NS + 10**13)
    )
    recording = RecordingSource(tmp_path / "brief.isr")
    for source in (ring, recording):
        while not source.has_ended:
            source.advance()
        collector = source.collector
        assert collector.num_unknown == engine.num_same > 0
        assert 0 < collector.num_unjoined <= engine.num_same
        assert collector.num_lost == 0
        assert any("newer version (format 2)" in note for note in source.notes())
        source.close()


def test_rings_and_recordings_of_format_1_expand_to_themselves() -> None:
    frames = frames_of(GOLDEN / "format-1.ring")
    assert expanded(frames) == [decode(frame.code, frame.payload) for frame in frames]


@any_engine
@given(seed=st.integers(0, 2**32))
def test_steps_of_a_process_with_another_clock_are_the_same_steps_later(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("rings")
    made(folder, seed, is_brief=True)
    skew_ns = 7 * 10**9
    frames = frames_of(path_of(folder, True))
    moved = [
        Frame(f.sequence, f.code, encode(shifted(decode(f.code, f.payload), skew_ns)))
        for f in frames
    ]
    assert expanded(moved) == [shifted(record, skew_ns) for record in expanded(frames)]
