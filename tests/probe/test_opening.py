from __future__ import annotations

import _thread
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from msgspec.structs import replace

from inferscope.host_signals import start_thread
from inferscope.probe import EngineInfo, Probe
from inferscope.probe.budget import BUDGET_SHARE, budget_share
from inferscope.probe.identity import engine_id
from inferscope.records import CostTable, RequestEvent, StepSlices
from inferscope.ring.discovery import file_name, find_rings, make_private
from tests.probe.fakes import do_step, of
from tests.ring.test_damage import until

INFO = EngineInfo(0, "test")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "engine")
    monkeypatch.delenv("INFERSCOPE", raising=False)


def test_two_probes_of_one_role_have_a_ring_each() -> None:
    first, second = Probe.open(INFO), Probe.open(INFO)
    assert first.path is not None
    assert second.path is not None
    assert second.path.name == first.path.name.replace(".ring", ".2.ring")
    do_step(second, 1, [1])
    assert not of(StepSlices, first.path)
    assert len(of(StepSlices, second.path)) == 1
    first.close()
    second.close()


def test_files_are_private_and_a_configured_group_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probe = Probe.open(INFO)
    assert probe.path is not None
    modes = [path.stat().st_mode & 0o777 for path in (probe.path, probe.path.parent)]
    assert modes == [0o600, 0o700]
    probe.close()
    monkeypatch.setenv("INFERSCOPE_GROUP", str(os.getgid()))
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "shared"))
    probe = Probe.open(INFO)
    assert probe.path is not None
    modes = [path.stat().st_mode & 0o777 for path in (probe.path, probe.path.parent)]
    assert modes == [0o640, 0o750]
    probe.close()


@pytest.mark.parametrize("given", ["../../etc", "a/b", ".", "..", "x" * 500, "\udcff", "a b"])
def test_an_engine_id_or_role_is_never_a_path(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "INFERSCOPE_ENGINE_ID": given})
    safe = engine_id()
    assert safe == engine_id() == file_name(given)
    assert "/" not in safe
    assert not safe.startswith(".")
    assert len(safe) < 120
    probe = Probe.open(INFO, role="../core")
    assert probe.path is not None
    assert probe.path.parent.parent == Path(os.environ["INFERSCOPE_DIR"])
    probe.close()


@pytest.mark.parametrize("given", ["models/\udcff", "x" * 5000, "\ud800a", "modèle"])
def test_engine_named_by_any_path_is_recorded(given: str) -> None:
    probe = Probe.open(replace(INFO, model=given), role=given, engine_id=given)
    other = Probe.open(INFO, engine_id=f"{given}\udcfe")
    assert probe.path is not None
    assert other.path is not None
    assert probe.path.parent != other.path.parent
    probe.queued("a", prompt_tokens=3)
    probe.close()
    other.close()
    assert [event.prompt_tokens for event in of(RequestEvent, probe.path)] == [3]
    (info,) = {info.model for info in of(EngineInfo, probe.path)}
    assert info.encode()


def test_distinct_names_that_look_alike_stay_distinct() -> None:
    assert file_name("a/b") != file_name("a b")
    assert file_name("plain-1.2_x") == "plain-1.2_x"


def test_switched_off_by_the_environment_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERSCOPE", "0")
    probe = Probe.open(INFO)
    assert not probe.on
    assert probe.path is None
    assert not (tmp_path / "rings").exists()


@pytest.mark.parametrize("size", ["many", "-3", "nan", "inf", "0", "1e30"])
def test_a_size_that_is_none_is_reported_and_replaced(
    size: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERSCOPE_RING_MB", size)
    monkeypatch.setattr("inferscope.probe.opening.DEFAULT_RING_MB", 2)
    probe = Probe.open(INFO)
    assert probe.on
    assert probe._log.ring is not None
    assert probe._log.ring.capacity == 2 << 20
    assert f"INFERSCOPE_RING_MB={size} is not a size" in caplog.text
    probe.close()


def test_where_no_folder_can_be_made_the_engine_runs_unobserved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "file" / "rings"))
    with caplog.at_level(logging.WARNING):
        probe = Probe.open(INFO)
    assert not probe.on
    do_step(probe, 1, [1])
    assert len(caplog.records) == 1
    assert "Set INFERSCOPE_DIR" in caplog.text


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OverflowError("too large")])
def test_trouble_with_tidying_up_does_not_keep_a_probe_from_opening(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(folder: Path) -> int:
        raise error

    monkeypatch.setattr("inferscope.probe.opening.remove_old_rings", fails)
    probe = Probe.open(INFO)
    assert probe.on
    probe.close()


@pytest.mark.parametrize("share", ["nan", "-1", "0", "much"])
def test_a_budget_that_is_no_share_is_reported_and_replaced(
    share: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERSCOPE_BUDGET", share)
    assert budget_share() == BUDGET_SHARE
    assert f"INFERSCOPE_BUDGET={share} is not a share" in caplog.text
    monkeypatch.setenv("INFERSCOPE_BUDGET", "0.5")
    assert budget_share() == 0.5


def test_a_relative_folder_stays_the_same_when_the_host_changes_its_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFERSCOPE_DIR", "rings")
    probe = Probe.open(INFO)
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = Probe.open(INFO)  # as a child process would
    assert probe.path is not None
    assert second.path is not None
    assert probe.path.parent == second.path.parent == tmp_path / "rings" / "engine"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == []
    probe.close()
    second.close()


def test_an_interrupt_while_a_probe_opens_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*given: object) -> tuple[CostTable, ...]:
        os.kill(os.getpid(), signal.SIGINT)
        return ()

    monkeypatch.setattr("inferscope.probe.probe._cost_tables", interrupted)
    num_open = len(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Probe.open(INFO)
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: not list((tmp_path / "rings").rglob("*.*")))
    until(lambda: len(os.listdir("/proc/self/fd")) == num_open)


def test_a_ring_that_is_not_made_in_time_blocks_nothing_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    goes_on = threading.Event()

    def waits(*given: object) -> tuple[CostTable, ...]:
        goes_on.wait(60)  # a frozen disk, or a finaliser that waits for a lock of the caller's
        return ()

    monkeypatch.setattr("inferscope.probe.opening.PATIENCE_S", 0.05)
    monkeypatch.setattr("inferscope.probe.probe._cost_tables", waits)
    num_open = len(os.listdir("/proc/self/fd"))
    assert not Probe.open(INFO).on
    assert "not recording: no ring could be opened within" in caplog.text
    goes_on.set()
    until(lambda: not list((tmp_path / "rings").rglob("*.*")))
    until(lambda: len(os.listdir("/proc/self/fd")) == num_open)


WAITING = """
import os, signal, sys, time
from inferscope.probe import EngineInfo, Probe
from inferscope.probe.host_log import warn

reading, writing = os.pipe()
os.set_blocking(writing, False)
try:
    while True:
        os.write(writing, bytes(4096))
except BlockingIOError:
    os.dup2(writing, 2)
probe = Probe.open(EngineInfo(0, "test"))
sys.setswitchinterval(60)  # the thread that is started next does nothing before the signal comes
warn("written by a thread that waits for room")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.kill(os.getpid(), signal.SIGTERM)
sys.setswitchinterval(0.005)
signal.sigwait({signal.SIGTERM})
until_s = time.monotonic() + 30
while len(os.listdir("/proc/self/task")) > 3 and time.monotonic() < until_s:
    time.sleep(0.01)  # the thread that opened the ring is ending
print(probe.on, len(os.listdir("/proc/self/task")), flush=True)
"""


@pytest.mark.process
def test_a_signal_that_the_host_blocks_after_opening_is_left_to_the_host() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True 3\n")


def test_a_thread_never_runs_with_the_signals_that_its_starter_leaves_open() -> None:
    masks: list[set[int]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start_thread(lambda kind: masks.append(signal.pthread_sigmask(kind, ())), signal.SIG_BLOCK)
    until(lambda: bool(masks))
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM} <= masks[0]
    assert not {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT} & masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_signal_that_comes_as_a_thread_is_started_reaches_the_host_s_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(run: Callable[..., object], args: tuple[object, ...]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    def handle(*_: object) -> None:
        raise TimeoutError("of the host")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handled = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError, match="of the host"):
            start_thread(print)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.signal(signal.SIGUSR1, handled)


def test_where_greenlets_stand_for_threads_the_hosts_thread_blocks_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(run: Callable[..., object], args: tuple[object, ...]) -> int:
        run(*args)  # in the calling thread, as gevent does
        return 1

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.setattr("inferscope.host_signals._thread.start_new_thread", start)
    try:
        Probe.open(INFO).close()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize("num_times", [1, 3, 4])
def test_a_folder_that_a_cleanup_removes_meanwhile_is_made_again(
    monkeypatch: pytest.MonkeyPatch, num_times: int
) -> None:
    left = [num_times]

    def removed(folder: Path, *, group_id: int | None = None) -> str:
        line = make_private(folder, group_id=group_id)
        if folder.name == "engine" and left[0]:
            left[0] -= 1
            folder.rmdir()  # as another process's `remove_old_rings` does
        return line

    monkeypatch.setattr("inferscope.probe.opening.make_private", removed)
    probe = Probe.open(INFO)
    assert probe.on == (num_times <= 3)
    probe.close()


def test_a_probe_without_its_thread_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("inferscope.probe.housekeeping.threading.Thread", fails)
    assert not Probe.open(INFO).on
    assert not list((tmp_path / "rings" / "engine").iterdir())


LIMITED = """
import os, resource, sys, logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "test"))
for step in range(3000):
    probe.plan(step, start_ns=0, end_ns=0, waiting=0, running=0)
print(probe.on, probe._log.ring.capacity if probe._log.ring else None)
"""


@pytest.mark.process
def test_with_little_room_the_ring_is_smaller_and_with_none_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERSCOPE_RING_MB", "64")
    for limit, ending in ((3 << 20, "True 1048576"), (100_000, "False None")):
        command = [sys.executable, "-c", LIMITED, str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        *lines, last = done.stdout.splitlines()
        assert last == ending
        assert len(lines) == 1
        assert "room" in lines[0] or "no space" in lines[0]
    assert not list((tmp_path / "rings").glob("**/*.partial"))


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_on_a_full_file_system_the_probe_takes_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setenv("INFERSCOPE_DIR", str(small))
        monkeypatch.setenv("INFERSCOPE_RING_MB", "64")
        probe = Probe.open(INFO)
        assert probe.on
        for step in range(20_000):
            do_step(probe, step, [1, 2, 3])
        assert probe.on
        probe.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_ranks_number_may_be_numpys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.1")
    probe = Probe.open(EngineInfo(0, "test"), rank=cast(int, np.int64(3)))
    assert probe.path is not None
    assert probe.path.name.startswith("core-3-")
    probe.close()
    assert not Probe.open(EngineInfo(0, "test"), rank=cast(int, "../../3")).on


@pytest.mark.parametrize(("rank", "recorded"), [(-1, 0), (1 << 62, (1 << 32) - 1)])
def test_a_rank_out_of_range_is_clamped(tmp_path: Path, rank: int, recorded: int) -> None:
    probe = Probe.open(INFO, rank=rank)
    assert probe.on
    assert [ring.identity.rank for ring in find_rings(tmp_path / "rings")] == [recorded]
    probe.close()


AT_EXIT = """
import sys, types
from inferscope.probe import EngineInfo, Probe, opening
opening.PATIENCE_S = 3600.0
class Last:
    def __del__(self, open=Probe.open, info=EngineInfo(0, "test"), print=print):
        print(open(info).on, flush=True)
sys.modules["last"] = types.ModuleType("last")
sys.modules["last"].last = Last()
"""


@pytest.mark.process
def test_a_finaliser_of_the_interpreters_end_gets_a_disabled_probe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
