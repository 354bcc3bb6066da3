"""A kernel profile on request: torch's own profiler, for seconds, in the observed process.

Never on by default. While it runs, every operation of every thread is recorded, which slows the
engine down, and writing the trace afterwards takes the interpreter for moments: this is for looking
once, not for watching. By how much, `inferscope profile` tells from the engine's own steps.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferscope.ring.profile_request import answer, requested, trace_path


class Profiling:
    """Answers requests for profiles, one at a time; nothing here raises."""

    def __init__(self, ring_path: Path) -> None:
        self._ring_path = ring_path
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin with a profile if one is asked for; called every 100 ms, beside the engine."""
        if self._thread is not None and self._thread.is_alive():
            return
        seconds = requested(self._ring_path)
        if seconds is None:
            return
        # A thread of its own: the keeper's heart must go on, and start and stop are one thread's.
        thread = threading.Thread(
            target=self._profile, args=(seconds,), name="inferscope-profile", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            answer(self._ring_path, error=str(error))
            return
        self._thread = thread

    def _profile(self, seconds: float) -> None:
        path = trace_path(self._ring_path)
        partial = path.with_suffix(".partial")
        try:
            trace = record(seconds)
            partial.unlink(missing_ok=True)  # of an earlier profile, or a link that is not ours
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            trace.export_chrome_trace(str(partial))
            partial.chmod(0o600)
            partial.replace(path)
        except Exception as error:  # of torch's, of any kind: the engine goes on
            with suppress(OSError):  # half a trace: the disk may be full of it
                partial.unlink(missing_ok=True)
            answer(self._ring_path, error=f"{type(error).__name__}: {error}")
            return
        answer(self._ring_path)


def record(seconds: float) -> Any:
    """Profile this process, all its threads and devices; return torch's profile.

    Raises:
        RuntimeError: torch is not loaded here, or another profiler is active.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise RuntimeError("this process has not loaded torch: there is nothing to profile in it")
    profiler: Any = importlib.import_module("torch.profiler")
    kinds = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append(profiler.ProfilerActivity.CUDA)
    # Without it only the thread that starts the profiler is seen, and that is not the engine's.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profiler.profile(activities=kinds, experimental_config=config) as found:
        time.sleep(seconds)
    return found
