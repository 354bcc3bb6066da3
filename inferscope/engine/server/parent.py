"""Messages between a child process and its parent, over standard input and output.

The pipe also shows that the parent is alive: when the parent exits, the pipe closes, and the child
exits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

import msgspec

STOP = "stop"
"""Command to shut down in order."""
CORE_GONE = "core-gone"
"""Command to an API server: the core has exited."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Message: the child is ready; `note` is a line for the user."""

    note: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Message: the child failed to start."""

    message: str
    exit_code: int


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """Message of the core: an API server does not read its messages."""

    name: str


def send_to_parent(message: msgspec.Struct) -> None:
    """Write a message to standard output for the parent, if it still runs."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.flush()


def listen_to_parent(
    on_command: Callable[[str], object], *, on_loss: Callable[[], object] | None = None
) -> None:
    """Call `on_command` in a thread for each line from the parent; exit when the parent exits.

    Args:
        on_command: callback for a line.
        on_loss: callback before the exit.
    """
    threading.Thread(target=_listen, args=(on_command, on_loss), daemon=True).start()


def _listen(on_command: Callable[[str], object], on_loss: Callable[[], object] | None) -> None:
    # Not through Python's buffers, whose lock could be held while the interpreter exits.
    rest = b""
    with contextlib.suppress(OSError):
        while piece := os.read(0, 1024):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                on_command(line.decode())
    try:
        if on_loss is not None:
            on_loss()
    finally:
        os._exit(0)
