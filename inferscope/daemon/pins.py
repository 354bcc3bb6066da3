"""Pins: the records around an incident, copied from the rings into a recording.

A second follower reads the rings from before the incident, so nothing is buffered in memory in
advance, and the recording equals what `inferscope record` would have written. It copies one piece
at a time; the rings hold the rest for minutes. Overlapping windows go into one file. Engines are
not involved, and a failed write costs a log line and the pin.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from inferscope.daemon.config import PinSettings
from inferscope.errors import InferScopeError
from inferscope.private import open_own, own_folder
from inferscope.probe import Clock
from inferscope.readers import Item, RingFollower, recorded
from inferscope.ring import RecordingWriter

LONGEST_NS = 300_000_000_000
"""Maximum length of a window in nanoseconds; a longer request is recorded without its start."""
_RETRY_NS = 60_000_000_000
_ROOM_NS = 1_000_000_000
_PIECE_BYTES = 4 << 20
"""Maximum bytes copied per call, over all rings."""
_CATCH_UP_NS = 2_000_000_000
_EMPTY_BYTES = 12


class Pins:
    """Writer of pins, one file at a time; removes the oldest pins beyond the size limit."""

    def __init__(
        self,
        settings: PinSettings,
        rings: Callable[[], Iterable[Path]],
        *,
        clock: Clock,
        log_line: Callable[[str], None],
        folded_ns: Callable[[], int] | None = None,
    ) -> None:
        """Store the settings.

        Args:
            settings: directory and limits.
            rings: returns the paths of all rings.
            clock: clock of the rings.
            log_line: prints a line for the operator.
            folded_ns: returns the time through which incidents are detected; None for now.
        """
        self._folded_ns = folded_ns or clock.monotonic_ns
        self._settings = settings
        self._rings = rings
        self._clock = clock
        self._log_line = log_line
        self._open: _Pin | None = None
        self._retry_ns = 0
        self._room_ns = 0
        self._has_failed = False

    def change(self, settings: PinSettings) -> None:
        """Set the settings; an open file stays where it is."""
        self._settings = settings

    def pin(self, why: str, first_ns: int, last_ns: int) -> None:
        """Record the time of an incident and the configured time before and after it.

        Args:
            why: member of INCIDENTS, for the file name.
            first_ns: start of the incident on the rings' clock.
            last_ns: end of the incident.
        """
        now_ns = self._clock.monotonic_ns()
        until_ns = min(last_ns, now_ns) + self._settings.after_ns
        if self._open is not None:
            self._open.until_ns = max(self._open.until_ns, until_ns)
            return
        if now_ns < self._retry_ns:
            return
        since_ns = max(first_ns - self._settings.before_ns, until_ns - LONGEST_NS)
        try:
            path = self._new_file(why)
            self._open = _Pin(path, self._rings, self._clock, since_ns, until_ns)
        except (InferScopeError, OSError) as error:
            self._fail(error)

    def advance(self) -> None:
        """Copy the records that are due; close the file if its window is complete."""
        pin = self._open
        if pin is None:
            return
        now_ns = self._clock.monotonic_ns()
        try:
            pin.copy()
            if now_ns >= self._room_ns:
                self._room_ns = now_ns + _ROOM_NS
                self._make_room()
            # Until then, an incident detected late can have a window that overlaps this one.
            noticed_ns = max(self._folded_ns(), now_ns - LONGEST_NS)
            is_over = noticed_ns > pin.until_ns + self._settings.before_ns and pin.is_through
            if is_over or 2 * pin.num_bytes() > self._settings.max_bytes:
                self._end()
        except (InferScopeError, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        """Copy the available records for at most two seconds and close the open file.

        Safe to call twice.
        """
        late_ns = self._clock.monotonic_ns() + _CATCH_UP_NS
        try:
            while self._open is not None:
                self._open.copy()
                if self._open.is_through or self._clock.monotonic_ns() > late_ns:
                    break
        except (InferScopeError, OSError) as error:
            self._fail(error)
        self._end()

    def _end(self) -> None:
        pin, self._open = self._open, None
        if pin is None:
            return
        try:
            pin.close()
        except InferScopeError as error:
            self._open = pin
            self._fail(error)
            return
        self._has_failed = False
        self._log_line(f"pinned {pin.path}")
        with suppress(OSError):
            self._make_room()

    def _new_file(self, why: str) -> Path:
        folder = self._settings.folder
        own_folder(folder)
        at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock.real_ns() // 10**9))
        path, number = folder / f"pin-{at}-{why}.isr", 2
        while os.path.lexists(path):
            path, number = folder / f"pin-{at}-{why}-{number}.isr", number + 1
        return path

    def _make_room(self) -> None:
        """Remove the oldest pins until all of them fit the size limit."""
        pins = [(path.stat(), path) for path in self._settings.folder.glob("pin-*.isr")]
        num_bytes = sum(status.st_size for status, _ in pins)
        for status, path in sorted(pins, key=lambda pin: pin[0].st_mtime_ns):
            if num_bytes <= self._settings.max_bytes:
                return
            if self._open is None or path != self._open.path:
                path.unlink(missing_ok=True)
                num_bytes -= status.st_size

    def _fail(self, error: Exception) -> None:
        """Abandon the open pin, log the error once, and delay the next attempt."""
        pin, self._open = self._open, None
        if pin is not None:
            pin.give_up()
        self._retry_ns = self._clock.monotonic_ns() + _RETRY_NS
        if not self._has_failed:
            self._has_failed = True
            folder = self._settings.folder
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._log_line(f"cannot pin an incident in {folder}: {reason}")


class _Pin:
    """One pin file that is being written.

    Attributes:
        path: path of the file.
        until_ns: end of its window, which later incidents can extend.
    """

    def __init__(
        self,
        path: Path,
        rings: Callable[[], Iterable[Path]],
        clock: Clock,
        since_ns: int,
        until_ns: int,
    ) -> None:
        self.path = path
        self.until_ns = until_ns
        self._follower = RingFollower(
            rings, clock, since_ns=since_ns, stays=True, most_bytes=_PIECE_BYTES
        )
        self._writer = RecordingWriter(path, make=_new_file)
        self._held: deque[Item] = deque()
        """Records read from beyond the window's end, which can still be extended."""

    def copy(self) -> None:
        """Write the due records up to the window's end."""
        if not self._held:
            self._held.extend(self._follower.poll())
        while self._held and self._held[0].t_ns <= self.until_ns:
            self._writer.write(recorded(self._held.popleft()))

    @property
    def is_through(self) -> bool:
        """Return whether all available records of the window are written."""
        return bool(self._held) or not self._follower.has_more

    def num_bytes(self) -> int:
        """Return the current size of the file."""
        return self.path.stat().st_size

    def close(self) -> None:
        """Write the end of the file and close it.

        Raises:
            InferScopeError: the write failed.
        """
        self._follower.close()
        self._writer.close()

    def give_up(self) -> None:
        """Close the file without raising; remove it if it contains no record."""
        with suppress(InferScopeError):
            self.close()
        with suppress(OSError):
            if self.num_bytes() <= _EMPTY_BYTES:
                self.path.unlink()


def _new_file(path: Path) -> int:
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
