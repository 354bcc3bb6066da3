"""A kernel profile on request: torch's own profiler, for seconds, in the observed process.

Never on by default. While it runs, every operation of every thread is recorded, which slows the
engine down, and writing the trace afterwards takes the interpreter for moments: this is for looking
once, not for watching. `inferscope profile` measures by how much from the engine's own steps.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from inferscope.probe import c_library, torch_profile
from inferscope.ring import (
    Request,
    answer,
    is_pending,
    partial_paths,
    requested,
    trace_path,
)

_MOST_EXIT_WAIT_S = 10.0
"""An exiting process waits for the end of its profile, at most for this long."""
_MOST_TRACE_BYTES = 128 << 20
_answering: dict[Profiling, None] = {}
"""Those that have had a request, for the end of the process."""


class Profiling:
    """Answers requests for profiles, one at a time; nothing here raises."""

    def __init__(self, ring_path: Path) -> None:
        self._ring_path = ring_path
        self._thread: threading.Thread | None = None
        self._request: Request | None = None

    def poll(self) -> None:
        """Begin with a profile if one is asked for; called every 100 ms, beside the engine."""
        if torch_profile.is_ending() or (self._thread is not None and self._thread.is_alive()):
            return
        request = requested(self._ring_path)
        if request is None or request == self._request:  # answered, but not removable
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
        self._thread, self._request = thread, request
        _answering[self] = None

    def end(self, until_s: float) -> bool:
        """Wait for the end of the profile, and clean up after it; return whether it has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, until_s - time.monotonic()))
            if not thread.is_alive():
                return True
        self._remove_partial()
        if self._request is not None:
            answer(self._ring_path, self._request, error=torch_profile.ENDING)
        return False

    def _profile(self, request: Request) -> None:
        ring_path = self._ring_path
        found = None
        try:
            found = torch_profile.record(
                request.seconds, is_wanted=lambda: is_pending(ring_path, request)
            )
            if torch_profile.is_ending():
                raise RuntimeError(torch_profile.ENDING)
            self._export(found, request)
        except Exception as error:  # of torch's, of any kind: the engine goes on
            answer(ring_path, request, error=f"{type(error).__name__}: {error}")
        else:
            answer(ring_path, request)
        finally:
            self._remove_partial()
            torch_profile.release(found)
            del found
            c_library.give_back()
            _answering.pop(self, None)

    def _export(self, found: Any, request: Request) -> None:
        """Write the trace and rename it when it is whole.

        Raises:
            RuntimeError: it is too large, or not whole.
            OSError: it cannot be written.
        """
        partial, *_ = paths = partial_paths(self._ring_path)
        # Torch writes to a second name, with the rights of the file that is there, and renames it.
        for path in paths:
            path.unlink(missing_ok=True)  # of an earlier profile, or a link that is not ours
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        found.export_chrome_trace(str(partial))
        with partial.open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, num_bytes - 64))
            is_whole = file.read().rstrip().endswith(b"}")
        if not is_whole:  # torch logs an error of writing, and raises none
            raise RuntimeError(f"the trace could not be written to {partial.parent}: disk full?")
        if num_bytes > _MOST_TRACE_BYTES:
            raise RuntimeError(
                f"the trace of {request.seconds:g} s takes {num_bytes >> 20:,} MiB of at most "
                f"{_MOST_TRACE_BYTES >> 20:,} MiB. Ask for fewer seconds."
            )
        partial.chmod(0o600)
        # Of a request that was withdrawn the trace would be the answer to the next one.
        if not torch_profile.is_ending() and is_pending(self._ring_path, request):
            partial.replace(trace_path(self._ring_path))

    def _remove_partial(self) -> None:
        for path in partial_paths(self._ring_path):
            with suppress(OSError):  # half a trace, of which the disk may be full
                path.unlink(missing_ok=True)


def _end() -> None:
    """End the profile under way before the interpreter ends, without a trace.

    A thread that comes back from torch into an interpreter that has ended aborts the process.
    """
    until_s = time.monotonic() + _MOST_EXIT_WAIT_S
    is_over = torch_profile.end(until_s)
    for each in list(_answering):
        is_over &= each.end(until_s if is_over else 0.0)
    if not is_over:
        c_library.skip_destructors()


atexit.register(_end)
os.register_at_fork(after_in_child=_answering.clear)
