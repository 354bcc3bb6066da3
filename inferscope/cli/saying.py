"""Lines on standard error of commands that go on where it cannot be written to.

A log on a full disk, or a pipe without a reader, must end neither the command that `run` started
nor a server.
"""

from __future__ import annotations

import os
import sys

from inferscope.foreign import one_line


def say(line: str) -> None:
    """Write a line, or nothing from now on where standard error cannot be written to.

    Names of engines and models in it may be another user's: it stays one line, without escapes.
    """
    try:
        sys.stderr.write(f"inferscope: {one_line(line)}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # full, closed, closed before we started
        # What it holds back would be tried again at exit, and change the exit code.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as we run
