"""The exporter's section of the configuration, checked once."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from inferscope.document import only
from inferscope.errors import BadInput
from inferscope_parquet.naming import NO_HOST

TABLES = ("requests", "steps", "slices")


@dataclass(frozen=True)
class ParquetSettings:
    """Where the files go, which, and how long they stay."""

    folder: Path
    tables: tuple[str, ...] = TABLES
    host: str | None = None
    """Whose rows they are: a column, and the beginning of the files' names; None is unknown."""
    rotate_s: float = 300.0
    """A file is ended after this: what a crash can cost."""
    rotate_mb: float = 128.0
    """Or when it is as large as this."""
    max_mb: float = 10_240.0
    """Of all files of this host; the oldest hours go first."""
    keep_hours: float | None = None
    """Older hours go; None keeps what fits."""

    compact: bool = True
    """Merge the small files of an hour once it is over."""

    part: str = ""
    """Of the host's writers, which one this is; empty where there is but one."""

    @property
    def writer(self) -> str:
        """Return with what the names of its files begin."""
        return "-".join(filter(None, (self.host or NO_HOST, self.part)))

    @property
    def rotate_ns(self) -> int:
        """After this a file is ended."""
        return round(self.rotate_s * 1e9)

    @property
    def rotate_bytes(self) -> int:
        """At this size a file is ended."""
        return round(self.rotate_mb * 1e6)

    @property
    def max_bytes(self) -> int:
        """All files of this host."""
        return round(self.max_mb * 1e6)


_NAMES = [each.name for each in fields(ParquetSettings) if each.name != "part"]


def read_settings(given: Mapping[str, object]) -> ParquetSettings:
    """Check a section of the configuration.

    Raises:
        BadInput: a name in it is not known, or a value cannot be used.
    """
    only(given, _NAMES)
    folder, host = given.get("folder"), given.get("host", socket.gethostname())
    if not isinstance(folder, str) or not folder:
        raise BadInput(f"folder is {folder!r}. Give one that the files are to be written into.")
    if "://" in folder:  # as a path it would be made, here
        raise BadInput(
            f"folder is {folder!r}. Give one of this host; a sync brings its files to an object "
            "store (docs/files.md)."
        )
    if not isinstance(host, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", host):
        raise BadInput(f"host is {host!r}. Give a name of letters, digits, dots and dashes.")
    tables = given.get("tables", list(TABLES))
    if not isinstance(tables, list) or not tables or not set(tables) <= set(TABLES):
        raise BadInput(f"tables is {tables!r}. Give a list of some of: {', '.join(TABLES)}.")
    keep_hours, compact = given.get("keep_hours"), given.get("compact", True)
    if not isinstance(compact, bool):
        raise BadInput(f"compact is {compact!r}. Give true or false.")
    return ParquetSettings(
        Path(folder),
        tuple(name for name in TABLES if name in tables),
        host,
        _number("rotate_s", given.get("rotate_s", ParquetSettings.rotate_s), least=1),
        _number("rotate_mb", given.get("rotate_mb", ParquetSettings.rotate_mb), least=1),
        _number("max_mb", given.get("max_mb", ParquetSettings.max_mb), least=1),
        None if keep_hours is None else _number("keep_hours", keep_hours, least=1),
        compact,
    )


def _number(name: str, value: object, *, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e9:
        raise BadInput(f"{name} is {value!r}. Give a number from {least:g} to 1e9.")
    return float(value)
