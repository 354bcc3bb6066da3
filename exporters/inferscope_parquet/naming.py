"""What the names of files and folders say: whose rows of which hour."""

from __future__ import annotations

import calendar
import re
import time
from pathlib import Path

NO_HOST = "export"
"""In place of the name of a host."""
_HOUR_S = 3600


def is_written_by(name: str, writer: str) -> bool:
    """Tell whether a whole file is of a writer; one's name may be the beginning of another's."""
    return re.fullmatch(rf"{re.escape(writer)}-\d{{6}}-[0-9a-f]{{8}}\.parquet", name) is not None


def hour_of(folder: Path) -> float:
    """Return the hours since 1970 of a folder; of one that is none of ours, the future."""
    try:
        at = time.strptime(f"{folder.parent.name} {folder.name}", "date=%Y-%m-%d hour=%H")
    except ValueError:
        return float("inf")
    return calendar.timegm(at) // _HOUR_S
