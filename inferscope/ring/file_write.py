"""One positional write, without giving up the interpreter's lock.

`os.pwrite` releases the lock around the system call. Beside a thread that computes in Python the
caller then waits for the switch interval, 5 ms, to have it back: measured here, 1.5 ms per record
on average, against 2 µs. So the C function is called with the lock held, as a store into mapped
memory would be. A file system that is slow to take a page holds up the process in both cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable

PWrite = Callable[[int, bytes, int, int], int]


def _releasing(handle: int, content: bytes, num_bytes: int, offset: int) -> int:
    """Write with `os.pwrite`, where the C function cannot be called."""
    try:
        return os.pwrite(handle, content, offset)
    except OSError:
        return -1


def _c_function() -> PWrite:
    try:
        import ctypes  # absent where Python was built without libffi

        library = ctypes.PyDLL(None)
        # A `long` of 4 bytes: `pwrite` takes offsets of 4 bytes there, and rings may be larger.
        function = library.pwrite if ctypes.sizeof(ctypes.c_long) == 8 else library.pwrite64
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_longlong,
        )
        function.restype = ctypes.c_ssize_t
    except (ImportError, OSError, AttributeError):
        return _releasing
    found: PWrite = function
    return found


pwrite = _c_function()
"""Write `num_bytes` of a `bytes` at an offset; return how many were written, -1 for an error.

At the end of the stack ctypes raises an ArgumentError that names the RecursionError.
"""
