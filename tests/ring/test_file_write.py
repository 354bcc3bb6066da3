"""Only a write to memory keeps the interpreter's lock: any other may block."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.records import StepSlices
from inferscope.ring import writer
from inferscope.ring.file_write import IN_MEMORY, file_system, pwrite, releasing_pwrite
from tests.children import child
from tests.probe.fakes import do_step, of


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


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_only_in_memory_a_write_keeps_the_interpreters_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    monkeypatch.setattr(writer, "IN_MEMORY", {kind_of(tmp_path)} if is_in_memory else set())
    probe = opened(tmp_path, monkeypatch)
    ring = probe._log.ring
    assert ring is not None
    assert ring._pwrite is (pwrite if is_in_memory else releasing_pwrite)
    do_step(probe, 1, [1])
    probe.close()
    assert len(of(StepSlices, ring.path)) == 1


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
def test_a_frozen_file_system_stops_no_thread_but_the_one_that_writes(
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
    script = f"fsfreeze -f {disk}; touch {frozen}; sleep 1; fsfreeze -u {disk}"
    with child(["sh", "-c", script]) as freezing:
        longest_s, last_s = 0.0, time.monotonic()
        while freezing.poll() is None:
            time.sleep(0.005)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    is_over.set()
    thread.join(10)
    assert not thread.is_alive()
    assert probe.on
    probe.close()
    assert frozen.exists()
    assert longest_s < 0.6
