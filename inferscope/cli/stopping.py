"""Stopping a loop from outside, between its turns and never inside one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Says whether somebody asked the loop to end."""

    def __init__(self) -> None:
        self.stop_requested = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note the wish; the second Ctrl-C is not for the loop but for Python."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a wish, for as long as the context lasts.

    A record may be written and not yet folded where an exception strikes: then the digest printed
    at the end would be that of no replay.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
