"""Merges an hour again and again, each time a copy of it, and each time crashes a little later.

Its arguments are the folder to copy and the folder for the copies, which are called by the number
of the thing that was not done any more: opening, listing, linking, making or removing a file or
folder. Python tells of each before it does it. In the last copy all of it was done. The crash is an
`_exit`: nothing is closed, flushed or removed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from inferscope_parquet.compaction import compact
from inferscope_parquet.settings import ParquetSettings

_EVENTS = ("os.link", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.scandir")
_CRASHED = 9


def merge(folder: Path, last: int) -> None:
    """Merge, up to a thing."""
    (hour,) = folder.glob("steps/date=*/hour=*")
    num_done = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal num_done
        if event in _EVENTS or (event == "open" and str(folder) in str(arguments[0])):
            num_done += 1
            if num_done == last:
                os._exit(_CRASHED)

    sys.addaudithook(count)
    compact(hour, "steps", ParquetSettings(folder, host="mine"))


def main(template: Path, copies: Path) -> None:
    """Merge one copy after the other, each in a process of its own."""
    code, last = _CRASHED, 0
    while code == _CRASHED:
        last += 1
        folder = copies / str(last)
        shutil.copytree(template, folder)
        child = os.fork()
        if not child:
            merge(folder, last)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code)


main(Path(sys.argv[1]), Path(sys.argv[2]))
