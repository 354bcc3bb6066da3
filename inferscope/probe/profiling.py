"""A kernel profile on request: torch's own profiler, for seconds, in the observed process.

Never on by default. While it runs, every operation of every thread is recorded, which slows the
engine down, and writing the trace afterwards takes the interpreter for moments: this is for looking
once, not for watching. By how much, `inferscope profile` tells from the engine's own steps.
"""

from __future__ import annotations

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
_recording = threading.Lock()
"""Torch has one profiler per process, and a process may have several rings."""


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
    until_s = time.monotonic() + seconds
    with _giving_way(torch.autograd.profiler) as has_another_begun:
        found.start()
        try:
            while (left_s := until_s - time.monotonic()) > 0 and is_wanted():
                if has_another_begun.wait(min(left_s, _LOOK_S)):
                    break
        finally:
            found.stop()
    if has_another_begun.is_set():
        raise RuntimeError("the process has begun a profile of its own: this one ended for it")
    if left_s > 0:
        raise RuntimeError("the request was withdrawn")
    return found


@contextmanager
def _giving_way(autograd_profiler: Any) -> Iterator[threading.Event]:
    """Delay a torch profile of another thread until the block has ended, and set the event.

    Raises:
        RuntimeError: another profile is being recorded or prepared.
    """
    prepare = autograd_profiler._prepare_profiler
    thread = threading.get_ident()
    has_begun, is_over = threading.Event(), threading.Event()

    def prepare_in_turn(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            has_begun.set()
            is_over.wait(_MOST_WAIT_S)
        return prepare(*args, **kwargs)

    autograd_profiler._prepare_profiler = prepare_in_turn
    try:
        if autograd_profiler._is_profiler_enabled or _is_one_prepared(autograd_profiler.profile):
            raise RuntimeError("torch's profiler is in use in this process. Ask again later.")
        yield has_begun
    finally:
        if autograd_profiler._prepare_profiler is prepare_in_turn:
            autograd_profiler._prepare_profiler = prepare
        is_over.set()


def _is_one_prepared(kind: Any) -> bool:
    """Return whether a profile of this class is entered and has no results yet.

    Torch's flag is not set while a schedule warms up; a session of ours would free that one.
    """
    return any(
        issubclass(type(each), kind) and each.entered and each.kineto_results is None
        for each in gc.get_objects()
    )
