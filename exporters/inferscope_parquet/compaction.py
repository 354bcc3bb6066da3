"""Small files of an hour that is over become few, in one step and while others read and write.

Two files cannot be replaced by one at once, but a folder can be by another. So the hour's folder is
made a second time, beside the tables, with the large file in place of the small ones and hard links
to all others in it; then the two change places:

    FOLDER/.compacting/HOST-3f9c2a10/     FOLDER/steps/date=2026-11-22/hour=05/
        HOST-050002-77a01b2c.parquet  ⇄       HOST-050002-….parquet, HOST-050502-….parquet, …

Whoever looks sees the small files or the large one, never both; who had their names from before and
opens them later finds nothing there, which is an error and no wrong sum. A crash leaves the hour as
it was or as it is to be; what lies beside the tables goes when the folder is opened next.
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
"""The folder beside the tables."""
_MOST_GROUP_ROWS = 1 << 17
_MOST_GROUP_BYTES = 16 << 20
"""Of a row group as it lies in memory: what merging takes, some times over."""
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP)
"""A file system that has no exchange or no hard links."""

_logger = logging.getLogger(__name__)

Files = dict[str, tuple[int, int]]
"""Of a folder: inode and size by name."""


class Unfinished(Exception):
    """Somebody asked it to end."""


class Compactor:
    """Merges hours that are over, on a thread of its own: rows that come wait for no merge."""

    def __init__(self, settings: ParquetSettings) -> None:
        """Take the settings; the thread starts with the first hour that is over."""
        self._settings = settings
        self._before_hour: int | None = None
        """Of which somebody has told since the last time; None for nobody."""
        self._seen: dict[Path, int] = {}
        """Folders of hours with nothing to merge, and when they last changed."""
        self._is_over = False
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hours_before(self, hour: int) -> None:
        """Have the hours before one merged, counted since 1970; never waits."""
        with self._changed:
            self._before_hour = hour
            self._changed.notify()
        if self._thread is None and not self._is_over:
            # A daemon: a disk that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Merge no more; a merge under way is given up, as by a crash."""
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
            except Exception as error:  # a thread's top: what it merges is there anyway
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
        trouble: Exception | None = None
        for table in self._settings.tables:
            for folder in sorted((self._settings.folder / table).glob("date=*/hour=*")):
                if self._is_over:
                    raise Unfinished
                if hour_of(folder) >= hour:
                    continue
                try:
                    self._merge(folder, table)
                except FileNotFoundError:  # one was the oldest, and had to go
                    continue
                except (OSError, pa.ArrowException) as error:
                    if isinstance(error, OSError) and error.errno in _CANNOT:
                        raise
                    trouble = trouble or error  # a damaged file keeps no other hour waiting
        if trouble is not None:
            raise trouble

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
    """Merge this host's small files of an hour; tell whether there was something to merge.

    Args:
        folder: of the hour.
        table: whose rows they hold.
        settings: whose files, and how large one may become.
        is_over: asked now and then, whether to give it up.

    Raises:
        OSError: they stay as they are.
        Unfinished: likewise.
    """
    before = _files(folder)
    groups = [] if before is None else _groups(folder, table, before, settings)
    if before is None or not groups:
        return False
    with _beside(settings) as made:
        for group in groups:
            name = f"{group[0][: -len('00000000.parquet')]}{secrets.token_hex(4)}.parquet"
            _merge([folder / each for each in group], made / name, SCHEMAS[table], is_over)
        for name in before.keys() - {name for group in groups for name in group}:
            os.link(folder / name, made / name)
        made.chmod(folder.stat().st_mode & 0o777)
        _sync(made)
        with locked(settings.folder, fcntl.LOCK_EX):
            if _files(folder) != before:
                return False  # somebody wrote or removed a file; there is a next time
            exchange(made, folder)
        _sync(folder.parent)
    return True


def sweep(folder: Path) -> None:
    """Remove what crashes left beside the tables."""
    for left in (folder / COMPACTING).glob("*"):
        with suppress(OSError), _held(left):
            shutil.rmtree(left)
    with suppress(OSError):
        (folder / COMPACTING).rmdir()


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Keep others from exchanging folders, or from making files in them, for a moment.

    Args:
        folder: of all tables.
        how: fcntl.LOCK_EX for who exchanges, LOCK_SH for who makes a file.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every network's file system locks, nor does it exchange
            fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _files(folder: Path) -> Files | None:
    """Return the files of an hour; None where one is being written, or there is more than files."""
    found: Files = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False) or not entry.name.endswith(".parquet"):
                return None
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = (status.st_ino, status.st_size)
    return found


def _groups(folder: Path, table: str, files: Files, settings: ParquetSettings) -> list[list[str]]:
    """Return which files are to become one each, oldest rows first."""
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
    """Tell whether a file's columns are the first of these and mean the same."""
    try:
        found = pq.read_schema(path)
    except (OSError, pa.ArrowException):  # damaged, or gone: not ours to touch
        return False
    told = (found.metadata or {}).get(SCHEMA_KEY.encode())
    is_same = list(found) == list(schema)[: len(found)]
    return is_same and told == str(SCHEMA_VERSION).encode()


def _merge(paths: list[Path], path: Path, schema: pa.Schema, is_over: Callable[[], bool]) -> None:
    """Write the rows of all files into one, in their order."""
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
    """Yield the files' rows; columns that an older one lacks are null."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                part = file.read_row_group(number, use_threads=False)
                for field in list(schema)[part.num_columns :]:
                    part = part.append_column(field, pa.nulls(part.num_rows, field.type))
                yield part.replace_schema_metadata(None)


@contextmanager
def _beside(settings: ParquetSettings) -> Iterator[Path]:
    """Make a folder beside the tables that nobody sweeps away; what is in it at the end goes."""
    parent = settings.folder / COMPACTING
    parent.mkdir(mode=0o700, exist_ok=True)
    made = parent / f"{settings.writer}-{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    try:
        with _held(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # others are at work in it
            parent.rmdir()


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder.

    Raises:
        OSError: somebody else does.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
