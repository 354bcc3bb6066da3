"""Calls of the C library: heap in use, freed heap given back, exit without destructors.

They are glibc's. On another C library each of them does nothing, or returns None.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_SLOW_S = 0.002
"""Longest acceptable duration of `mallinfo2` in seconds: it holds the lock of each arena."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _function(name: str) -> Any:
    """Return a function of the C library, or None."""
    try:
        # PyDLL keeps the GIL: a child of a fork calls this before anything else runs in it.
        return getattr(ctypes.PyDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def prepare() -> None:
    """Look up what `skip_destructors` needs, so that a forked child does not have to."""
    for name in ("on_exit", "_exit", "fcloseall"):
        _function(name)


def skip_destructors() -> None:
    """Make `exit` end this process before the exit handlers that are registered now.

    Python has finalized by then, and C streams are flushed. The exit status stays.
    """
    on_exit, *handlers = (_function(name) for name in ("on_exit", "_exit", "fcloseall"))
    if on_exit is None or None in handlers:
        return
    # Handlers run in reverse order. `_exit` takes the status, and `fcloseall` takes nothing.
    for handler in handlers:
        on_exit(ctypes.cast(handler, ctypes.c_void_p), None)


def give_back() -> None:
    """Return freed heap to the system: glibc keeps it otherwise, in the arena of each thread."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))  # without the GIL: it takes long


class Growth:
    """Growth of this process's memory since the object was made.

    Resident memory alone does not show what goes into heap that was freed before.
    """

    def __init__(self) -> None:
        self._mallinfo2 = _function("mallinfo2")
        if self._mallinfo2 is not None:
            self._mallinfo2.restype = _Mallinfo2
        self._resident_bytes, self._heap_bytes = _resident_bytes(), self._heap() or 0

    def num_bytes(self) -> int:
        """Return the growth in bytes of resident memory or of the heap, whichever is larger."""
        grown_bytes, heap_bytes = _resident_bytes() - self._resident_bytes, self._heap()
        return (
            grown_bytes if heap_bytes is None else max(grown_bytes, heap_bytes - self._heap_bytes)
        )

    def _heap(self) -> int | None:
        """Return the bytes of the heap in use, None where that is not known or takes long."""
        if self._mallinfo2 is None:
            return None
        start_s = time.monotonic()
        found = self._mallinfo2()
        if time.monotonic() - start_s > _SLOW_S:  # a heap with many free chunks visits them all
            self._mallinfo2 = None
        return int(found.uordblks + found.hblkhd)


def _resident_bytes() -> int:
    """Return the resident memory without that of files, of which the kernel drops pages."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
