"""One session of torch's profiler in the observed process, over all its threads and devices.

Torch has one profiler per process, and the process is not ours. So a session gives way to one of
the host, is stopped before the host exits, and is forgotten by a child that the host forks.
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
from typing import Any

from inferscope.probe import c_library

ENDING = "the process ended during the profile"
_BEGUN = "the process has begun a profile of its own: this one ended for it"
_MOST_WAIT_S = 30.0
"""A host that begins a profile of its own waits for the end of ours, at most for this long."""
_MOST_IMPORT_WAIT_S = 0.2
"""An exiting process waits for a profile that is not started yet, at most for this long."""
_LOOK_S = 0.1
_MOST_BYTES = 128 << 20
"""Largest growth of the process in bytes while it records: torch keeps what it records in memory,
and needs up to eight times as much to make the trace."""
_NEEDED = (
    *("_prepare_profiler", "_run_on_profiler_start", "_run_on_profiler_stop"),
    *("_is_profiler_enabled", "profile"),
)
"""Names of `torch.autograd.profiler` that are used here."""

_recording = threading.Lock()
"""Held by the session under way: a process may have several rings."""
_session: _Session | None = None
_is_ending = False
_has_started = False
"""Whether a session was started in this process or in one that it was forked from."""


def record(seconds: float, *, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """Profile this process, all its threads and devices; return torch's profile.

    Two sessions at once end the process: torch frees the one while the other uses it. So none is
    begun beside another, and ours ends as soon as the host begins one.

    Args:
        seconds: to record.
        is_wanted: called ten times a second; where it returns False the profile ends.

    Raises:
        RuntimeError: torch is not loaded here, its version lacks what is needed, there is another
            profile in this process, or the recording ended early.
    """
    global _session
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise RuntimeError("this process has not loaded torch: there is nothing to profile in it")
    lock = _recording
    if not lock.acquire(blocking=False):
        raise RuntimeError("a profile of this process is under way. Ask again later.")
    session = _session = _Session()
    try:
        if _is_ending:  # looked at after the session can be seen: it is ended there otherwise
            raise RuntimeError(ENDING)
        return _record(session, torch, seconds, is_wanted)
    finally:
        _session = None
        session.is_over.set()
        lock.release()


class _Session:
    """A recording under way, and why it has to end early."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.reason = ""
        self.wake = threading.Event()
        self.is_over = threading.Event()
        self.profile: Any = None
        """Torch's profile from before its start until it has stopped."""
        self.replaced: list[tuple[Any, str, Any]] = []
        """Functions of torch that stand aside meanwhile: module, name, torch's own."""

    def end(self, reason: str) -> None:
        """End the recording for a reason; the first one counts."""
        self.reason = self.reason or reason
        self.wake.set()


def _record(session: _Session, torch: Any, seconds: float, is_wanted: Callable[[], bool]) -> Any:
    global _has_started
    profiler: Any = importlib.import_module("torch.profiler")
    # The start imports it, which takes seconds; a host that exits meanwhile need not wait for that.
    with suppress(ImportError, AttributeError):
        importlib.import_module(f"{torch._inductor.__name__}.config")
    found = _prepared(torch, profiler)
    c_library.prepare()
    with _giving_way(session, torch.autograd.profiler):
        session.profile = found
        if session.reason:  # looked at after the profile can be seen: see `end`
            raise RuntimeError(session.reason)
        _has_started = True
        try:
            try:
                found.start()
                # Its stop would synchronise this thread's device, which may be none of the
                # model's: that makes a context there, and breaks a graph that another thread
                # captures.
                found.profiler.use_device = None
                _wait(session, seconds, is_wanted)
            finally:
                _stop(found, torch.autograd.profiler)
                session.profile = None
            if session.reason:
                raise RuntimeError(session.reason)
        except BaseException:
            release(found)
            raise
    return found


def _prepared(torch: Any, profiler: Any) -> Any:
    """Return a profile of torch's that is not started.

    Raises:
        RuntimeError: this version of torch lacks what is needed.
    """
    missing = [name for name in _NEEDED if not hasattr(torch.autograd.profiler, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} cannot be profiled from outside: it has no "
            f"torch.autograd.profiler.{missing[0]}. Use torch.profiler in the program itself."
        )
    kinds = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append(profiler.ProfilerActivity.CUDA)
    try:
        # Without it only the thread that starts the profiler is seen, and that is not the engine's.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        raise RuntimeError(
            f"torch {torch.__version__} cannot be profiled from outside: it does not record all "
            "threads. Use torch.profiler in the program itself."
        ) from None
    return profiler.profile(activities=kinds, experimental_config=config)


def _wait(session: _Session, seconds: float, is_wanted: Callable[[], bool]) -> None:
    """Wait until the seconds are over, or the session has to end."""
    growth = c_library.Growth()
    until_s = time.monotonic() + seconds  # the first start of a process takes a second
    while (left_s := until_s - time.monotonic()) > 0 and not session.reason:
        if growth.num_bytes() > _MOST_BYTES:
            session.end(
                f"the process grew by more than {_MOST_BYTES >> 20:,} MiB in the first "
                f"{max(0.0, seconds - left_s):.1f} s of {seconds:g} s. Ask for fewer seconds."
            )
        elif not is_wanted():
            session.end("the request was withdrawn")
        else:
            session.wake.wait(min(left_s, _LOOK_S))


def _stop(found: Any, autograd_profiler: Any) -> None:
    """Stop a profile that may not have been started, or not wholly."""
    try:
        # A stop without a start would end another session.
        if getattr(found.profiler, "profiling_start_time_ns", 0):
            found.stop()
    finally:
        autograd_profiler._run_on_profiler_stop()  # else every later profile is refused


def release(found: Any) -> None:
    """Free what a profile recorded: its objects refer to each other, and wait for a collection.

    The host may have switched the collector off, and eight times the recorded bytes are at stake.
    """
    inner = getattr(found, "profiler", None)
    if inner is not None:
        with suppress(Exception):
            inner.entered, inner.kineto_results = False, None
            found.profiler = None


@contextmanager
def _giving_way(session: _Session, autograd_profiler: Any) -> Iterator[None]:
    """Delay a torch profile of another thread until the session is over, and end the session.

    Raises:
        RuntimeError: another profile is being recorded or prepared.
    """

    def in_turn(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait_first(*args: Any, **kwargs: Any) -> Any:
            if _session is session and threading.get_ident() != session.thread_id:
                session.end(_BEGUN)
                if not session.is_over.wait(_MOST_WAIT_S):
                    raise RuntimeError(  # the process would end in torch, which has one profiler
                        "a profile that `inferscope profile` asked for does not end. Try again."
                    )
            return original(*args, **kwargs)

        return wait_first

    try:
        # A schedule calls the first before its warm-up; `emit_itt` and `emit_nvtx` the second
        # alone.
        for name in ("_prepare_profiler", "_run_on_profiler_start"):
            original = getattr(autograd_profiler, name)
            session.replaced.append((autograd_profiler, name, original))
            setattr(autograd_profiler, name, in_turn(original))
        if autograd_profiler._is_profiler_enabled or _is_one_prepared(autograd_profiler.profile):
            raise RuntimeError("torch's profiler is in use in this process. Ask again later.")
        yield
    finally:
        _put_back(session)


def _put_back(session: _Session) -> None:
    while session.replaced:
        module, name, original = session.replaced.pop()
        if getattr(getattr(module, name, None), "__wrapped__", None) is original:
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


def end(until_s: float) -> bool:
    """End the session under way before the interpreter ends, and begin none from now on.

    Torch crashes in the destructor of a recording that is left. To stop it takes up to seconds.

    Args:
        until_s: monotonic time up to which to wait.

    Returns:
        Whether no session is under way any longer.
    """
    global _is_ending
    _is_ending = True
    session = _session
    if session is None:
        return True
    session.end(ENDING)
    if session.profile is None:  # it does not start any longer
        until_s = min(until_s, time.monotonic() + _MOST_IMPORT_WAIT_S)
    return session.is_over.wait(max(0.0, until_s - time.monotonic()))


def is_ending() -> bool:
    """Return whether `end` was called."""
    return _is_ending


def _forget_recording() -> None:
    """Leave a profile that was recorded at a fork to the parent: the thread of it is not here."""
    global _recording, _session, _is_ending
    session, _session = _session, None
    _recording = threading.Lock()
    _is_ending = False
    if session is not None:
        _put_back(session)
        if session.profile is not None:
            with suppress(Exception):
                _forget(session.profile)
    if _has_started:
        # At exit torch would wait for its profiler's thread, which is not here, for ever.
        c_library.skip_destructors()


def _forget(found: Any) -> None:
    """End a recording in a forked child, where a stop would call CUDA.

    Callbacks of the host are removed with the profiler's: torch does not record their owners.
    """
    torch: Any = sys.modules["torch"]
    try:
        torch._C._autograd._clear_callbacks()
    finally:
        torch.autograd.profiler._run_on_profiler_stop()
        if found.profiler is not None:
            found.profiler.entered = False


os.register_at_fork(after_in_child=_forget_recording)
