"""Exporters: what they are, and how the ones installed here are found.

An exporter is a class in the entry-point group `inferscope.exporters`. The core knows none by
import: ours and a third party's load the same way. It is told everything that becomes final, in
fold order, and closed once.
"""

from __future__ import annotations

import os
import stat
from importlib import metadata
from pathlib import Path
from typing import IO, Protocol

from inferscope.collector.finals import DeviceTime, FinalRequest, FinalStep, RunTotals
from inferscope.errors import BadInput

GROUP = "inferscope.exporters"


class Exporter(Protocol):
    """Writes final steps and requests to a file."""

    def __init__(self, out: IO[bytes]) -> None:
        """Take the file, open for writing; the caller closes it."""

    def step(self, step: FinalStep) -> None:
        """Take a step."""

    def request(self, request: FinalRequest) -> None:
        """Take a request."""

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """Write what is only known at the end."""


def exporter_names() -> list[str]:
    """Return the formats that can be exported here."""
    return sorted(entry.name for entry in metadata.entry_points(group=GROUP))


def load_exporter(name: str) -> type[Exporter]:
    """Return an exporter by its format's name.

    Raises:
        BadInput: there is none of that name, or its package's extra is not installed.
    """
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == name:
            try:
                loaded: type[Exporter] = entry.load()
            except ImportError as error:
                raise BadInput(
                    f"the exporter {name} needs {error.name}. "
                    f'Install it with: pip install "inferscope[{name}]"'
                ) from error
            return loaded
    raise BadInput(f"no exporter is called {name!r}. Installed: {', '.join(exporter_names())}.")


def private_file(path: Path) -> IO[bytes]:
    """Create a file, or empty it, so that only its owner can read it.

    Raises:
        BadInput: it cannot be created, with the reason.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(handle).st_mode):  # never a device: root could change it
            os.fchmod(handle, 0o600)  # it may have been there, open to others
        return os.fdopen(handle, "wb")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another place.") from error
