"""Files of a table and an hour, complete or absent: written under another name, then renamed.

    FOLDER/requests/date=2026-11-22/hour=05/HOST-050501-3f9c2a10.parquet

The time is that of a file's first row. A file being written ends in `.partial` and is locked by its
writer; opening the folder removes unlocked ones.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from inferscope.private import open_private
from inferscope_parquet.batches import RowBatch
from inferscope_parquet.compaction import Compactor, locked, sweep
from inferscope_parquet.encoding import writer_of
from inferscope_parquet.naming import hour_of, is_written_by
from inferscope_parquet.settings import TABLES, ParquetSettings
from inferscope_parquet.tables import (
    SCHEMAS,
    by_hour,
    first_s,
    table_of,
)

_PARTIAL = ".partial"
_MOST_GROUP_ROWS = 1 << 17
_HOUR_NS = 3_600_000_000_000


class Folder:
    """Writer of batches into files.

    Attributes:
        num_lost: rows lost with files that could not be completed.
    """

    def __init__(self, settings: ParquetSettings, *, compactor: Compactor | None = None) -> None:
        """Create the folder if necessary, and remove the leftovers of a crash.

        Args:
            settings: path and limits.
            compactor: merges past hours.

        Raises:
            OSError: the folder is not writable.
        """
        self._settings = settings
        self._compactor = compactor
        self._open: dict[tuple[str, int], _File] = {}
        self._newest_hour = 0
        self._first_offset_ns: int | None = None
        self.num_lost = 0
        settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(settings.folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13), str(settings.folder))
        self._sweep()

    def write(self, batch: RowBatch) -> None:
        """Write a batch; if it ends its files, complete them.

        Raises:
            OSError: the disk is full or gone; its files are discarded.
            ArrowException: a row does not fit its columns; nothing of the batch is written.
        """
        written = 0
        try:
            parts = self._parts(batch)
            if parts:
                self._newest_hour = self._hour_of(batch, max(hour for _, hour, _ in parts))
            for name, hour, part in parts:
                file = self._file(name, hour, part)
                file.write(part)
                written += part.num_rows
                if file.num_bytes() >= self._settings.rotate_bytes:
                    self._end(name, hour)
        except BaseException:
            self.num_lost += self.num_rows(batch) - written
            self.discard()
            raise
        if batch.ends_files:
            self.end_files()

    def num_rows(self, batch: RowBatch) -> int:
        """Return the number of rows of a batch."""
        rows = {
            "requests": len(batch.requests),
            "steps": len(batch.steps),
            "slices": sum(len(step.request_ids) for step in batch.steps),
        }
        return sum(rows[name] for name in self._settings.tables)

    def end_files(self) -> None:
        """Complete all files, and remove those beyond age and size limits.

        Raises:
            OSError: one cannot be completed; it and the others are discarded.
        """
        try:
            for name, hour in list(self._open):
                self._end(name, hour)
        except BaseException:
            self.discard()
            raise
        self._remove_oldest()
        if self._compactor is not None:
            self._compactor.merge_before(self._newest_hour)

    def _parts(self, batch: RowBatch) -> list[tuple[str, int, pa.Table]]:
        """Return the batch's rows by table and hour, all before any is written."""
        if not batch.steps and not batch.requests:
            return []
        names = self._settings.tables
        tables = [(name, table_of(name, batch, host=self._settings.host)) for name in names]
        return [(name, *hour) for name, table in tables for hour in by_hour(name, table).items()]

    def _hour_of(self, batch: RowBatch, hour: int) -> int:
        """Return the hour from which the age of files is counted.

        A wall clock that was set ahead, even briefly, makes no file old.
        """
        assert batch.offset_ns is not None
        if self._first_offset_ns is None:
            self._first_offset_ns = batch.offset_ns
        return hour - max(0, batch.offset_ns - self._first_offset_ns) // _HOUR_NS

    def close(self) -> None:
        """Stop merging; open files stay unfinished."""
        if self._compactor is not None:
            self._compactor.close()

    def discard(self) -> None:
        """Remove the files that are not complete."""
        files, self._open = self._open, {}
        for file in files.values():
            self.num_lost += file.num_rows
            file.discard()

    def _file(self, name: str, hour: int, rows: pa.Table) -> _File:
        """Return the file for rows of an hour; the first row determines its name."""
        key = (name, hour)
        if key not in self._open:
            at = time.gmtime(first_s(name, rows))
            day = self._settings.folder / name / time.strftime("date=%Y-%m-%d", at)
            folder = day / time.strftime("hour=%H", at)
            stem = f"{self._settings.writer}-{time.strftime('%H%M%S', at)}"
            with locked(self._settings.folder, fcntl.LOCK_SH):
                for each in (day.parent, day, folder):
                    each.mkdir(mode=0o700, exist_ok=True)
                path = folder / f"{stem}-{secrets.token_hex(4)}.parquet"
                self._open[key] = _File(path, SCHEMAS[name])
        return self._open[key]

    def _end(self, name: str, hour: int) -> None:
        self._open[name, hour].end()
        del self._open[name, hour]

    def _sweep(self) -> None:
        """Remove unfinished files of exited writers."""
        for path in self._files(f"*.parquet{_PARTIAL}"):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        sweep(self._settings.folder)

    def _remove_oldest(self) -> None:
        """Remove this writer's oldest files beyond the limits, counted from its newest hour."""
        settings = self._settings
        num_bytes, eldest = 0, 0.0
        if settings.keep_hours is not None:
            eldest = self._newest_hour - settings.keep_hours
        ours = [p for p in self._files("*.parquet") if is_written_by(p.name, settings.writer)]
        for path in sorted(ours, key=lambda path: (hour_of(path.parent), path.name), reverse=True):
            with suppress(OSError):
                num_bytes += path.stat().st_size
                if num_bytes > settings.max_bytes or hour_of(path.parent) < eldest:
                    path.unlink()
                    for folder in (path.parent, path.parent.parent):
                        folder.rmdir()  # fails silently unless empty

    def _files(self, pattern: str) -> Iterator[Path]:
        for name in TABLES:
            yield from self._settings.folder.glob(f"{name}/date=*/hour=*/{pattern}")


class _File:
    """One file being written.

    Attributes:
        num_rows: rows written so far.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._path = path
        self._partial = path.with_name(path.name + _PARTIAL)
        self._stream: IO[bytes] = os.fdopen(open_private(self._partial), "wb")
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._writer = writer_of(self._stream, schema)

    def write(self, table: pa.Table) -> None:
        """Write rows."""
        self._writer.write_table(table, _MOST_GROUP_ROWS)
        self.num_rows += table.num_rows

    def num_bytes(self) -> int:
        """Return its current size in bytes."""
        return self._stream.tell()

    def end(self) -> None:
        """Complete and rename it."""
        self._writer.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._partial.rename(self._path)
        self._stream.close()

    def discard(self) -> None:
        """Remove it."""
        with suppress(OSError, ValueError, pa.ArrowException):
            self._writer.close()
        with suppress(OSError, ValueError):
            self._stream.close()
        with suppress(OSError):
            self._partial.unlink()
