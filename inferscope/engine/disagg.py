"""Handover of a prompt's KV from a prefill engine to a decode engine through shared memory.

    prefill engine   computes the prompt, copies its KV into a memory file ──┐ KvHandle
    API server       sends the request and the handle to the decode engine <─┘
    decode engine    reads the file, empties it, and continues as after a prefix-cache hit

The file has no name in any file system (memfd_create); the receiver opens it as a descriptor of the
sender. So the kernel frees it when its last user exits, however that happens. The receiver empties
the file as soon as it has read it, and the sender closes empty files. A file that nothing reads
within `UNREAD_S` is emptied by the sender: the API server that had its handle has exited.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRandom

import msgspec

from inferscope.errors import InferScopeError
from inferscope.probe import engine_id

logger = logging.getLogger(__name__)

UNREAD_S = 30.0
"""Seconds after which a file that nothing has read is emptied."""
_PREFIX = "inferscope-kv-"


class TransferFailed(InferScopeError):
    """Error: the KV of a request could not be read; only this request fails."""


class KvHandle(msgspec.Struct, frozen=True, array_like=True):
    """Address and size of a prompt's KV in shared memory.

    Attributes:
        pid: Process ID of the sender.
        descriptor: File descriptor of the memory in that process.
        key: Random part of the file's name: descriptors are reused.
        num_tokens: Number of tokens, counted from the first.
        num_bytes: Size of their keys and values.
        engine_id: Engine ID of the sender.
        request_id: ID of the request in that engine.
        asked_ns: Monotonic time when the prompt was submitted to the sender.
    """

    pid: int
    descriptor: int
    key: str
    num_tokens: int
    num_bytes: int
    engine_id: str
    request_id: str
    asked_ns: int = 0


class ReceivedKv(msgspec.Struct, frozen=True):
    """Keys and values of a prompt's first tokens, before the request has KV blocks."""

    handle: KvHandle
    content: bytearray
    end_ns: int
    """Monotonic time when the content was complete."""


class Outbox:
    """Shared memory of an engine for the KV of finished prefills.

    `share` belongs to the step loop's thread, `sweep` to one other thread.
    """

    def __init__(self, read_kv: Callable[[Sequence[int], int], memoryview]) -> None:
        """Set up on a function from KV blocks and a number of tokens to the bytes of their KV."""
        self._read_kv = read_kv
        self._deadlines_s: dict[int, float] = {}
        """Deadline of the reader in monotonic seconds, by descriptor."""

    def share(self, request_id: str, blocks: Sequence[int], num_tokens: int) -> KvHandle | None:
        """Copy the KV of a request's first tokens into shared memory; return None if that fails."""
        content = self._read_kv(blocks, num_tokens)
        key = secrets.token_hex(8)
        try:
            descriptor = _filled(_PREFIX + key, content)
        except OSError as error:
            logger.error(
                "request %s ends with an error, because %d bytes of KV cannot be shared: %s",
                request_id, content.nbytes, error.strerror,
            )  # fmt: skip
            return None
        self._deadlines_s[descriptor] = time.monotonic() + UNREAD_S
        return KvHandle(
            pid=os.getpid(),
            descriptor=descriptor,
            key=key,
            num_tokens=num_tokens,
            num_bytes=content.nbytes,
            engine_id=engine_id(),
            request_id=request_id,
        )

    def sweep(self) -> None:
        """Close the files that were read, and those whose reader is overdue."""
        now_s = time.monotonic()
        for descriptor, deadline_s in list(self._deadlines_s.items()):
            if now_s >= deadline_s or not os.fstat(descriptor).st_size:
                self._close(descriptor)

    def close(self) -> None:
        """Free the memory of all files; call it after the step loop has ended."""
        for descriptor in list(self._deadlines_s):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        del self._deadlines_s[descriptor]
        os.ftruncate(descriptor, 0)  # a late reader keeps the file open, not its memory
        os.close(descriptor)


def _filled(name: str, content: memoryview) -> int:
    """Return the descriptor of a new memory file with this content."""
    descriptor = os.memfd_create(name)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def receive(handle: KvHandle) -> ReceivedKv:
    """Read the KV of a handle and free the shared memory.

    Raises:
        TransferFailed: the sender has exited, or the memory is gone.
    """
    content = bytearray(handle.num_bytes)
    try:
        with _opened(handle) as file:
            num_read = file.readinto(content)
            file.truncate(0)
    except OSError as error:
        raise TransferFailed(
            f"the KV of this prompt cannot be read from the prefill engine's process {handle.pid}: "
            f"{error.strerror}. Send the request again."
        ) from None
    if num_read != handle.num_bytes:
        raise TransferFailed(
            f"the prefill engine shared {num_read} of {handle.num_bytes} bytes of this prompt's "
            f"KV; it keeps them for {UNREAD_S:.0f} s. Send the request again."
        )
    return ReceivedKv(handle, content, time.monotonic_ns())


def discard(handle: KvHandle) -> None:
    """Free the memory of a handle whose request has ended, if it still exists."""
    with suppress(OSError), _opened(handle) as file:
        file.truncate(0)


@contextmanager
def _opened(handle: KvHandle) -> Iterator[BufferedRandom]:
    """Open a handle's file.

    Raises:
        OSError: the file does not exist any more, or may not be opened.
    """
    with open(f"/proc/{handle.pid}/fd/{handle.descriptor}", "r+b") as file:
        name = os.readlink(f"/proc/self/fd/{file.fileno()}")
        if not name.startswith(f"/memfd:{_PREFIX}{handle.key}"):
            raise FileNotFoundError(0, "it is no longer shared")
        yield file
