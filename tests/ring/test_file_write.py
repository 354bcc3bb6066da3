"""When a write keeps the interpreter's lock: in memory, and on a local disk until one is slow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.records import StepSlices
from inferscope.ring import file_write, writer
from inferscope.ring.file_write import IN_MEMORY, PWrite, file_system, until_slow
from inferscope.ring.reader import RingReader
from tests.children import child
from tests.probe.fakes import do_step, make_ring, of


def kind_of(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY)
    kind = file_system(handle)
    os.close(handle)
    assert file_system(handle) == 0
    return kind


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setenv("INFERSCOPE_DIR", str(folder / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.on
    return probe


@pytest.mark.parametrize("is_remote", [True, False])
def test_only_on_a_remote_file_system_a_line_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_remote: bool,
) -> None:
    monkeypatch.setattr(writer, "REMOTE", {kind_of(tmp_path)} if is_remote else set())
    probe = opened(tmp_path, monkeypatch)
    assert ("network or FUSE" in caplog.text) is is_remote
    probe.close()


def releases_lock(write: PWrite, file: Path, *, num_tries: int) -> bool:
    """Return whether another thread runs Python during any of several large writes."""
    content, num_turns, is_over = bytes(1 << 22), 0, False

    def run() -> None:
        nonlocal num_turns
        while not is_over:
            num_turns += 1
            time.sleep(1e-5)  # release the interpreter's lock

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # only a thread that releases the lock loses it
    thread = threading.Thread(target=run)
    thread.start()
    handle = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(num_tries):
            before = num_turns
            assert write(handle, content, len(content), 0) == len(content)
            if num_turns != before:
                return True
        return False
    finally:
        is_over = True
        sys.setswitchinterval(interval_s)
        os.close(handle)
        thread.join()


@pytest.mark.parametrize("kind", ["in memory", "local", "remote", "unknown"])
def test_a_write_that_hardly_ever_blocks_keeps_the_interpreters_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    here = {kind_of(tmp_path)}
    for name, its_kind in (("IN_MEMORY", "in memory"), ("LOCAL", "local"), ("REMOTE", "remote")):
        monkeypatch.setattr(writer, name, here if kind == its_kind else set())
    monkeypatch.setattr(file_write, "SLOW_NS", 10**12)  # this machine may be busy
    probe = opened(tmp_path, monkeypatch)
    ring = probe._log.ring
    assert ring is not None
    if kind in ("in memory", "local"):
        assert not releases_lock(ring._pwrite, tmp_path / "file", num_tries=5)
    else:
        assert releases_lock(ring._pwrite, tmp_path / "file", num_tries=1000)
    do_step(probe, 1, [1])
    probe.close()
    assert len(of(StepSlices, ring.path)) == 1


def test_after_one_slow_write_the_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_write, "SLOW_NS", 0)
    write = until_slow()
    assert not releases_lock(write, tmp_path / "file", num_tries=1)
    monkeypatch.setattr(file_write, "SLOW_NS", 10**12)
    assert releases_lock(write, tmp_path / "file", num_tries=1000)


def test_the_heartbeat_releases_the_lock_in_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "IN_MEMORY", {kind_of(tmp_path)})
    ring = make_ring(tmp_path)
    ring._pwrite = lambda *_: pytest.fail("the heartbeat keeps the lock")
    ring.beat(123)
    reader = RingReader(ring.path)
    assert reader.heartbeat_ns() == 123
    reader.close()
    ring.close()


def test_shared_memory_is_in_memory_and_proc_is_not() -> None:
    shared = Path("/dev/shm")
    if not os.path.ismount(shared):
        pytest.skip("no /dev/shm here")
    assert kind_of(shared) in IN_MEMORY
    assert kind_of(Path("/proc")) not in IN_MEMORY


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 of its own, where this user may mount one."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 16 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["fsfreeze", "-u", folder], capture_output=True, timeout=30)  # if it still is
    subprocess.run(["umount", folder], check=True, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_frozen_file_system_stops_other_threads_once_at_most(
    disk: Path, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    probe = opened(disk, monkeypatch)
    num_steps, is_over = 0, threading.Event()

    def engine() -> None:
        nonlocal num_steps
        while not is_over.wait(0.001):
            if not is_idle:
                do_step(probe, num_steps, [1])
            num_steps += 1

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    frozen = disk.parent / "frozen"
    # Thawed by another process: this one may stand still.
    script = f"fsfreeze -f {disk}; touch {frozen}; sleep 0.5; fsfreeze -u {disk}"
    stopped_s = []
    for _ in range(2):
        with child(["sh", "-c", script]) as freezing:
            longest_s, last_s = 0.0, time.monotonic()
            while freezing.poll() is None:
                time.sleep(0.005)
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
        stopped_s.append(longest_s)
    is_over.set()
    thread.join(10)
    assert not thread.is_alive()
    assert probe.on
    probe.close()
    assert frozen.exists()
    assert stopped_s[1] < 0.3
    assert stopped_s[0] < 0.3 or not is_idle
