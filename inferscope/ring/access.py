"""Access rights of rings: detect rings that this user may not read and explain the remedy.

Rings are private to their owner (0700 and 0600), or shared with a group if INFERSCOPE_GROUP names
one (0750 and 0640). A folder that cannot be listed looks empty to a search for rings, so the cause
needs a check of its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from inferscope.errors import UnreadableFile

COLLECTOR = ".collector"
"""Prefix of the default name of a collector's own folder, which is next to the engines' folders.
No engine's folder begins with a dot."""


def closed_under(folder: Path, *, levels: int = 2) -> Iterator[Path]:
    """Yield the existing folders and rings that this user may not read.

    Rings are in the folder and in the engines' folders in it. Deeper levels are not searched:
    INFERSCOPE_DIR may be a folder with much other content.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except PermissionError:
        yield folder
        return
    except OSError:  # it does not exist or is not a folder
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(COLLECTOR) and levels > 1:
                yield from closed_under(Path(entry.path), levels=levels - 1)
        elif entry.name.endswith(".ring") and not os.access(entry.path, os.R_OK):
            yield Path(entry.path)


def is_there(path: Path) -> bool:
    """Return whether a path exists.

    Raises:
        UnreadableFile: a folder above it is closed to this user, so that it cannot be checked.
    """
    try:
        return path.exists()
    except PermissionError as error:
        raise UnreadableFile(why_closed(path)) from error


def why_closed(path: Path) -> str:
    """Return a line that states the owner of a folder or ring and how to get access to it."""
    status = _status(path)
    while status is None:
        path = path.parent
        status = _status(path)
    mode = stat.S_IMODE(status.st_mode)
    how = (
        f"in its group, {status.st_gid}"
        if mode & stat.S_IRGRP
        else "start the engine with INFERSCOPE_GROUP, a group that both are in"
    )
    return (
        f"{path} is closed to uid {os.geteuid()}: it belongs to uid {status.st_uid}, "
        f"with mode {mode:04o}. Read it as that user, or {how}."
    )


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a path, None if a folder above it is closed."""
    try:
        return path.lstat()
    except OSError:
        return None
