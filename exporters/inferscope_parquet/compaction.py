"""Compaction of a past hour's small files into few, atomically for readers and writers.

Several files cannot be replaced by one atomically, but a directory can be exchanged with another.
So the hour's directory is built a second time, next to the tables, with the large file in place of
the small ones and hard links to all others; then the two are exchanged:

    FOLDER/.compacting/HOST-3f9c2a10/     FOLDER/steps/date=2026-11-22/hour=05/
        HOST-050002-77a01b2c.parquet  ⇄       HOST-050002-….parquet, HOST-050502-….parquet, …

A reader sees the small files or the large one, never both. One that listed the old names and opens
them later gets an error, never a wrong sum. A crash leaves the hour in its old or new state;
leftovers are removed when the folder is next opened.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from inferscope.private import open_private
from inferscope_parquet.encoding import writer_of
from inferscope_parquet.exchange import exchange
from inferscope_parquet.naming import hour_of, is_written_by
from inferscope_parquet.settings import ParquetSettings
from inferscope_parquet.tables import SCHEMA_KEY, SCHEMA_VERSION, SCHEMAS

COMPACTING = ".compacting"
"""Name of the working directory next to the tables."""
_MOST_GROUP_ROWS = 1 << 17
_MOST_GROUP_BYTES = 16 << 20
"""Maximum size of a row group in memory; merging takes several times as much."""
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP)
"""Errors of a file system without exchange or hard links."""

_logger = logging.getLogger(__name__)

Files = dict[str, tuple[int, int]]
"""Files of a directory: inode and size by name."""


class Unfinished(Exception):
    """Merge interrupted by its caller."""


class Compactor:
    """Thread that merges past hours: new rows never wait for a merge."""

    def __init__(self, settings: ParquetSettings) -> None:
        """Keep the settings; the thread starts with the first past hour."""
        self._settings = settings
        self._before_hour: int | None = None
        """Hour before which to merge, set since the last run; None without one."""
        self._seen: dict[Path, int] = {}
        """Directories of hours with nothing to merge, and their last change."""
        self._is_over = False
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def merge_before(self, hour: int) -> None:
        """Schedule the merge of the hours before one, counted since 1970; never waits."""
        with self._changed:
            self._before_hour = hour
            self._changed.notify()
        if self._thread is None and not self._is_over:
            # A daemon: a hanging disk must not keep the process from exiting.
            self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop merging; a merge in progress is discarded, as by a crash."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._is_over:
            with self._changed:
                while self._before_hour is None and not self._is_over:
                    self._changed.wait()
                hour, self._before_hour = self._before_hour, None
            try:
                self._merge_before(hour or 0)
            except Unfinished:
                return
            except Exception as error:  # a thread's top level: the small files remain valid
                if isinstance(error, OSError) and error.errno in _CANNOT:
                    _logger.warning(
                        "%s: small files stay, its file system cannot put a folder in another's "
                        "place: %s",
                        self._settings.folder,
                        error.strerror,
                    )
                    return
                if not self._has_failed:
                    _logger.warning(
                        "%s: small files stay for now: %s", self._settings.folder, error
                    )
                self._has_failed = True
            else:
                self._has_failed = False

    def _merge_before(self, hour: int) -> None:
        failure: Exception | None = None
        for table in self._settings.tables:
            for folder in sorted((self._settings.folder / table).glob("date=*/hour=*")):
                if self._is_over:
                    raise Unfinished
                if hour_of(folder) >= hour:
                    continue
                try:
                    self._merge(folder, table)
                except FileNotFoundError:  # removed as the oldest meanwhile
                    continue
                except (OSError, pa.ArrowException) as error:
                    if isinstance(error, OSError) and error.errno in _CANNOT:
                        raise
                    failure = failure or error  # a damaged file must not block other hours
        if failure is not None:
            raise failure

    def _merge(self, folder: Path, table: str) -> None:
        """Merge an hour, unless nothing has changed there since the last time."""
        changed_ns = folder.stat().st_mtime_ns
        if self._seen.get(folder) != changed_ns:
            if compact(folder, table, self._settings, is_over=lambda: self._is_over):
                changed_ns = folder.stat().st_mtime_ns
            self._seen[folder] = changed_ns


def compact(
    folder: Path,
    table: str,
    settings: ParquetSettings,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Merge this host's small files of an hour; return whether there was something to merge.

    Args:
        folder: directory of the hour.
        table: table of the files.
        settings: writer of the files, and their maximum size.
        is_over: polled: whether to stop.

    Raises:
        OSError: the files stay as they are.
        Unfinished: likewise.
    """
    before = _files(folder)
    groups = [] if before is None else _groups(folder, table, before, settings)
    if before is None or not groups:
        return False
    with _working_folder(settings) as made:
        for group in groups:
            name = f"{group[0][: -len('00000000.parquet')]}{secrets.token_hex(4)}.parquet"
            _merge([folder / each for each in group], made / name, SCHEMAS[table], is_over)
        for name in before.keys() - {name for group in groups for name in group}:
            os.link(folder / name, made / name)
        made.chmod(folder.stat().st_mode & 0o777)
        _sync(made)
        with locked(settings.folder, fcntl.LOCK_EX):
            if _files(folder) != before:
                return False  # a file was written or removed; retry next time
            exchange(made, folder)
        _sync(folder.parent)
    return True


def sweep(folder: Path) -> None:
    """Remove the leftovers of crashes next to the tables."""
    for left in (folder / COMPACTING).glob("*"):
        with suppress(OSError), _locked_folder(left):
            shutil.rmtree(left)
    with suppress(OSError):
        (folder / COMPACTING).rmdir()


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Lock the folder against exchanges, or against new files, for a moment.

    Args:
        folder: directory of all tables.
        how: fcntl.LOCK_EX to exchange directories, LOCK_SH to create a file.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems have no locks, nor exchange
            fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _files(folder: Path) -> Files | None:
    """Return the files of an hour; None if one is being written, or there are other entries."""
    found: Files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) or not entry.name.endswith(".parquet"):
                return None
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = (status.st_ino, status.st_size)
    return found


def _groups(folder: Path, table: str, files: Files, settings: ParquetSettings) -> list[list[str]]:
    """Return the groups of files to merge, oldest rows first."""
    groups: list[list[str]] = []
    num_bytes = settings.rotate_bytes
    for name in sorted(files):
        size = files[name][1]
        if not is_written_by(name, settings.writer) or 2 * size > settings.rotate_bytes:
            continue
        if not _fits(folder / name, SCHEMAS[table]):
            continue
        if num_bytes + size > settings.rotate_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += size
    return [group for group in groups if len(group) > 1]


def _fits(path: Path, schema: pa.Schema) -> bool:
    """Return whether a file's columns are a prefix of the schema with the same meaning."""
    try:
        found = pq.read_schema(path)
    except (OSError, pa.ArrowException):  # damaged or removed: leave it alone
        return False
    version = (found.metadata or {}).get(SCHEMA_KEY.encode())
    is_same = list(found) == list(schema)[: len(found)]
    return is_same and version == str(SCHEMA_VERSION).encode()


def _merge(paths: list[Path], path: Path, schema: pa.Schema, is_over: Callable[[], bool]) -> None:
    """Write the rows of all files into one, in order."""
    with os.fdopen(open_private(path), "wb") as stream:
        with writer_of(stream, schema) as writer:
            waiting: list[pa.Table] = []
            for part in _row_groups(paths, schema):
                if is_over():
                    raise Unfinished
                waiting.append(part)
                if (
                    sum(each.num_rows for each in waiting) >= _MOST_GROUP_ROWS
                    or sum(each.nbytes for each in waiting) >= _MOST_GROUP_BYTES
                ):
                    writer.write_table(pa.concat_tables(waiting), _MOST_GROUP_ROWS)
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting), _MOST_GROUP_ROWS)
        stream.flush()
        os.fsync(stream.fileno())


def _row_groups(paths: list[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the files' rows; columns missing in an older file are null."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                part = file.read_row_group(number, use_threads=False)
                for field in list(schema)[part.num_columns :]:
                    part = part.append_column(field, pa.nulls(part.num_rows, field.type))
                yield part.replace_schema_metadata(None)


@contextmanager
def _working_folder(settings: ParquetSettings) -> Iterator[Path]:
    """Create a locked working directory next to the tables; its content is removed at the end."""
    parent = settings.folder / COMPACTING
    parent.mkdir(mode=0o700, exist_ok=True)
    made = parent / f"{settings.writer}-{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    try:
        with _locked_folder(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # in use by others
            parent.rmdir()


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock a directory.

    Raises:
        OSError: another process holds the lock.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    """Flush a directory's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
