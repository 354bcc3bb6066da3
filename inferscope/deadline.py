"""Socket reads with a deadline.

A socket's timeout restarts at each `recv`, so a peer that sends one byte at a time never times out.
A `DeadlineReader` has one deadline and one size limit for all its reads.
"""

from __future__ import annotations

import io
import socket
import time


class DeadlineReader(io.RawIOBase):
    """The receiving side of a socket.

    Attributes:
        deadline_s: end of all reads, by `time.monotonic`.
        bytes_left: number of bytes that may still be read; None without a limit.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        """Read from a connected socket, which its owner closes."""
        self.deadline_s = deadline_s
        self.bytes_left: int | None = None
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Return True, as the stream is readable."""
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        """Read the bytes that have arrived.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the peer sent more than the limit, or the connection is broken.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        if self.bytes_left is not None:
            if self.bytes_left <= 0:
                raise OSError("the peer sent more than the limit")
            buffer = buffer[: self.bytes_left]
        self._connection.settimeout(left_s)
        num_bytes = self._raw.readinto(buffer)
        if self.bytes_left is not None and num_bytes:
            self.bytes_left -= num_bytes
        return num_bytes

    def close(self) -> None:
        """Release the socket; its owner closes it."""
        if not self.closed:
            self._raw.close()
        super().close()
