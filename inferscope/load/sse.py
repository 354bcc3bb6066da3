"""Parser of server-sent events from a byte stream, split at any place.

The grammar is the WHATWG's (HTML standard, "Server-sent events"): lines end with CR LF, LF or CR, a
blank line ends an event, `data` lines of one event are joined by LF, a comment begins with a colon.
Only ASCII bytes are separators, so a character cut in two is harmless: the complete payload is
decoded later.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"
_MOST_BYTES = 16 << 20


class EndlessEvent(Exception):
    """A line or event that exceeds the maximum size."""


class SseParser:
    """Parser from chunks of bytes to the payloads of whole events.

    Work is linear in the bytes fed, even one at a time.
    """

    def __init__(self, *, most_bytes: int = _MOST_BYTES) -> None:
        """Start a stream.

        Args:
            most_bytes: maximum size of one event; more is an error, to bound memory.
        """
        self._most_bytes = most_bytes
        self._line: list[bytes] = []  # parts of the unfinished line
        self._data: list[bytes] = []  # `data` lines of the unfinished event
        self._line_bytes = 0
        self._data_bytes = 0
        self._is_first_line = True
        self._skips_lf = False  # the last chunk ended in CR: a following LF belongs to it

    def feed(self, chunk: bytes) -> list[bytes]:
        """Parse a chunk; return the data of the events that it completes.

        Raises:
            EndlessEvent: an event is too long.
        """
        if self._skips_lf and chunk:
            self._skips_lf = False
            chunk = chunk.removeprefix(b"\n")
        if b"\n" in chunk or b"\r" in chunk:
            self._line.append(chunk)
            text = b"".join(self._line)
            lines = text.splitlines()  # of bytes: at CR LF, LF and CR only, as in the grammar
            self._skips_lf = text.endswith(b"\r")
            has_tail = not text.endswith((b"\n", b"\r"))
            self._line = [lines.pop()] if has_tail else []
            self._line_bytes = len(self._line[0]) if has_tail else 0
            events = self._events(lines)
        else:
            self._line.append(chunk)
            self._line_bytes += len(chunk)
            events = []
        if self._line_bytes + self._data_bytes > self._most_bytes:
            raise EndlessEvent(f"an event is longer than {self._most_bytes} bytes")
        return events

    def _events(self, lines: list[bytes]) -> list[bytes]:
        """Parse whole lines; return the data of the events that they complete."""
        events = []
        for line in lines:
            if self._is_first_line:
                self._is_first_line = False
                line = line.removeprefix(_BOM)
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
            field, _, value = line.partition(b":")
            if field == b"data":
                value = value.removeprefix(b" ")
                self._data.append(value)
                self._data_bytes += len(value) + 1
        return events
