"""One positional write that holds the interpreter's lock if the write cannot block.

`os.pwrite` releases the lock around the system call. If another thread computes in Python, the
caller then waits for the switch interval (5 ms) to reacquire it, for each of five records per step.
So the C function is called with the lock held, like a store into mapped memory.

A write that blocks with the lock held stops every thread of the process. Writes to memory never
block. Writes to a local disk block while the disk fails or is frozen (`fsfreeze`, for a snapshot of
a virtual machine): after the first slow write the lock is released for all later ones. On a
network, FUSE or unknown file system, and on the probe's own thread, it is always released.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from inferscope.host_signals import pass_on

PWrite = Callable[[int, bytes, int, int], int]
IN_MEMORY = {
    0x01021994,  # tmpfs
    0x858458F6,  # ramfs
}
LOCAL = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # XFS
    0x9123683E,  # btrfs
    0xCA451A4E,  # bcachefs
    0xF2F52010,  # F2FS
    0x2FC12FC1,  # ZFS
    0x794C7630,  # overlayfs, a container's root
}
REMOTE = {
    0x6969,  # NFS
    0x517B,  # SMB
    0xFF534D42,  # CIFS
    0xFE534D42,  # SMB2
    0x65735546,  # FUSE, virtiofs too
    0x01021997,  # 9P
    0x00C36400,  # Ceph
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS
    0x19830326,  # BeeGFS
    0x5346414F,  # AFS
    0x6B414653,  # AFS of OpenAFS's kernel module
    0x7461636F,  # OCFS2
    0x01161970,  # GFS2
    0x73757245,  # Coda
}
"""Values of `f_type` as listed in statfs(2) and in the file systems' sources."""
SLOW_NS = 50_000_000
"""Duration in nanoseconds above which a write has blocked: the page cache needs microseconds."""


def releasing_pwrite(handle: int, content: bytes, num_bytes: int, offset: int) -> int:
    """Write with `os.pwrite`, if the C function cannot be called or may block."""
    try:
        return os.pwrite(handle, content, offset)
    except OSError as error:
        pass_on(error)
        return -1


def _c_function() -> PWrite:
    try:
        import ctypes  # absent where Python was built without libffi

        library = ctypes.PyDLL(None)
        # A `long` of 4 bytes: `pwrite` takes 4-byte offsets there, and rings may be larger.
        function = library.pwrite if ctypes.sizeof(ctypes.c_long) == 8 else library.pwrite64
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_longlong,
        )
        function.restype = ctypes.c_ssize_t
    except (ImportError, OSError, AttributeError):
        return releasing_pwrite
    found: PWrite = function
    return found


pwrite = _c_function()
"""Write `num_bytes` of a `bytes` at an offset; return the number written, -1 for an error.

At the end of the stack ctypes raises an ArgumentError that names the RecursionError.
"""


def until_slow() -> PWrite:
    """Return a write that holds the interpreter's lock until one was slow, then never again."""
    write, now_ns = pwrite, time.monotonic_ns

    def timed(handle: int, content: bytes, num_bytes: int, offset: int) -> int:
        nonlocal write
        began_ns = now_ns()
        num_written = write(handle, content, num_bytes, offset)
        if now_ns() - began_ns > SLOW_NS:
            write = releasing_pwrite
        return num_written

    return timed


def file_system(handle: int) -> int:
    """Return the `f_type` of a file's file system, 0 if unknown."""
    try:
        import ctypes

        status = (ctypes.c_long * 64)()  # `struct statfs` begins with the type, and is smaller
        failed = ctypes.CDLL(None).fstatfs(handle, status)
    except (ImportError, OSError, AttributeError):
        return 0
    return 0 if failed else status[0] & 0xFFFFFFFF
