"""Reading from a socket by a deadline.

A timeout of a socket begins anew with each `recv`: a peer that sends one byte at a time is never
late. A `DeadlineReader` has one end for all that is read, and a limit for how much that is.
"""

from __future__ import annotations

import io
import socket
import time


class DeadlineReader(io.RawIOBase):
    """The receiving side of a socket.

    Attributes:
        deadline_s: the end of all reads, by `time.monotonic`.
        bytes_left: what may still be read; None without a limit.
    """

    def __init__(
        self, connection: socket.socket, deadline_s: float, *, most_bytes: int | None = None
    ) -> None:
        """Take a connected socket, which stays its owner's to close."""
        self.deadline_s = deadline_s
        self.bytes_left = most_bytes
        self._connection = connection
        self._raw = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        """Read what has come.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: more has come than may be read, or the connection is broken.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        if self.bytes_left is not None:
            if self.bytes_left <= 0:
                raise OSError("too much has come")
            buffer = buffer[: self.bytes_left]
        self._connection.settimeout(left_s)
        num_bytes = self._raw.readinto(buffer)
        if self.bytes_left is not None and num_bytes:
            self.bytes_left -= num_bytes
        return num_bytes

    def close(self) -> None:
        """Release the socket."""
        if not self.closed:
            self._raw.close()
        super().close()
