"""Following of real ring files of real processes: stopped, late and deleted ones."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from inferscope.probe.clock import SystemClock
from inferscope.readers.merge import RECORD_BYTES, Item
from inferscope.readers.ring_follower import RingFollower
from inferscope.readers.source import RingSource
from inferscope.records import ON, Clock, Keyframe, ProbeHealth, RingOpened, Tick, encode
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import STARTS_KEYFRAME, Identity, pack_header
from inferscope.ring.reader import RingReader
from inferscope.ring.writer import RingWriter
from tests.children import child

_ENGINE = """
import time
from inferscope.probe import EngineInfo, Probe

probe = Probe.open(EngineInfo(0, "made-up"))
print(probe.path, flush=True)
probe.queued("stays", prompt_tokens=1)
step = 0
while True:
    index = probe.queued(str(step), prompt_tokens=1)
    now = time.monotonic_ns()
    probe.plan(step, start_ns=now, end_ns=now, waiting=0, running=1)
    probe.admitted(index)
    probe.start(step)
    time.sleep(0.005)
    probe.stop(step)
    probe.slices(step, requests=[index], phases=[0], tokens=[1], contexts=[0], sampled=[1])
    probe.emitted([index], [1], step=step)
    probe.finished(index, "length")
    step += 1
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Path]]]:
    """Start synthetic engines; end them with the test."""
    with ExitStack() as stack:

        def begin(engine_id: str) -> tuple[subprocess.Popen[str], Path]:
            environment = {"INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_ENGINE_ID": engine_id}
            started = child(
                [sys.executable, "-c", _ENGINE],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment, "INFERSCOPE_RING_MB": "1"},
            )
            process = stack.enter_context(started)
            assert process.stdout is not None
            return process, Path(process.stdout.readline().strip())

        yield begin


def follow(source: RingSource, is_so: Callable[[], bool]) -> None:
    """Follow until a condition holds."""
    end_s = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be so"
        source.advance()
        time.sleep(0.02)


def num_finished(source: RingSource, engine_id: str) -> int:
    engine = source.collector.engines.get(engine_id)
    return 0 if engine is None else engine.lives.num_finished


@pytest.mark.thorough
def test_a_stopped_process_is_not_over_and_a_killed_one_is(
    start: Callable[[str], tuple[subprocess.Popen[str], Path]],
) -> None:
    process, path = start("stopped")
    source = RingSource(lambda: [path], name="stopped")
    follow(source, lambda: num_finished(source, "stopped") > 10)
    engine = source.collector.engines["stopped"]
    process.send_signal(signal.SIGSTOP)
    assert not any(each.request_id == "stays" for each in engine.lives.finished)
    follow(source, lambda: any(each.request_id == "stays" for each in engine.lives.finished))
    assert not source.has_ended
    assert source.snapshot(60_000_000_000).mode == "live"
    assert [f.finish for f in engine.lives.finished if f.request_id == "stays"] == ["engine_lost"]
    before = engine.lives.num_finished
    process.send_signal(signal.SIGCONT)
    follow(source, lambda: engine.lives.num_finished > before + 20)
    assert source.collector.num_late <= 6  # written by the step that was stopped
    process.kill()
    process.wait()
    assert source.snapshot(60_000_000_000).mode == "ended", "its heartbeat is still a fresh one"
    follow(source, lambda: source.has_ended)
    assert not engine.lives.table.alive()
    source.close()


def test_a_source_without_a_ring_yet_is_live() -> None:
    source = RingSource(lambda: [], name="waits")
    assert source.snapshot(60_000_000_000).mode == "live"
    source.close()


@pytest.mark.thorough
def test_a_ring_that_appears_late_or_is_deleted_is_followed(
    start: Callable[[str], tuple[subprocess.Popen[str], Path]], tmp_path: Path
) -> None:
    start("early")
    source = RingSource(lambda: tmp_path.glob("**/*.ring"), name="folder")
    follow(source, lambda: num_finished(source, "early") > 0)
    _, late = start("late")
    follow(source, lambda: num_finished(source, "late") > 0)
    late.unlink()
    before = num_finished(source, "late")
    follow(source, lambda: num_finished(source, "late") > before + 50)
    assert num_finished(source, "early") > 50
    assert source.collector.num_unjoined == 0
    source.close()


class _Clock:
    now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def real_ns(self) -> int:
        return self.now_ns


def made_ring(folder: Path, name: str, clock: _Clock, capacity: int = 1 << 16) -> RingWriter:
    me = Identity("made", "core", 0, 1, "host", boot_id(), clock.now_ns, 0)
    return RingWriter(folder / f"{name}.ring", me, capacity=capacity)


def test_ticks_keep_their_grid_and_rings_are_named_again(tmp_path: Path) -> None:
    clock = _Clock()
    ring = made_ring(tmp_path, "core-0-1", clock)
    follower = RingFollower(lambda: tmp_path.glob("*.ring"), clock)
    items: list[Item] = []
    for _ in range(50):
        clock.now_ns += 700_000_000
        ring.beat(clock.now_ns)
        health = ProbeHealth(clock.now_ns - 10_000_000, 0, 0, 0, 0, 0)
        ring.write(health.CODE, encode(health))
        items += follower.poll()
    ticks = [item.t_ns for item in items if isinstance(item.record, Tick)]
    assert {late - early for early, late in itertools.pairwise(ticks)} == {200_000_000}
    times = [item.t_ns for item in items if not isinstance(item.record, RingOpened)]
    assert times == sorted(times)
    assert sum(isinstance(item.record, RingOpened) for item in items) == 4
    follower.close()
    ring.close()


def test_a_ring_that_is_just_made_is_not_over_yet(tmp_path: Path) -> None:
    clock = _Clock()
    ring = made_ring(tmp_path, "core-0-1", clock)
    follower = RingFollower(lambda: tmp_path.glob("*.ring"), clock)
    follower.poll()
    assert not follower.has_ended
    ring.beat(clock.now_ns)
    record = Clock(clock.now_ns, 0)
    ring.write(record.CODE, encode(record))
    ring.beat(0)
    ring.close()
    items = [item for _ in range(3) for item in follower.poll()]
    assert follower.has_ended
    assert record in [item.record for item in items]
    follower.close()


def test_a_record_from_the_future_does_not_block_other_rings(tmp_path: Path) -> None:
    clock = _Clock()
    ring = made_ring(tmp_path, "core-0-1", clock)
    for t_ns in (clock.now_ns, 1 << 61, clock.now_ns + 1):
        record = Clock(t_ns, 0)
        ring.write(record.CODE, encode(record))
    ring.beat(0)
    follower = RingFollower(lambda: tmp_path.glob("*.ring"), clock)
    items = follower.poll()
    assert follower.has_ended
    assert sum(isinstance(item.record, Clock) for item in items) == 2
    assert follower.num_unknown == 1
    follower.close()
    ring.close()


@pytest.mark.parametrize("number", [-1, 1 << 62, 1 << 70])
@pytest.mark.parametrize("field", ["rank", "pid", "start_ns", "start_real_ns"])
def test_a_header_with_impossible_numbers_is_not_a_ring(
    tmp_path: Path, field: str, number: int
) -> None:
    clock = _Clock()
    ring = made_ring(tmp_path, "core-0-1", clock)
    ring.beat(0)
    ring.close()
    reader = RingReader(ring.path)
    page = pack_header(msgspec.structs.replace(reader.identity, **{field: number}), ring.capacity)
    reader.close()
    with ring.path.open("r+b") as file:
        file.write(page)
    follower = RingFollower(lambda: tmp_path.glob("*.ring"), clock)
    assert not follower.poll()
    assert len(follower.notes) == 1
    follower.close()


@pytest.mark.parametrize("at_ns", [0, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("real_ns", [-(1 << 63), (1 << 63) - 1])
def test_impossible_clocks_do_not_shift_times(tmp_path: Path, at_ns: int, real_ns: int) -> None:
    clock = SystemClock()
    now_ns = clock.monotonic_ns()
    me = Identity("engine", "core", 0, 1, "h", boot_id(), 5, clock.real_ns())
    ring = RingWriter(tmp_path / "core-0-1.ring", me, capacity=65_536)
    keyframe = Keyframe(now_ns, ON, -1)
    ring.write(keyframe.CODE, encode(keyframe), flags=STARTS_KEYFRAME)
    record = Clock(now_ns, real_ns, None, None, at_ns)
    ring.write(record.CODE, encode(record))
    ring.beat(1)
    ring.close()
    follower = RingFollower(lambda: [ring.path], clock, stays=True)
    (opened,) = [item.record for item in follower.poll() if isinstance(item.record, RingOpened)]
    assert abs(opened.skew_ns) < 1 << 61
    follower.close()


def test_a_name_used_again_is_another_ring(tmp_path: Path) -> None:
    clock = _Clock()
    first = made_ring(tmp_path, "core-0-1", clock)
    follower = RingFollower(lambda: tmp_path.glob("*.ring"), clock)
    first.beat(clock.now_ns)
    assert sum(isinstance(item.record, RingOpened) for item in follower.poll()) == 1
    first.path.unlink()
    second = made_ring(tmp_path, "core-0-1", clock)
    clock.now_ns += 2_000_000_000
    second.beat(clock.now_ns)
    assert sum(isinstance(item.record, RingOpened) for item in follower.poll()) == 1
    for ring in (first, second):
        ring.close()
    follower.close()


@pytest.mark.parametrize("most_bytes", [1, 20_000, 1 << 24])
def test_backlog_stays_in_its_rings_and_is_read_in_the_same_order(
    tmp_path: Path, most_bytes: int
) -> None:
    clock = _Clock()
    rings = [made_ring(tmp_path, f"core-{number}-1", clock, 1 << 20) for number in range(3)]
    began_ns, now_ns = clock.now_ns, clock.now_ns
    for number in range(3000):
        now_ns += 1_000_000
        # One ring is as full as the others together, and ends early.
        ring = rings[number % 2 if number < 1500 else 2]
        record = Clock(now_ns, number)
        ring.write(record.CODE, encode(record))
    clock.now_ns = now_ns + 1_000_000_000
    for ring in rings:
        ring.beat(clock.now_ns)
    follower = RingFollower(lambda: sorted(tmp_path.glob("*.ring")), clock, most_bytes=most_bytes)
    seen, most_held_bytes = list[int](), 0
    polls = 0
    while polls == 0 or follower.has_more:
        items = follower.poll()
        polls += 1
        held_bytes = sum(len(item.payload) + RECORD_BYTES for item in items)
        held_bytes += follower._merger.num_bytes
        most_held_bytes = max(most_held_bytes, held_bytes)
        seen += [item.record.real_ns for item in items if isinstance(item.record, Clock)]
    assert seen == list(range(3000))
    assert now_ns - began_ns == 3_000_000_000
    # Beyond the bound: one chunk of each ring, the smallest copy, of frames of 32 bytes.
    piece_bytes = (1 << 14) / 32 * (RECORD_BYTES + 16)
    assert most_held_bytes < most_bytes + 3 * piece_bytes < 3000 * RECORD_BYTES + most_bytes
    assert (polls > 1) is (most_bytes < 1 << 20)
    follower.close()
    for ring in rings:
        ring.close()
