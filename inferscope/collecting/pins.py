"""Pins: the records around an incident, copied from the rings into a recording that stays.

A second follower reads the rings again from before the incident on, so nothing is kept in memory
for the case that something happens, and the recording is just what `inferscope record` would have
written. It reads a piece at a time: the rings keep the rest for minutes. Windows that overlap go
into one file. All this is the collector's: engines never notice, and if a file cannot be written
that costs a line and the pin.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from inferscope.collecting.config import PinSettings
from inferscope.collector.follow import RingFollower
from inferscope.collector.merge import Item
from inferscope.collector.source import recorded
from inferscope.errors import InferScopeError
from inferscope.private import open_own, own_folder
from inferscope.probe.clock import Clock
from inferscope.ring.recording import RecordingWriter

LONGEST_NS = 300_000_000_000
"""Of a window: a request that took longer is not in the file from its beginning."""
_RETRY_NS = 60_000_000_000
_ROOM_NS = 1_000_000_000
_PIECE_BYTES = 4 << 20
"""Of all rings together, copied at once."""
_CATCH_UP_NS = 2_000_000_000
_EMPTY_BYTES = 12
_MEGABYTE = 1_000_000


class Pins:
    """Writes pins, one file at a time, and removes the oldest where they take too much room."""

    def __init__(
        self,
        settings: PinSettings,
        rings: Callable[[], Iterable[Path]],
        *,
        clock: Clock,
        say: Callable[[str], None],
        folded_ns: Callable[[], int] | None = None,
    ) -> None:
        """Take where to write, what finds the rings, and what prints a line.

        Args:
            settings: where, and how much.
            rings: all that there are.
            clock: theirs.
            say: takes a line for the user.
            folded_ns: tells up to when incidents are noticed by now; None for the present.
        """
        self._folded_ns = folded_ns or clock.monotonic_ns
        self._settings = settings
        self._rings = rings
        self._clock = clock
        self._say = say
        self._open: _Pin | None = None
        self._retry_ns = 0
        self._room_ns = 0
        self._has_failed = False

    def change(self, settings: PinSettings) -> None:
        """Go on with other settings; a file that is open ends where it is."""
        self._settings = settings

    def pin(self, why: str, first_ns: int, last_ns: int) -> None:
        """Keep what the rings say of a time, and of some seconds before and after.

        Args:
            why: a word, for the file's name.
            first_ns: when it began, on the rings' clock.
            last_ns: when it ended.
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
        """Copy what has become due."""
        pin = self._open
        if pin is None:
            return
        now_ns = self._clock.monotonic_ns()
        try:
            pin.copy()
            if now_ns >= self._room_ns:
                self._room_ns = now_ns + _ROOM_NS
                self._make_room()
            # The next window overlaps this one up to then, and may be noticed late.
            noticed_ns = max(self._folded_ns(), now_ns - LONGEST_NS)
            is_over = noticed_ns > pin.until_ns + self._settings.before_ns and pin.is_through
            if is_over or 2 * pin.num_bytes() > self._settings.max_bytes:
                self._end()
        except (InferScopeError, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        """Copy what there is by now, for two seconds at most, and finish the file that is open.

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
        self._say(f"pinned {pin.path}")
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
        """Remove the oldest pins beyond what they may take together."""
        pins = [(path.stat(), path) for path in self._settings.folder.glob("pin-*.isr")]
        num_bytes = sum(status.st_size for status, _ in pins)
        for status, path in sorted(pins, key=lambda pin: pin[0].st_mtime_ns):
            if num_bytes <= self._settings.max_bytes:
                return
            if self._open is None or path != self._open.path:
                path.unlink(missing_ok=True)
                num_bytes -= status.st_size

    def _fail(self, error: Exception) -> None:
        """Give the pin up, say so once, and try again only after a while."""
        pin, self._open = self._open, None
        if pin is not None:
            pin.give_up()
        self._retry_ns = self._clock.monotonic_ns() + _RETRY_NS
        if not self._has_failed:
            self._has_failed = True
            folder = self._settings.folder
            words = error.strerror if isinstance(error, OSError) else str(error)
            self._say(f"an incident could not be pinned in {folder}: {words}")


class _Pin:
    """One file being written.

    Attributes:
        path: where.
        until_ns: up to when; it may move on while the file is open.
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
        """Read, but later than the window's end, which may yet move on."""

    def copy(self) -> None:
        """Write what has become due."""
        if not self._held:
            self._held.extend(self._follower.poll())
        while self._held and self._held[0].t_ns <= self.until_ns:
            self._writer.write(recorded(self._held.popleft()))

    @property
    def is_through(self) -> bool:
        """Tell whether what the rings hold of the window is written."""
        return bool(self._held) or not self._follower.has_more

    def num_bytes(self) -> int:
        """Return how large the file is by now."""
        return self.path.stat().st_size

    def close(self) -> None:
        """Finish the file.

        Raises:
            InferScopeError: its end cannot be written.
        """
        self._follower.close()
        self._writer.close()

    def give_up(self) -> None:
        """Let go; what was written stays, unless it is nothing."""
        with suppress(InferScopeError):
            self.close()
        with suppress(OSError):
            if self.num_bytes() <= _EMPTY_BYTES:
                self.path.unlink()


def _new_file(path: Path) -> int:
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
