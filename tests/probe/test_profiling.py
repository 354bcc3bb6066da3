"""Where the trace of a profile is written."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.probe import profiling
from inferscope.probe.profiling import Profiling
from inferscope.ring.profile_request import (
    ask,
    error_path,
    request_path,
    requested,
    trace_path,
    withdraw,
)
from tests.collecting.running import eventually


class Trace:
    """A profile without torch."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace", encoding="ascii")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_trace_is_a_new_file_whatever_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setattr(profiling, "record", lambda seconds, **_: Trace())
    ring, precious = tmp_path / "core-0-1.ring", tmp_path / "precious"
    precious.write_text("precious", encoding="ascii")
    partial = trace_path(ring).with_suffix(".partial")
    if is_link:
        partial.symlink_to(precious)
    else:
        partial.write_text("of a killed process", encoding="ascii")
    ask(ring, 1.0)
    Profiling(ring).look()
    eventually(lambda: not request_path(ring).exists())
    assert trace_path(ring).read_text(encoding="ascii") == "trace"
    assert not trace_path(ring).is_symlink()
    assert precious.read_text(encoding="ascii") == "precious"


class TooLarge:
    """A profile that its folder has no room for."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("half a trace", encoding="ascii")
        raise OSError(errno.ENOSPC, "no space left")


def test_a_request_that_a_full_disk_leaves_unanswered_is_not_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, seen = tmp_path / "core-0-1.ring", []
    error_path(ring).mkdir()  # it cannot be written
    monkeypatch.setattr(
        profiling, "record", lambda seconds, **_: seen.append(seconds) or TooLarge()
    )
    request_path(ring).write_text("1.0\n", encoding="ascii")
    beside = Profiling(ring)
    for _ in range(3):
        beside.look()
        assert beside._thread is not None
        beside._thread.join(10)
    assert seen == [1.0]
    assert not request_path(ring).exists()
    assert not trace_path(ring).with_suffix(".partial").exists()


def test_without_a_thread_for_it_a_request_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring = tmp_path / "core-0-1.ring"
    ask(ring, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        Profiling(ring).look()
    assert not request_path(ring).exists()
    assert "new thread" in error_path(ring).read_text(encoding="utf-8")


def test_a_withdrawn_request_s_trace_does_not_answer_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = tmp_path / "core-0-1.ring"
    is_recording, may_end = threading.Event(), threading.Event()

    def record(seconds: float, *, is_wanted: Callable[[], bool]) -> Trace:
        assert is_wanted()
        is_recording.set()
        assert may_end.wait(10)
        assert not is_wanted()
        return Trace()

    monkeypatch.setattr(profiling, "record", record)
    first = ask(ring, 1.0)
    beside = Profiling(ring)
    beside.look()
    assert is_recording.wait(10)
    withdraw(ring, first)
    second = ask(ring, 2.0)
    may_end.set()
    assert beside._thread is not None
    beside._thread.join(10)
    assert requested(ring) == second
    assert not trace_path(ring).exists()
    assert not trace_path(ring).with_suffix(".partial").exists()


BESIDE_THE_HOST_S = """
import faulthandler, os, sys, threading, time
import torch, torch.profiler as torch_profiler
from inferscope.probe import profiling
from inferscope.probe.profiling import record
faulthandler.enable()
faulthandler.dump_traceback_later(60, exit=True)
torch.set_num_threads(1)
CPU = [torch_profiler.ProfilerActivity.CPU]
said = []

def ours(seconds):
    try:
        record(seconds).export_chrome_trace(sys.argv[1])
        said.append("a trace")
    except RuntimeError as error:
        said.append(str(error))

def begin(seconds):
    thread = threading.Thread(target=ours, args=(seconds,))
    thread.start()
    return thread

def begun(seconds):
    thread = begin(seconds)
    while not torch.autograd.profiler._is_profiler_enabled:
        time.sleep(0.001)
    return thread

def work(seconds):
    until, matrix = time.monotonic() + seconds, torch.ones(32, 32)
    while time.monotonic() < until:
        matrix @ matrix
        time.sleep(0.001)

def host(seconds, meanwhile=lambda: None):
    with torch_profiler.profile(activities=CPU) as found:
        meanwhile()
        work(seconds)
    assert len(found.events()) > 0

def host_by_schedule(in_warm_up):
    ready = []
    with torch_profiler.profile(
        activities=CPU, schedule=torch_profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda found: ready.append(len(found.events())),
    ) as found:
        in_warm_up()
        work(0.05)
        found.step()
        work(0.05)
        found.step()
    assert ready[0] > 0

def within_the_host_s():
    host(0.05, lambda: begin(0.05).join())

def around_the_host_s():
    thread = begun(20)
    host(0.1)
    thread.join()

def in_a_warm_up():
    host_by_schedule(lambda: begin(0.05).join())

def around_a_warm_up():
    thread = begun(20)
    host_by_schedule(lambda: None)
    thread.join()

def around_an_annotation():
    thread = begun(20)
    with torch.autograd.profiler.emit_itt():
        work(0.05)
    thread.join()

def two_of_ours():
    threads = [begin(0.2), begin(0.2)]
    for thread in threads:
        thread.join()

def in_a_child():
    thread = begun(20)
    pid = os.fork()
    if not pid:
        functions = vars(torch.autograd.profiler)
        names = "_prepare_profiler", "_run_on_profiler_start"
        is_back = not any(hasattr(functions[name], "__wrapped__") for name in names)
        os._exit(0 if is_back and profiling._recording.acquire(False) else 1)
    said.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    host(0.05)
    thread.join()

def too_large():
    profiling._MOST_BYTES = -1 << 20
    ours(5)
    profiling._MOST_BYTES = 1 << 40

found = record(0.2).profiler  # the first of a process, whose start takes a second
assert found.profiling_end_time_ns - found.profiling_start_time_ns > 200_000_000
for order in (within_the_host_s, around_the_host_s, in_a_warm_up, around_a_warm_up,
              around_an_annotation, two_of_ours, in_a_child, too_large):
    said.clear()
    order()
    host(0.05)
    ours(0.05)
    print(order.__name__, *said, sep="; ", flush=True)
"""
LARGE = "after 0.0 s of 5 s what was recorded took -1 MiB. Ask for fewer seconds."
REFUSED = "torch's profiler is in use in this process. Ask again later."
ENDED = "the process has begun a profile of its own: this one ended for it"


def test_a_profile_never_meets_one_of_the_host_s(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BESIDE_THE_HOST_S, str(tmp_path / "trace.json")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.splitlines() == [
        f"within_the_host_s; {REFUSED}; a trace",
        f"around_the_host_s; {ENDED}; a trace",
        f"in_a_warm_up; {REFUSED}; a trace",
        f"around_a_warm_up; {ENDED}; a trace",
        f"around_an_annotation; {ENDED}; a trace",
        "two_of_ours; a profile of this process is under way. Ask again later.; a trace; a trace",
        f"in_a_child; 0; {ENDED}; a trace",
        f"too_large; {LARGE}; a trace",
    ]
