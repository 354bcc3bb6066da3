"""Lines on standard error for commands that continue if standard error fails.

A log on a full disk, or a pipe without a reader, must not end a server or a command started by
`run`.
"""

from __future__ import annotations

import os
import sys

from inferscope.foreign import one_line


def write_status(line: str) -> None:
    """Write a line to standard error; after a failure, discard this and all later lines.

    Names in the line may come from another user, so line breaks and escapes are removed.
    """
    try:
        sys.stderr.write(f"inferscope: {one_line(line)}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # full, closed, or missing from the start
        # Python would flush its buffer again at exit, and change the exit code.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open until exit
