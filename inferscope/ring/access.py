"""Whose rings are, where this user may not read them, and what to do about it.

Rings are their owner's alone (0700 and 0600), or a group's as well where INFERSCOPE_GROUP names one
(0750 and 0640). A folder that cannot be listed looks empty to whoever searches for rings: so
somebody has to ask why.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from inferscope.errors import UnreadableFile

COLLECTOR = ".collector"
"""Beginning of the name of a collector's own folder, beside the engines', unless another is named.
No engine's folder begins with a dot."""


def closed_under(folder: Path, *, levels: int = 2) -> Iterator[Path]:
    """Yield the folders and rings that are there and closed to this user.

    Rings are in the folder and in the engines' folders in it. What is below those is not looked at:
    INFERSCOPE_DIR may be a folder with much else in it.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except PermissionError:
        yield folder
        return
    except OSError:  # it is not there, or no folder
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(COLLECTOR) and levels > 1:
                yield from closed_under(Path(entry.path), levels=levels - 1)
        elif entry.name.endswith(".ring") and not os.access(entry.path, os.R_OK):
            yield Path(entry.path)


def is_there(path: Path) -> bool:
    """Tell whether there is something by this name.

    Raises:
        UnreadableFile: nobody can tell, for a folder around it is closed to this user.
    """
    try:
        return path.exists()
    except PermissionError as error:
        raise UnreadableFile(why_closed(path)) from error


def why_closed(path: Path) -> str:
    """Say in a line whose a folder or ring is, or the folder around it, and how to read it."""
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
    """Return what a path is, None where a folder around it is closed."""
    try:
        return path.lstat()
    except OSError:
        return None
