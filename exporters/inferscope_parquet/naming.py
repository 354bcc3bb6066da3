"""Names of files and directories: writer and hour."""

from __future__ import annotations

import calendar
import re
import time
from pathlib import Path

NO_HOST = "export"
"""Writer name without a host."""
_HOUR_S = 3600


def is_written_by(name: str, writer: str) -> bool:
    """Return whether a complete file is of a writer; one name may be a prefix of another."""
    return re.fullmatch(rf"{re.escape(writer)}-\d{{6}}-[0-9a-f]{{8}}\.parquet", name) is not None


def hour_of(folder: Path) -> float:
    """Return the hours since 1970 of a directory; infinity if the name is not one of ours."""
    try:
        at = time.strptime(f"{folder.parent.name} {folder.name}", "date=%Y-%m-%d hour=%H")
    except ValueError:
        return float("inf")
    return calendar.timegm(at) // _HOUR_S
