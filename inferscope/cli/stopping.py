"""Stop of a loop by a signal, between two of its turns."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Flag that a signal sets to stop a loop."""

    def __init__(self) -> None:
        self.stop_requested = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Set the flag; the second signal raises KeyboardInterrupt."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True


@contextmanager
def stoppable() -> Iterator[StopFlag]:
    """Make Ctrl-C and SIGTERM set a flag while the context lasts.

    An exception could interrupt the loop between writing a record and folding it. The digest
    printed at the end would then differ from that of every replay.
    """
    stop = StopFlag()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
