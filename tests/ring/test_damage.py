"""What happens outside to a ring's file while its writer writes: it is shortened, deleted, full."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscope.errors import RingUnavailable
from inferscope.probe import EngineInfo, Probe
from inferscope.records import Keyframe, ProbeHealth, decode
from inferscope.ring import layout, writer
from inferscope.ring.file_write import releasing_pwrite
from inferscope.ring.layout import MIN_CAPACITY, PAGE, Identity
from inferscope.ring.reader import Frame, Loss, RingReader
from inferscope.ring.writer import RingWriter, with_high_number
from tests import children
from tests.probe.fakes import FakeClock, everything, make_probe, make_ring
from tests.ring.interrupted_lock import InterruptedLock, is_free
from tests.ring.test_ring import fill, keyframe, num_seen

WRITER = """
import os, sys, time
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "test"))
print(probe.path, flush=True)
step = 0
while not os.path.exists(sys.argv[1]):
    probe.plan(step, start_ns=0, end_ns=0, waiting=0, running=0)
    probe.start(step)
    probe.stop(step)
    probe.emitted(range(64), [step] * 64, step=step)
    step += 1
    time.sleep(float(sys.argv[2]))
probe.close()
print(step, flush=True)
"""

RING_BYTES = 4 << 20
"""More than the child writes between two inspections: what was cut off does not grow again."""


def until(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


class Child:
    """A process that writes a ring until it is stopped."""

    def __init__(self, process: subprocess.Popen[str], stop: Path) -> None:
        self.process = process
        self._stop = stop
        assert process.stdout is not None
        self.path = Path(process.stdout.readline().strip())

    def end(self) -> tuple[int, str]:
        """Stop it; return its exit code and what it wrote to stderr."""
        self._stop.touch()
        _, lines = self.process.communicate(timeout=30)
        return self.process.returncode, lines


@pytest.fixture(params=[0.0005, 0.01], ids=["busy", "slow"])
def child(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    stop = tmp_path / "stop"
    with children.child(
        [sys.executable, "-c", WRITER, str(stop), str(request.param)],
        env={
            **os.environ,
            "INFERSCOPE_DIR": str(tmp_path / "rings"),
            "INFERSCOPE_RING_MB": str(RING_BYTES >> 20),
            "INFERSCOPE_BUDGET": "2",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield Child(process, stop)


def beats(reader: RingReader, times: int = 2) -> None:
    """Wait for some more heartbeats, and so for what was logged between them."""
    seen = {reader.heartbeat_ns()}
    until(lambda: seen.add(reader.heartbeat_ns()) or len(seen) > times)


def has_keyframe(path: Path) -> bool:
    try:
        reader = RingReader(path)
    except Exception:
        return False
    try:
        reader.skip_to_last_keyframe()
        found = everything(reader)
    finally:
        reader.close()
    return any(isinstance(item, Frame) and item.code == Keyframe.CODE for item in found)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [0, 64, layout.PAGE, layout.PAGE + 1000])
def test_a_server_survives_that_its_ring_is_shortened_and_readers_that_come_later_read_it(
    child: Child, length: int
) -> None:
    before = RingReader(child.path)
    until(lambda: any(isinstance(item, Frame) for item in before.read()))
    os.truncate(child.path, length)
    until(lambda: child.path.stat().st_size == layout.PAGE + RING_BYTES)
    until(lambda: has_keyframe(child.path))
    # A reader that had it open counts what it lost, and goes on.
    seen: list[Frame | Loss] = []

    def goes_on() -> bool:
        seen.extend(before.read())
        return sum(isinstance(item, Frame) for item in seen[-20:]) == 20

    until(goes_on)
    beats(before)
    assert child.process.poll() is None
    code, lines = child.end()
    assert code == 0
    assert lines.count("shortened or overwritten") == 1, lines
    seen += everything(before)
    last = seen[-1]
    assert isinstance(last, Frame)
    assert last.sequence == before.words()[2]
    assert child.path.stat().st_blocks * 512 >= RING_BYTES  # its room is reserved again
    before.close()


def test_a_deleted_ring_is_reported_once_and_the_server_goes_on(child: Child) -> None:
    reader = RingReader(child.path)
    child.path.unlink()
    beats(reader, times=4)  # the last of these inspections must log nothing more
    reader.close()
    code, lines = child.end()
    assert code == 0
    assert lines.count("was deleted") == 1


def test_a_full_disk_costs_records_and_is_reported_once_writes_succeed_again(
    tmp_path: Path,
) -> None:
    script = f"""
import logging, resource, sys, time
from inferscope.probe import EngineInfo, Probe
logged = []
class Said(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        logged.append(record.getMessage())
logging.getLogger("inferscope").addHandler(Said())
def until(text):
    end_s = time.monotonic() + 20
    while not any(text in line for line in logged) and time.monotonic() < end_s:
        time.sleep(0.01)
probe = Probe.open(EngineInfo(0, "test"))
print(probe.path, flush=True)
def step(number):
    probe.plan(number, start_ns=0, end_ns=0, waiting=0, running=0)
    probe.emitted(range(64), [number] * 64, step=number)
for number in range(10):
    step(number)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({layout.PAGE}, hard))
for number in range(10, 20):
    step(number)
until("cannot write")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
for number in range(20, 30):
    step(number)
until("can be written again")
assert probe.on
probe.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "INFERSCOPE_DIR": str(tmp_path / "rings")},
        capture_output=True,
        text=True,
        check=True,
    )
    path = Path(done.stdout.strip())
    reader = RingReader(path)
    found = everything(reader)
    losses = [item for item in found if isinstance(item, Loss)]
    assert sum(loss.num_frames for loss in losses) >= 20
    assert num_seen(found) == reader.words()[2]
    reader.close()
    (line,) = [line for line in done.stderr.splitlines() if "cannot write" in line]
    assert "File too large" in line
    assert "can be written again" in done.stderr


def test_health_reports_state_that_records_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    probe = Probe.open(EngineInfo(0, "test"))
    path, ring = probe.path, probe._log.ring
    assert path is not None
    assert ring is not None
    handle, ring._file = ring._file, os.open(path, os.O_RDONLY)
    probe.plan(1, start_ns=0, end_ns=0, waiting=0, running=0)
    read_only, ring._file = ring._file, handle
    os.close(read_only)
    probe.plan(2, start_ns=0, end_ns=0, waiting=0, running=0)
    probe.close()
    reader = RingReader(path)
    num_lost = sum(item.num_frames for item in everything(reader) if isinstance(item, Loss))
    reader.close()
    assert num_lost >= 1
    healths = [item for item in health_reports(path) if item.message]
    assert f"{num_lost} records left out" in healths[-1].message
    assert "Bad file descriptor" in healths[-1].message


def health_reports(path: Path) -> list[ProbeHealth]:
    reader = RingReader(path)
    frames = [item for item in everything(reader) if isinstance(item, Frame)]
    reader.close()
    records = [decode(item.code, item.payload) for item in frames]
    return [record for record in records if isinstance(record, ProbeHealth)]


def test_a_descriptor_that_was_closed_from_outside_is_never_written_to_again(
    tmp_path: Path,
) -> None:
    ring = make_ring(tmp_path)
    number = ring._file
    os.close(number)
    other = os.open(tmp_path / "precious", os.O_RDWR | os.O_CREAT)
    os.dup2(other, number)
    os.close(other)
    with pytest.raises(RingUnavailable, match="was closed from outside"):
        ring.inspect()
    assert ring.inspect() == ""
    assert not ring.write(7, b"payload")
    ring.beat(1)
    ring.close()
    assert (tmp_path / "precious").read_bytes() == b""
    os.close(number)


def test_closing_the_descriptor_from_outside_ends_the_probe_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = make_ring(tmp_path)
    probe = Probe(ring, None, EngineInfo(0, "test"))
    os.close(ring._file)
    for _ in range(2):
        probe._keeper.tend()
        probe._life.write_messages()
    assert not probe.on
    assert ["was closed from outside" in each.getMessage() for each in caplog.records] == [True]
    probe.close()


def test_a_file_system_that_fails_once_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(tmp_path)
    with monkeypatch.context() as patch:

        def stale(handle: int) -> os.stat_result:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        patch.setattr(os, "fstat", stale)
        assert "cannot be inspected" in ring.inspect()
        assert ring.inspect() == ""
    assert ring.inspect() == ""
    assert ring.write(7, b"payload")
    number = ring._file
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_closing_a_ring_closes_no_other_file_that_has_its_number(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    number = ring._file
    with (tmp_path / "precious").open("wb") as other:
        os.dup2(other.fileno(), number)
    ring.close()
    os.write(number, b"still open")
    os.close(number)


def within_the_next_write(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call something between a heartbeat's look at what is to be written and its write."""

    def interrupted(handle: int, content: bytes, num_bytes: int, offset: int) -> int:
        monkeypatch.setattr(writer, "releasing_pwrite", releasing_pwrite)
        call()
        return releasing_pwrite(handle, content, num_bytes, offset)

    monkeypatch.setattr(writer, "releasing_pwrite", interrupted)


def test_a_finaliser_that_closes_the_ring_within_a_heartbeat_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(tmp_path)
    number = ring._file

    def finaliser() -> None:
        ring.beat(0)
        ring.close()
        os.fstat(number)  # the heartbeat is about to use it

    within_the_next_write(monkeypatch, finaliser)
    ring.beat(77)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    reader = RingReader(ring.path)
    assert reader.heartbeat_ns() == 0
    reader.close()


def test_a_heartbeat_overwrites_no_newer_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make_ring(tmp_path)

    def step() -> None:  # of the writer's thread
        ring.set_pending(5)
        keyframe(ring)

    within_the_next_write(monkeypatch, step)
    ring.beat(77)
    reader = RingReader(ring.path)
    _, head, sequence, heartbeat_ns, pending_ns, _ = reader.words()
    assert (head, sequence, heartbeat_ns, pending_ns) == (ring._head, 1, 77, 5)
    assert head > 0
    reader.close()
    ring.close()


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["acquire", "write", "release"])
def test_a_handler_that_interrupts_set_pending_leaves_the_heartbeat_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, raised: type[BaseException]
) -> None:
    def handler(*_: object) -> None:
        raise raised

    def write(*arguments: Any) -> int:
        num_written = releasing_pwrite(*arguments)
        if place == "write":
            signal.raise_signal(signal.SIGALRM)
        return num_written

    ring = make_ring(tmp_path)
    lock = InterruptedLock(place)
    monkeypatch.setattr(ring, "_in_use", lock)
    monkeypatch.setattr(ring, "_pwrite", write)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(raised):
            ring.set_pending(5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert is_free(lock)


def test_at_the_end_of_the_stack_set_pending_leaves_the_heartbeat_free(tmp_path: Path) -> None:
    ring, num_raised = make_ring(tmp_path), 0

    def deep(num: int, start_ns: int) -> None:
        if num:
            deep(num - 1, start_ns)
        else:
            ring.set_pending(start_ns)

    most = sys.getrecursionlimit()
    for num in range(most // 2, most):  # calls of C functions count as well in some versions
        try:
            deep(num, num)
        except (RecursionError, ctypes.ArgumentError):
            num_raised += 1
        assert not ring._in_use._is_owned()  # type: ignore[attr-defined]
        if num_raised == 20:
            break
    assert num_raised == 20


def test_set_pending_leaves_a_use_of_the_file_around_it_as_it_is(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    with ring._in_use:
        ring.set_pending(5)
        assert ring._in_use._is_owned()  # type: ignore[attr-defined]
    other = threading.Thread(target=ring.set_pending, args=(6,))
    with ring._in_use:
        other.start()
        other.join()
        assert ring._in_use._is_owned()  # type: ignore[attr-defined]
    assert not ring._in_use._is_owned()  # type: ignore[attr-defined]
    reader = RingReader(ring.path)
    assert reader.words()[4] == 6
    reader.close()
    ring.close()


def test_descriptors_of_rings_are_out_of_the_way_of_others(tmp_path: Path) -> None:
    assert make_ring(tmp_path)._file >= 512


def test_a_repair_makes_a_keyframe_due_until_there_is_one(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    keyframe(ring)
    fill(ring, 5)
    assert not ring.wants_keyframe
    os.truncate(ring.path, 0)
    assert "shortened" in ring.inspect()
    assert ring.wants_keyframe
    ring.bytes_since_keyframe = 0  # the writer's thread was just adding to it
    assert ring.inspect() == ""
    assert ring.wants_keyframe
    keyframe(ring)
    ring.inspect()
    assert not ring.wants_keyframe
    reader = RingReader(ring.path)
    assert reader.identity.engine_id == "engine"
    found = everything(reader)
    assert num_seen(found) == 7
    assert isinstance(found[-1], Frame)
    assert found[-1].code == Keyframe.CODE
    reader.close()


@pytest.mark.parametrize("offset", [0, layout.FIXED.size, layout.IDENTITY + 20, PAGE - 8])
def test_any_part_of_the_header_that_is_overwritten_is_restored(
    tmp_path: Path, offset: int
) -> None:
    ring = make_ring(tmp_path)
    before = ring.path.read_bytes()
    with ring.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"x" * 8)
    assert "overwritten" in ring.inspect()
    assert ring.path.read_bytes() == before
    assert ring.inspect() == ""
    ring.close()


def test_a_busy_writer_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    ring = make_ring(tmp_path, capacity=MIN_CAPACITY)
    for _ in range(50):
        fill(ring, 37)
        assert ring.inspect() == ""


def test_writing_beside_a_thread_that_computes_does_not_wait_for_it() -> None:
    # `os.pwrite` hands the interpreter over: 5 ms until the other thread gives it back.
    script = """
import sys, tempfile, threading, time
from pathlib import Path
from inferscope.ring.layout import Identity
from inferscope.ring.writer import RingWriter
me = Identity("e", "core", 0, 1, "h", "b", 1, 2)
sys.setswitchinterval(0.05)
is_over = False
def compute():
    while not is_over:
        pass
with tempfile.TemporaryDirectory() as folder:
    ring = RingWriter(Path(folder) / "a.ring", me, capacity=1 << 20)
    threading.Thread(target=compute, daemon=True).start()
    began = time.monotonic()
    for _ in range(100):
        ring.write(7, bytes(200))
    print(time.monotonic() - began)
    is_over = True
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    # Handing over a hundred times would take five seconds.
    assert float(done.stdout) < 2.5


def test_a_closed_ring_writes_into_no_file_that_has_its_number(tmp_path: Path) -> None:
    # A host opens files all the time: one of them gets the number of the descriptor just closed.
    other = tmp_path / "other"
    for number in range(50):
        ring = make_ring(tmp_path, str(number))
        is_done = threading.Event()

        def beat(ring: RingWriter = ring, is_done: threading.Event = is_done) -> None:
            while not is_done.is_set():
                ring.beat(time.monotonic_ns())
                ring.inspect()
                time.sleep(1e-5)  # the last beat waits 0.2 s for the ring to be free

        beside = threading.Thread(target=beat)
        beside.start()
        descriptor = ring._file
        ring.write(5, b"x" * 100)
        ring.beat(0)
        ring.close()
        handle = os.open(other, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, descriptor)
        is_done.set()
        beside.join()
        os.close(descriptor)
        os.close(handle)
        assert other.stat().st_size == 0
        reader = RingReader(ring.path)
        assert reader.heartbeat_ns() == 0
        reader.close()


def test_a_ring_of_zeros_is_passed_at_the_speed_of_memory(tmp_path: Path) -> None:
    me = Identity("a", "core", 0, 1, "host", "", 1, 2)
    ring = RingWriter(tmp_path / "a.ring", me, capacity=8 << 20)
    while ring.sequence * (1 << 19) < 7 << 20:
        ring.write(1, bytes(1 << 19))
    ring.beat(1)
    reader = RingReader(ring.path)
    with ring.path.open("r+b") as file:
        file.seek(PAGE)
        for _ in range(6):
            file.write(bytes(1 << 20))
    began_s = time.process_time()
    found = reader.read(1 << 16)
    took_s = time.process_time() - began_s
    reader.close()
    ring.close()
    assert isinstance(found[0], Loss)
    assert sum(each.num_frames if isinstance(each, Loss) else 1 for each in found) >= 12, found
    began_s = time.process_time()
    assert not any(word for (word,) in struct.iter_unpack("<Q", bytes(1 << 20)))
    unpacking_s = time.process_time() - began_s
    assert took_s < 30 * unpacking_s  # a look at every word of the ring takes 80 times as long


def test_a_process_with_few_descriptors_has_the_highest_free_one_for_its_ring(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(400, highest + 50), hard))
    try:
        handle = with_high_number(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
        assert handle == min(400, highest + 50) - 1
        os.close(handle)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_heart_does_not_beat_into_a_file_of_the_host(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    ring = probe._log.ring
    assert ring is not None
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    os.dup2(theirs, ring._file)  # closed by mistake, and the next file gets its number
    number = ring._file
    probe._keeper.tend()
    os.close(theirs)
    os.close(number)
    assert not (tmp_path / "theirs").stat().st_size
    assert not probe.on
    probe.close()


def test_a_disk_that_fills_and_empties_is_reported_once(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    lines = []
    for number in range(20):
        ring.failure = "No space left on device" if number % 2 else ""
        lines.append(ring.inspect())
    ring.close()
    messages = list(filter(None, lines))
    assert len(messages) == 2
    assert "cannot write" in messages[0]
    assert "can be written again" in messages[1]
