"""Where the trace of a profile is written, and what a profile leaves of its host."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.probe import c_library, profiling, torch_profile
from inferscope.probe.profiling import Profiling
from inferscope.ring.profile_request import (
    answer,
    error_path,
    partial_paths,
    request_path,
    requested,
    send_request,
    trace_path,
    withdraw,
)
from tests.daemon.running import eventually

TRACE = '{"traceEvents": []}\n'


class Trace:
    """A profile without torch."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(TRACE, encoding="ascii")


@pytest.mark.parametrize("name", [0, 1])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_trace_is_a_new_file_whatever_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool, name: int
) -> None:
    monkeypatch.setattr(torch_profile, "record", lambda seconds, **_: Trace())
    ring, precious = tmp_path / "core-0-1.ring", tmp_path / "precious"
    precious.write_text("precious", encoding="ascii")
    partial = partial_paths(ring)[name]
    if is_link:
        partial.symlink_to(precious)
    else:
        partial.write_text("of a killed process", encoding="ascii")
    send_request(ring, 1.0)
    Profiling(ring).poll()
    eventually(lambda: not request_path(ring).exists())
    assert trace_path(ring).read_text(encoding="ascii") == TRACE
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
        torch_profile, "record", lambda seconds, **_: seen.append(seconds) or TooLarge()
    )
    request_path(ring).write_text("1.0\n", encoding="ascii")
    beside = Profiling(ring)
    for _ in range(3):
        beside.poll()
        assert beside._thread is not None
        beside._thread.join(10)
    assert seen == [1.0]
    assert not request_path(ring).exists()
    assert not any(path.exists() for path in partial_paths(ring))


def test_a_request_that_cannot_be_removed_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, seen = tmp_path / "core-0-1.ring", []
    monkeypatch.setattr(
        torch_profile, "record", lambda seconds, **_: seen.append(seconds) or Trace()
    )
    send_request(ring, 1.0)
    beside = Profiling(ring)
    with monkeypatch.context() as patch:
        patch.setattr(
            "inferscope.probe.profiling.answer", lambda *_, **__: None
        )  # read-only folder
        for _ in range(3):
            beside.poll()
            assert beside._thread is not None
            beside._thread.join(10)
    assert seen == [1.0]
    request_path(ring).unlink()
    send_request(ring, 2.0)
    beside.poll()
    beside._thread.join(10)
    assert seen == [1.0, 2.0]


def test_a_reason_that_names_a_folder_of_any_bytes_answers_a_request(tmp_path: Path) -> None:
    """A folder's name need not be UTF-8; the request would be answered again and again."""
    ring = tmp_path / "core-0-1.ring"
    answer(ring, send_request(ring, 1.0), error="cannot be written to \udcff")
    assert not request_path(ring).exists()
    assert error_path(ring).read_text(encoding="utf-8") == "cannot be written to ?"


def test_without_a_thread_for_it_a_request_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring = tmp_path / "core-0-1.ring"
    send_request(ring, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        Profiling(ring).poll()
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

    monkeypatch.setattr(torch_profile, "record", record)
    first = send_request(ring, 1.0)
    beside = Profiling(ring)
    beside.poll()
    assert is_recording.wait(10)
    withdraw(ring, first)
    second = send_request(ring, 2.0)
    may_end.set()
    assert beside._thread is not None
    beside._thread.join(10)
    assert requested(ring) == second
    assert not trace_path(ring).exists()
    assert not any(path.exists() for path in partial_paths(ring))


class Written(Trace):
    """A profile that is written as torch writes it: under a second name first."""

    def __init__(self, content: str = TRACE) -> None:
        self.content = content
        self.rights: list[int] = []

    def export_chrome_trace(self, path: str) -> None:
        first = Path(f"{path}.tmp")
        with first.open("w", encoding="ascii") as file:
            self.rights += [stat.S_IMODE(each.stat().st_mode) for each in (first, Path(path))]
            file.write(self.content)
        first.replace(path)


def answered(ring: Path) -> str:
    """Ask for a profile, wait for the end of its thread and return the error."""
    send_request(ring, 1.0)
    beside = Profiling(ring)
    beside.poll()
    assert beside._thread is not None
    beside._thread.join(10)
    assert not request_path(ring).exists()
    assert not any(path.exists() for path in partial_paths(ring))
    error = error_path(ring)
    return error.read_text(encoding="utf-8") if error.exists() else ""


def test_a_trace_is_private_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, trace = tmp_path / "core-0-1.ring", Written()
    monkeypatch.setattr(torch_profile, "record", lambda seconds, **_: trace)
    assert answered(ring) == ""
    assert trace.rights == [0o600, 0o600]
    assert stat.S_IMODE(trace_path(ring).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", '{"traceEvents": [{"name": "aten::'])
def test_half_a_trace_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    ring = tmp_path / "core-0-1.ring"
    monkeypatch.setattr(torch_profile, "record", lambda seconds, **_: Written(content))
    assert "could not be written" in answered(ring)
    assert not trace_path(ring).exists()


def test_a_trace_beyond_the_limit_is_dropped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profiling._MOST_TRACE_BYTES == 128 << 20
    ring = tmp_path / "core-0-1.ring"
    monkeypatch.setattr(torch_profile, "record", lambda seconds, **_: Written())
    monkeypatch.setattr(profiling, "_MOST_TRACE_BYTES", len(TRACE))
    assert answered(ring) == ""
    trace_path(ring).unlink()
    monkeypatch.setattr(profiling, "_MOST_TRACE_BYTES", len(TRACE) - 1)
    error = answered(ring)
    assert error.startswith("RuntimeError: the trace of 1 s takes 0 MiB of at most 0 MiB.")
    assert not trace_path(ring).exists()


BESIDE_THE_HOST_S = """
import faulthandler, gc, os, signal, sys, threading, time
from contextlib import contextmanager
import torch, torch.profiler as torch_profiler
from inferscope.probe import c_library, torch_profile
from inferscope.probe.torch_profile import record
faulthandler.enable()
faulthandler.register(signal.SIGALRM, chain=True)
signal.alarm(200)  # faulthandler's own timer hangs at the exit of a forked child
torch.set_num_threads(1)
CPU = [torch_profiler.ProfilerActivity.CPU]
results = []

def ours(seconds):
    try:
        record(seconds).export_chrome_trace(sys.argv[1])
        results.append("a trace")
    except (RuntimeError, AttributeError) as error:
        results.append(str(error))

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
    thread = begun(200)
    host(0.1)
    thread.join()

def in_a_warm_up():
    host_by_schedule(lambda: begin(0.05).join())

def around_a_warm_up():
    thread = begun(200)
    host_by_schedule(lambda: None)
    thread.join()

def around_an_annotation():
    thread = begun(200)
    with torch.autograd.profiler.emit_itt():
        work(0.05)
    thread.join()

def two_of_ours():
    threads = [begin(0.2), begin(0.2)]
    for thread in threads:
        thread.join()

def multiply(times):
    matrix = torch.ones(4, 4)
    for _ in range(times):
        matrix @ matrix

def in_a_child():
    multiply(1)
    thread = begun(200)
    pid = os.fork()
    if not pid:
        functions = vars(torch.autograd.profiler)
        names = "_prepare_profiler", "_run_on_profiler_start"
        assert not any(hasattr(functions[name], "__wrapped__") for name in names)
        assert not functions["_is_profiler_enabled"]
        growth = c_library.Growth()
        multiply(100_000)  # 110 MB where they are recorded
        assert growth.num_bytes() < 40 << 20, growth.num_bytes()
        host(0.05)
        results.clear()
        ours(0.05)
        assert results == ["a trace"], results
        sys.exit(7)
    results.append(exit_of(pid))
    host(0.05)
    thread.join()

def exit_of(pid):
    # A child of a process that was profiled has hung in the destructors of torch.
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "it hung"

def in_a_child_afterwards():
    ours(0.05)
    pid = os.fork()
    if not pid:
        sys.exit(8)
    results.append(exit_of(pid))

@contextmanager
def instead(module, name, function):
    original = getattr(module, name)
    if function is None:
        delattr(module, name)
    else:
        setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)

def fail(*args, **kwargs):
    raise RuntimeError("of torch")

def then_fail(function):
    def both(*args, **kwargs):
        function(*args, **kwargs)
        fail()
    return both

def enabling_fails():
    with instead(torch.autograd.profiler, "_enable_profiler", fail):
        ours(5)

def preparing_fails():
    with instead(torch_profiler.profile, "prepare_trace", fail):
        ours(5)

def starting_fails_midway():
    start = torch_profiler.profile.start_trace
    with instead(torch_profiler.profile, "start_trace", then_fail(start)):
        ours(5)

def stopping_fails():
    disable = torch.autograd.profiler._disable_profiler
    with instead(torch.autograd.profiler, "_disable_profiler", then_fail(disable)):
        ours(0.05)

def a_name_is_absent():
    with instead(torch.autograd.profiler, "_run_on_profiler_start", None):
        ours(5)
        results.append(hasattr(torch.autograd.profiler._prepare_profiler, "__wrapped__"))

def a_hook_cannot_be_set():
    # The names are there when it looks, and the second is gone when it wraps them.
    def remove(*args):
        del torch.autograd.profiler._run_on_profiler_start
    start = torch.autograd.profiler._run_on_profiler_start
    with instead(c_library, "prepare", remove):
        ours(5)
    torch.autograd.profiler._run_on_profiler_start = start
    results.append(hasattr(torch.autograd.profiler._prepare_profiler, "__wrapped__"))

def it_records_one_thread_only():
    def old(**kwargs):
        raise TypeError("incompatible constructor arguments")
    with instead(torch._C._profiler, "_ExperimentalConfig", old):
        ours(5)

def ours_does_not_end():
    may_end = threading.Event()
    with instead(torch_profile, "_wait", lambda *_: may_end.wait()), instead(
        torch_profile, "_MOST_WAIT_S", 0.05
    ):
        thread = begun(5)
        try:
            host(0.05)
        except RuntimeError as error:
            results.append(str(error))
        may_end.set()
        thread.join()
    gc.collect()  # the host's profile: it is prepared, and never begins

def too_large():
    with instead(torch_profile, "_MOST_BYTES", -1 << 20):
        ours(5)

torch_profile._MOST_BYTES = 1 << 40
found = record(0.2).profiler  # the first of a process, whose start takes a second
assert found.profiling_end_time_ns - found.profiling_start_time_ns > 200_000_000
for order in (within_the_host_s, around_the_host_s, in_a_warm_up, around_a_warm_up,
              around_an_annotation, two_of_ours, in_a_child, in_a_child_afterwards,
              enabling_fails, preparing_fails, starting_fails_midway, stopping_fails,
              a_name_is_absent, a_hook_cannot_be_set, it_records_one_thread_only,
              ours_does_not_end, too_large):
    results.clear()
    order()
    host(0.05)
    ours(0.05)
    print(order.__name__, *results, sep="; ", flush=True)
"""
LARGE = "the process grew by more than -1 MiB in the first 0.0 s of 5 s. Ask for fewer seconds."
ABSENT = (
    "cannot be profiled from outside: it has no torch.autograd.profiler._run_on_profiler_start. "
    "Use torch.profiler in the program itself."
)
ONE_THREAD = (
    "cannot be profiled from outside: it does not record all threads. "
    "Use torch.profiler in the program itself."
)
ENDLESS = "a profile that `inferscope profile` asked for does not end. Try again."
REFUSED = "torch's profiler is in use in this process. Ask again later."
ENDED = "the process has begun a profile of its own: this one ended for it"


GONE = "module 'torch.autograd.profiler' has no attribute '_run_on_profiler_start'"


@pytest.mark.thorough
def test_a_profile_never_meets_one_of_the_host_s(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BESIDE_THE_HOST_S, str(tmp_path / "trace.json")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    version = importlib.metadata.version("torch")
    assert run.stdout.splitlines() == [
        f"within_the_host_s; {REFUSED}; a trace",
        f"around_the_host_s; {ENDED}; a trace",
        f"in_a_warm_up; {REFUSED}; a trace",
        f"around_a_warm_up; {ENDED}; a trace",
        f"around_an_annotation; {ENDED}; a trace",
        "two_of_ours; a profile of this process is under way. Ask again later.; a trace; a trace",
        f"in_a_child; 7; {ENDED}; a trace",
        "in_a_child_afterwards; a trace; 8; a trace",
        "enabling_fails; of torch; a trace",
        "preparing_fails; of torch; a trace",
        "starting_fails_midway; of torch; a trace",
        "stopping_fails; of torch; a trace",
        f"a_name_is_absent; torch {version} {ABSENT}; False; a trace",
        f"a_hook_cannot_be_set; {GONE}; False; a trace",
        f"it_records_one_thread_only; torch {version} {ONE_THREAD}; a trace",
        f"ours_does_not_end; {ENDLESS}; {ENDED}; a trace",
        f"too_large; {LARGE}; a trace",
    ]


EXITING = """
import os, sys, threading, time
from pathlib import Path
import torch
from inferscope.probe import profiling, torch_profile
from inferscope.ring.profile_request import send_request, partial_paths
torch.set_num_threads(1)
ring = Path(sys.argv[1])
send_request(ring, 30.0)
beside = profiling.Profiling(ring)
beside.poll()
print("running", flush=True)
"""
RECORDING = """
while torch_profile._session is None or not torch.autograd.profiler._is_profiler_enabled:
    time.sleep(0.001)
"""
IMPORTING = """
from types import SimpleNamespace
is_importing = threading.Event()
def endless(name):
    is_importing.set()
    threading.Event().wait()
torch_profile.importlib = SimpleNamespace(import_module=endless)
profiling._MOST_EXIT_WAIT_S = 1000.0
"""
EXPORTING = """
class Trace:
    def export_chrome_trace(self, path):
        Path(path).write_text("half a trace")
        at_export.set()
        may_go_on.wait()
def record(seconds, **_):
    return Trace()
at_export, may_go_on = threading.Event(), threading.Event()
torch_profile.record = record
profiling._MOST_EXIT_WAIT_S = 0.1
"""


def exited(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a host that exits, and return its end and the files beside its ring."""
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder / "core-0-1.ring")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return run, sorted(path.name for path in folder.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["", RECORDING], ids=["starting", "recording"])
def test_a_host_exits_with_its_own_status_during_a_profile(tmp_path: Path, when: str) -> None:
    run, names = exited(tmp_path, f"{EXITING}{when}sys.exit(3)\n")
    assert run.returncode == 3, run.stderr[-2000:]
    assert names == ["core-0-1.profile-error"]
    error = (tmp_path / names[0]).read_text(encoding="utf-8")
    assert error.endswith("the process ended during the profile")


@pytest.mark.thorough
def test_a_host_that_exits_does_not_wait_for_an_import(tmp_path: Path) -> None:
    start, end = EXITING.split("ring =")
    script = f"{start}{IMPORTING}ring ={end}is_importing.wait()\nsys.exit(3)\n"
    run, names = exited(tmp_path, script)
    assert run.returncode == 3, run.stderr[-2000:]
    assert names == ["core-0-1.profile-error"]


@pytest.mark.thorough
def test_a_host_that_exits_while_a_trace_is_written_leaves_none(tmp_path: Path) -> None:
    start, end = EXITING.split("ring =")
    script = f"{start}{EXPORTING}ring ={end}at_export.wait()\nsys.exit(3)\n"
    run, names = exited(tmp_path, script)
    assert run.returncode == 3, run.stderr[-2000:]
    assert names == ["core-0-1.profile-error"]


def test_no_profile_begins_in_a_process_that_exits(tmp_path: Path) -> None:
    run, names = exited(tmp_path, f"import atexit\n{NONE_BEGINS}")
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == "the process ended during the profile\n"
    assert names == ["core-0-1.profile"]


NONE_BEGINS = """
def at_last():
    beside = profiling.Profiling(ring)
    beside.poll()
    assert beside._thread is None
    try:
        torch_profile.record(5)
    except RuntimeError as error:
        print(error)
atexit.register(at_last)  # before the probe's, so it runs after it
import sys
from pathlib import Path
from types import ModuleType
from inferscope.probe import profiling, torch_profile
from inferscope.ring.profile_request import send_request
ring = Path(sys.argv[1])
send_request(ring, 5.0)
sys.modules["torch"] = ModuleType("torch")
"""

FREED = """
import gc, sys, time
from pathlib import Path
import torch
from inferscope.probe import c_library, profiling
from inferscope.ring.profile_request import send_request, error_path, trace_path
gc.disable()  # as some hosts do
torch.set_num_threads(1)
ring = Path(sys.argv[1])

def profiled(times):
    send_request(ring, 30.0)
    beside = profiling.Profiling(ring)
    beside.poll()
    matrix = torch.ones(4, 4)
    while not torch.autograd.profiler._is_profiler_enabled:
        assert beside._thread.is_alive()
        time.sleep(0.001)
    for _ in range(times):
        matrix @ matrix
    profiling.torch_profile._session.end("enough")
    beside._thread.join()
    return error_path(ring).read_text()

assert profiled(1) == "RuntimeError: enough"
for _ in range(2):
    growth = c_library.Growth()
    assert profiled(20_000) == "RuntimeError: enough"
    print(growth.num_bytes() >> 20)
growth = c_library.Growth()
send_request(ring, 0.05)
beside = profiling.Profiling(ring)
beside.poll()
matrix = torch.ones(4, 4)
while beside._thread.is_alive():
    matrix @ matrix
assert trace_path(ring).exists()
print(growth.num_bytes() >> 20)
"""


@pytest.mark.thorough
def test_a_profile_gives_its_memory_back(tmp_path: Path) -> None:
    run, _ = exited(tmp_path, FREED)
    assert run.returncode == 0, run.stderr[-2000:]
    grown_mib = [int(line) for line in run.stdout.split()]
    assert len(grown_mib) == 3
    assert max(grown_mib) < 60, "some 150 MiB where it waits for a collection"


def test_growth_is_seen_in_heap_that_was_freed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_library, "_SLOW_S", 60.0)
    freed = [bytes(100_000) for _ in range(400)]
    kept = [bytes(100_000)]  # the heap does not shrink below it
    freed.clear()
    growth = c_library.Growth()
    kept += [bytes(100_000) for _ in range(400)]
    assert growth.num_bytes() > 30 << 20


def test_a_heap_that_takes_long_to_count_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c_library, "_SLOW_S", -1.0)
    growth = c_library.Growth()
    assert growth._mallinfo2 is None
    kept = bytearray(50 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    assert growth.num_bytes() > 40 << 20


STREAMS = """
import ctypes, os, sys
from inferscope.probe import c_library
libc = ctypes.CDLL(None)
libc.puts(b"an earlier line")
def crash():
    os.abort()
handler = ctypes.CFUNCTYPE(None)(crash)
libc.on_exit(handler, None)
c_library.skip_destructors()
print("of Python")
sys.exit(5)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="not glibc")
def test_an_exit_without_destructors_keeps_the_output_and_the_status(tmp_path: Path) -> None:
    run, _ = exited(tmp_path, STREAMS)
    assert run.returncode == 5, run.stderr
    assert sorted(run.stdout.splitlines()) == ["an earlier line", "of Python"]
