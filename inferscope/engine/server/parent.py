"""The line between a child process and its parent: words down by standard input, up by output.

The pipe is also the proof of life: when the parent is gone, in whatever way, the pipe ends, and so
does the child.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

import msgspec

STOP = "stop"
"""Finish in order."""
CORE_GONE = "core-gone"
"""To an API server: the engine's process has ended."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child does its work from now on; `note` is for the user."""

    note: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child cannot begin."""

    message: str
    exit_code: int


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """From the core: an API server has not read its messages for too long."""

    name: str


def say(word: msgspec.Struct) -> None:
    """Write a word to standard output, where the parent reads it; it may be gone."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
        sys.stdout.flush()


def listen_to_parent(
    on_word: Callable[[str], object], *, on_loss: Callable[[], object] | None = None
) -> None:
    """Call `on_word`, in a thread, for each line from the parent; leave at once when it is gone.

    Args:
        on_word: takes a line.
        on_loss: called before leaving.
    """
    threading.Thread(target=_listen, args=(on_word, on_loss), daemon=True).start()


def _listen(on_word: Callable[[str], object], on_loss: Callable[[], object] | None) -> None:
    # Below Python's buffers: their lock would be held when the interpreter ends first.
    rest = b""
    with contextlib.suppress(OSError):
        while piece := os.read(0, 1024):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                on_word(line.decode())
    try:
        if on_loss is not None:
            on_loss()
    finally:
        os._exit(0)
