"""Handover of a prompt's KV from a prefill engine to a decode engine through shared memory.

    prefill engine   computes the prompt, copies its KV into a memory file ──┐ KvHandle
    API server       sends the request and the handle to the decode engine <─┘
    decode engine    locks the file; reads and empties it once the request has KV blocks, and
                     continues as after a prefix-cache hit

The file has no name in any file system (memfd_create); the receiver opens it as a descriptor of the
sender. So the kernel frees it when its last user exits, however that happens. The sender closes
empty files. It also empties those without a lock after `UNREAD_S`: the API server that had the
handle has exited, or the decode engine, whose lock ends with it.

A request that waits for KV blocks leaves its KV in the file. The prefill engine starts no prompt
whose KV would not fit beside what is shared: it waits for the decode engine, and its queue fills.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedRandom

import msgspec

from inferscope.errors import InferScopeError
from inferscope.probe import engine_id

logger = logging.getLogger(__name__)

UNREAD_S = 30.0
"""Seconds after which a file that no decode engine has locked is emptied."""
_MOST_FILES = 256
"""Maximum number of shared prompts: each is an open file of both engines."""
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


class ReceivedKv:
    """Keys and values of a prompt's first tokens, in shared memory that is locked for this engine.

    Attributes:
        end_ns: Monotonic time when this engine had the KV.
    """

    def __init__(self, handle: KvHandle, file: BufferedRandom) -> None:
        """Set up on the locked file of a handle."""
        self.handle = handle
        self.end_ns = time.monotonic_ns()
        self._file = file

    def read(self) -> bytearray:
        """Return the content and free the shared memory."""
        content = bytearray(self.handle.num_bytes)
        num_read = self._file.readinto(content)
        assert num_read == len(content), "a locked file was emptied"
        self.discard()
        return content

    def discard(self) -> None:
        """Free the shared memory."""
        self._file.truncate(0)
        self._file.close()


class _Shared(msgspec.Struct, frozen=True):
    """A file of the outbox."""

    num_bytes: int
    deadline_s: float
    """Monotonic time from which it is freed without a reader."""


class Outbox:
    """Shared memory of an engine for the KV of finished prefills.

    Attributes:
        capacity_bytes: Maximum size of all files, except for a prompt that is alone.
    """

    def __init__(
        self,
        read_kv: Callable[[Sequence[int], int], memoryview],
        *,
        token_bytes: int,
        capacity_bytes: int,
    ) -> None:
        """Set up on a function from KV blocks and a number of tokens to the bytes of their KV."""
        self.capacity_bytes = capacity_bytes
        self._read_kv = read_kv
        self._token_bytes = token_bytes
        self._files: dict[int, _Shared] = {}
        """File by descriptor."""

    @property
    def num_bytes(self) -> int:
        """Size of all files; those read since the last sweep count."""
        return sum(file.num_bytes for file in self._files.values())

    def has_room(self, prompts: Sequence[int]) -> bool:
        """Return whether the KV of prompts with these numbers of tokens fits beside the files."""
        num_files = len(self._files) + len(prompts)
        num_bytes = self.num_bytes + sum(prompts) * self._token_bytes
        fits = num_files <= _MOST_FILES and num_bytes <= self.capacity_bytes
        return fits or num_files == 1

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
        self._files[descriptor] = _Shared(content.nbytes, time.monotonic() + UNREAD_S)
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
        """Close the files that were read, and those whose reader is overdue or has exited."""
        now_s = time.monotonic()
        for descriptor, file in list(self._files.items()):
            if not os.fstat(descriptor).st_size or (
                now_s >= file.deadline_s and _is_locked_now(descriptor)
            ):
                self._close(descriptor)

    def close(self) -> None:
        """Close all files; a decode engine that has locked one can still read it."""
        for descriptor in list(self._files):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        del self._files[descriptor]
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
    """Lock the KV of a handle: its memory is kept until it is read, or this process exits.

    Raises:
        TransferFailed: the sender has exited, or the memory is gone.
    """
    try:
        file = _opened(handle)
    except OSError as error:
        raise TransferFailed(
            f"the KV of this prompt cannot be read from the prefill engine's process {handle.pid}: "
            f"{error.strerror}. Send the request again."
        ) from None
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes == handle.num_bytes and _is_locked_now(file.fileno()):
        return ReceivedKv(handle, file)
    file.close()
    raise TransferFailed(
        f"the prefill engine shares {num_bytes} of {handle.num_bytes} bytes of this prompt's "
        f"KV; it keeps them for {UNREAD_S:.0f} s. Send the request again."
    )


def discard(handle: KvHandle) -> None:
    """Free the memory of a handle whose request has ended, if it still exists."""
    with suppress(OSError), _opened(handle) as file:
        file.truncate(0)


def _opened(handle: KvHandle) -> BufferedRandom:
    """Open a handle's file.

    Raises:
        OSError: the file does not exist any more, or may not be opened.
    """
    file = open(f"/proc/{handle.pid}/fd/{handle.descriptor}", "r+b")  # noqa: SIM115 - returned open
    name = os.readlink(f"/proc/self/fd/{file.fileno()}")
    if not name.startswith(f"/memfd:{_PREFIX}{handle.key}"):
        file.close()
        raise FileNotFoundError(0, "it is no longer shared")
    return file


def _is_locked_now(descriptor: int) -> bool:
    """Lock a file; return False if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
