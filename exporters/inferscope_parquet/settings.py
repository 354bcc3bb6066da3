"""Validated settings of the exporter."""

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
    """Destination, tables and retention of files."""

    folder: Path
    tables: tuple[str, ...] = TABLES
    host: str | None = None
    """Host name: a column, and the prefix of file names; None is unknown."""
    rotate_s: float = 300.0
    """Maximum age of an open file: the maximum loss by a crash."""
    rotate_mb: float = 128.0
    """Maximum size of a file."""
    max_mb: float = 10_240.0
    """Maximum size of all files of this host; the oldest hours are removed first."""
    keep_hours: float | None = None
    """Maximum age of hours; None keeps what fits."""

    compact: bool = True
    """Whether to merge the small files of past hours."""

    part: str = ""
    """Number of this writer among the host's; empty for a single one."""

    @property
    def writer(self) -> str:
        """Return the prefix of its file names."""
        return "-".join(filter(None, (self.host or NO_HOST, self.part)))

    @property
    def rotate_ns(self) -> int:
        """Return the maximum age of an open file."""
        return round(self.rotate_s * 1e9)

    @property
    def rotate_bytes(self) -> int:
        """Return the maximum size of a file."""
        return round(self.rotate_mb * 1e6)

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of all files of this host."""
        return round(self.max_mb * 1e6)


_NAMES = [each.name for each in fields(ParquetSettings) if each.name != "part"]


def read_settings(given: Mapping[str, object]) -> ParquetSettings:
    """Check a section of the configuration.

    Raises:
        BadInput: a name is unknown, or a value is invalid.
    """
    only(given, _NAMES)
    folder, host = given.get("folder"), given.get("host", socket.gethostname())
    if not isinstance(folder, str) or not folder:
        raise BadInput(f"folder is {folder!r}. Give a path to write files into.")
    if "://" in folder:  # as a path it would be created here
        raise BadInput(
            f"folder is {folder!r}. Give a local path; a sync job copies its files to an object "
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
