"""Parquet exporter: live, a thread writes; an export writes directly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from inferscope.errors import BadInput
from inferscope.fold import FinalRequest, FinalStep, Snapshot
from inferscope_parquet.batches import BatchBuilder, RowBatch
from inferscope_parquet.settings import ParquetSettings, read_settings
from inferscope_parquet.writer import BatchWriter

if TYPE_CHECKING:
    from inferscope_parquet.folder import Folder


class ParquetExporter:
    """Live exporter that writes final records into a folder, by the hour.

    The fold's thread never waits for the disk: beyond a few waiting batches, the oldest are dropped
    and counted.
    """

    is_live: ClassVar[bool] = True
    path_settings: ClassVar[tuple[str, ...]] = ("folder",)

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Check the settings; open nothing.

        Raises:
            BadInput: a setting is unknown, or its value is invalid.
        """
        self._settings = read_settings(settings)
        self._folder: Folder | None = None
        self._writer: BatchWriter | None = None
        self._gatherer: BatchBuilder | None = None

    @classmethod
    def into(cls, folder: Path) -> FolderExport:
        """Return the writer of an export into a folder.

        Raises:
            BadInput: the folder is not writable.
            ImportError: pyarrow is not installed.
        """
        return FolderExport(folder)

    def share(self, number: int, total: int) -> None:
        """Use its own file names, which only it merges and removes, and its share of `max_mb`."""
        settings = self._settings
        self._settings = replace(
            settings,
            part=f"{number}-of-{total}",
            max_mb=settings.max_mb / total,
        )

    def describe(self) -> str:
        """Return the tables it writes and the destination."""
        settings = self._settings
        return (
            f"writes {', '.join(settings.tables)} to {settings.folder}, "
            f"a file every {settings.rotate_s:g} s, {settings.max_mb:g} MB at most"
        )

    def check(self) -> None:
        """Import pyarrow; `open` creates the folder.

        Raises:
            ImportError: it is not installed.
        """
        import inferscope_parquet.folder  # noqa: F401

    def open(self) -> None:
        """Create the folder.

        Raises:
            BadInput: it is not writable.
            ImportError: pyarrow is not installed.
        """
        settings = self._settings
        self._folder = _folder(settings, merges=settings.compact)
        _use_system_allocator()
        self._writer = BatchWriter(self._folder, name=f"Parquet files in {settings.folder}")
        self._gatherer = BatchBuilder(self._writer.put, rotate_ns=settings.rotate_ns)

    def on_step(self, step: FinalStep) -> None:
        """Add a step."""
        self._gathering.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        self._gathering.on_request(request)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the wall clock and engine labels."""
        self._gathering.on_snapshot(snapshot)

    def close(self) -> None:
        """Write what is left, within three seconds."""
        if self._writer is not None and self._gatherer is not None:
            self._gatherer.end_files()
            self._writer.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return the number of dropped rows by reason: queue_full, not_written, closed."""
        return self._writer.num_dropped if self._writer else {}

    @property
    def _gathering(self) -> BatchBuilder:
        assert self._gatherer is not None, "open() comes first"
        return self._gatherer


class FolderExport:
    """Exporter of a recording into a folder."""

    def __init__(self, path: Path) -> None:
        """Create the folder.

        Raises:
            BadInput: it is not writable.
            ImportError: pyarrow is not installed.
        """
        settings = ParquetSettings(path, max_mb=1e9)
        self._path = path
        self._folder = _folder(settings, merges=False)
        self._gatherer = BatchBuilder(self._write, rotate_ns=settings.rotate_ns)

    def on_step(self, step: FinalStep) -> None:
        """Add a step."""
        self._gatherer.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        self._gatherer.on_request(request)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the wall clock and engine labels."""
        self._gatherer.on_snapshot(snapshot)

    def close(self) -> None:
        """Write what is left.

        Raises:
            BadInput: it cannot be written, with the reason.
        """
        self._gatherer.end_files()

    def _write(self, batch: RowBatch) -> None:
        if batch.offset_ns is None:
            if batch.steps or batch.requests:
                raise BadInput("the records have no wall clock, so their rows have no hour.")
            return
        try:
            self._folder.write(batch)
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"cannot write {self._path}: {why}. Choose another folder.") from error


def _use_system_allocator() -> None:
    """Make Arrow use the system allocator: a collector has its process to itself.

    Arrow's own allocator retains three times the maximum of a batch, 30 MB; with the system's,
    columns mostly reuse freed memory.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())


def _folder(settings: ParquetSettings, *, merges: bool) -> Folder:
    from inferscope_parquet.compaction import Compactor
    from inferscope_parquet.folder import Folder

    try:
        return Folder(settings, compactor=Compactor(settings) if merges else None)
    except OSError as error:
        raise BadInput(
            f"cannot write {settings.folder}: {error.strerror}. Choose another folder."
        ) from error
