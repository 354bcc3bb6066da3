"""A kernel profile on request: torch's own profiler, for seconds, in the observed process.

Never on by default. While it runs, every operation of every thread is recorded, which slows the
engine down, and writing the trace afterwards takes the interpreter for moments: this is for looking
once, not for watching. By how much, `inferscope profile` tells from the engine's own steps.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inferscope.ring.profile_request import (
    Request,
    answer,
    is_pending,
    requested,
    trace_path,
)

_MOST_WAIT_S = 30.0
"""A host that begins a profile of its own waits for the end of ours, at most for this long."""
_LOOK_S = 0.5
_MOST_BYTES = 1 << 30
"""A profile ends when the process has grown by this much: torch keeps what it records in memory,
and needs as much again to make the trace."""
_recording = threading.Lock()
"""Torch has one profiler per process, and a process may have several rings."""
_replaced: list[tuple[Any, str, Any]] = []
"""Functions of torch that stand aside while a profile is recorded: module, name, torch's own."""


class Profiling:
    """Answers requests for profiles, one at a time; nothing here raises."""

    def __init__(self, ring_path: Path) -> None:
        self._ring_path = ring_path
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin with a profile if one is asked for; called every 100 ms, beside the engine."""
        if self._thread is not None and self._thread.is_alive():
            return
        request = requested(self._ring_path)
        if request is None:
            return
        # A thread of its own: the keeper's heart must go on, and start and stop are one thread's.
        thread = threading.Thread(
            target=self._profile, args=(request,), name="inferscope-profile", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            answer(self._ring_path, request, error=str(error))
            return
        self._thread = thread

    def _profile(self, request: Request) -> None:
        ring_path = self._ring_path
        path = trace_path(ring_path)
        partial = path.with_suffix(".partial")
        try:
            trace = record(request.seconds, is_wanted=lambda: is_pending(ring_path, request))
            partial.unlink(missing_ok=True)  # of an earlier profile, or a link that is not ours
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            trace.export_chrome_trace(str(partial))
            partial.chmod(0o600)
            if is_pending(ring_path, request):  # else the trace would be the next request's answer
                partial.replace(path)
        except Exception as error:  # of torch's, of any kind: the engine goes on
            answer(ring_path, request, error=f"{type(error).__name__}: {error}")
        else:
            answer(ring_path, request)
        finally:
            with suppress(OSError):  # half a trace, of which the disk may be full
                partial.unlink(missing_ok=True)


def record(seconds: float, *, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """Profile this process, all its threads and devices; return torch's profile.

    Two sessions at once end the process: torch frees the one while the other uses it. So none is
    begun beside another, and ours ends as soon as the host begins one.

    Args:
        seconds: to record.
        is_wanted: called twice a second; where it returns False the profile ends.

    Raises:
        RuntimeError: torch is not loaded here, or there is another profile in this process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise RuntimeError("this process has not loaded torch: there is nothing to profile in it")
    if not _recording.acquire(blocking=False):
        raise RuntimeError("a profile of this process is under way. Ask again later.")
    try:
        return _session(torch, seconds, is_wanted)
    finally:
        _recording.release()


def _session(torch: Any, seconds: float, is_wanted: Callable[[], bool]) -> Any:
    profiler: Any = importlib.import_module("torch.profiler")
    kinds = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append(profiler.ProfilerActivity.CUDA)
    # Without it only the thread that starts the profiler is seen, and that is not the engine's.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    found = profiler.profile(activities=kinds, experimental_config=config)
    is_large = False
    with _giving_way(torch.autograd.profiler) as has_another_begun:
        most_bytes = _resident_bytes() + _MOST_BYTES
        found.start()
        # Its stop would synchronise this thread's device, which may be none of the model's: that
        # makes a context there, and breaks a graph that another thread captures.
        found.profiler.use_device = None
        until_s = time.monotonic() + seconds  # the first start of a process takes a second
        try:
            while (left_s := until_s - time.monotonic()) > 0 and is_wanted():
                is_large = _resident_bytes() > most_bytes
                if is_large or has_another_begun.wait(min(left_s, _LOOK_S)):
                    break
        finally:
            found.stop()
    if has_another_begun.is_set():
        raise RuntimeError("the process has begun a profile of its own: this one ended for it")
    if is_large:
        after = f"{max(0.0, seconds - left_s):.1f} s of {seconds:g} s"
        size = f"{_MOST_BYTES >> 20:,} MiB"
        raise RuntimeError(f"after {after} what was recorded took {size}. Ask for fewer seconds.")
    if left_s > 0:
        raise RuntimeError("the request was withdrawn")
    return found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _giving_way(autograd_profiler: Any) -> Iterator[threading.Event]:
    """Delay a torch profile of another thread until the block has ended, and set the event.

    Raises:
        RuntimeError: another profile is being recorded or prepared.
    """
    thread = threading.get_ident()
    has_begun, is_over = threading.Event(), threading.Event()

    def in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait_first(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                has_begun.set()
                is_over.wait(_MOST_WAIT_S)
            return original(*args, **kwargs)

        return wait_first

    # A schedule calls the first before its warm-up; `emit_itt` and `emit_nvtx` the second alone.
    for name in ("_prepare_profiler", "_run_on_profiler_start"):
        original = getattr(autograd_profiler, name)
        _replaced.append((autograd_profiler, name, original))
        setattr(autograd_profiler, name, in_turn(original))
    try:
        if autograd_profiler._is_profiler_enabled or _is_one_prepared(autograd_profiler.profile):
            raise RuntimeError("torch's profiler is in use in this process. Ask again later.")
        yield has_begun
    finally:
        _put_back()
        is_over.set()


def _put_back() -> None:
    while _replaced:
        module, name, original = _replaced.pop()
        if getattr(getattr(module, name), "__wrapped__", None) is original:
            setattr(module, name, original)


def _is_one_prepared(kind: Any) -> bool:
    """Return whether a profile of this class is entered and has no results yet.

    Torch's flag is not set while a schedule warms up; a session of ours would free that one.
    An instance refers to its class. `gc.get_objects` would keep all objects of the host alive for
    a moment, and run finalisers of some on this thread.
    """
    kinds = [kind]
    for each in kinds:
        kinds += each.__subclasses__()
        for found in gc.get_referrers(each):
            if type(found) is each and found.entered and found.kineto_results is None:
                return True
    return False


def _forget_recording() -> None:
    """Leave a profile that was recorded at a fork to the parent: the thread of it is not here."""
    global _recording
    _recording = threading.Lock()
    _put_back()


os.register_at_fork(after_in_child=_forget_recording)
