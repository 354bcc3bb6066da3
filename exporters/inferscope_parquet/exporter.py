"""The exporter: a collector feeds it and its thread writes; an export waits for the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot
from inferscope.errors import BadInput
from inferscope_parquet.batches import BatchBuilder, RowBatch
from inferscope_parquet.settings import ParquetSettings, read_settings
from inferscope_parquet.writer import Writer

if TYPE_CHECKING:
    from inferscope_parquet.folder import Folder


class ParquetExporter:
    """Writes what becomes final into a folder, by the hour.

    The fold's thread never waits for the disk: batches beyond a few that wait are dropped, the
    oldest first, and counted.
    """

    is_live: ClassVar[bool] = True
    path_settings: ClassVar[tuple[str, ...]] = ("folder",)

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Check the settings; nothing is opened yet.

        Raises:
            BadInput: a setting is not known, or its value cannot be used.
        """
        self._settings = read_settings(settings)
        self._folder: Folder | None = None
        self._writer: Writer | None = None
        self._gatherer: BatchBuilder | None = None

    @classmethod
    def into(cls, folder: Path) -> FolderExport:
        """Return what writes an export into a folder.

        Raises:
            BadInput: it cannot be written to.
            ImportError: pyarrow is not installed.
        """
        return FolderExport(folder)

    def share(self, number: int, total: int) -> None:
        """Write files of its own, which only it merges and removes, and its part of `max_mb`."""
        settings = self._settings
        self._settings = replace(
            settings,
            part=f"{number}-of-{total}",
            max_mb=settings.max_mb / total,
        )

    def describe(self) -> str:
        """Say what it writes, and where."""
        settings = self._settings
        return (
            f"writes {', '.join(settings.tables)} to {settings.folder}, "
            f"a file every {settings.rotate_s:g} s, {settings.max_mb:g} MB at most"
        )

    def check(self) -> None:
        """Import pyarrow; the folder is made when it is opened.

        Raises:
            ImportError: it is not installed.
        """
        import inferscope_parquet.folder  # noqa: F401

    def open(self) -> None:
        """Make the folder.

        Raises:
            BadInput: it cannot be written to.
            ImportError: pyarrow is not installed.
        """
        settings = self._settings
        self._folder = _folder(settings, merges=settings.compact)
        _use_system_allocator()
        self._writer = Writer(self._folder, name=f"Parquet files in {settings.folder}")
        self._gatherer = BatchBuilder(self._writer.put, rotate_ns=settings.rotate_ns)

    def step(self, step: FinalStep) -> None:
        """Take a step."""
        self._gathering.step(step)

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
        self._gathering.request(request)

    def look(self, snapshot: Snapshot) -> None:
        """Take the wall clock and what engines are."""
        self._gathering.look(snapshot)

    def close(self) -> None:
        """Write what is left, as far as that takes no more than three seconds."""
        if self._writer is not None and self._gatherer is not None:
            self._gatherer.end_files()
            self._writer.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return how many rows were given up: queue_full, not_written, closed."""
        return self._writer.num_dropped if self._writer else {}

    @property
    def _gathering(self) -> BatchBuilder:
        assert self._gatherer is not None, "open() comes first"
        return self._gatherer


class FolderExport:
    """Writes an export into a folder."""

    def __init__(self, path: Path) -> None:
        """Make the folder.

        Raises:
            BadInput: it cannot be written to.
            ImportError: pyarrow is not installed.
        """
        settings = ParquetSettings(path, max_mb=1e9)
        self._path = path
        self._folder = _folder(settings, merges=False)
        self._gatherer = BatchBuilder(self._write, rotate_ns=settings.rotate_ns)

    def step(self, step: FinalStep) -> None:
        """Take a step."""
        self._gatherer.step(step)

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
        self._gatherer.request(request)

    def look(self, snapshot: Snapshot) -> None:
        """Take the wall clock and what engines are."""
        self._gatherer.look(snapshot)

    def close(self) -> None:
        """Write what is left.

        Raises:
            BadInput: that cannot be done, with the reason.
        """
        self._gatherer.end_files()

    def _write(self, batch: RowBatch) -> None:
        if batch.offset_ns is None:
            if batch.steps or batch.requests:
                raise BadInput("the records hold no wall clock: their rows belong to no hour.")
            return
        try:
            self._folder.write(batch)
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"cannot write {self._path}: {why}. Choose another place.") from error


def _use_system_allocator() -> None:
    """Have columns made where all else is made: a collector has its process to itself.

    Arrow's own allocator keeps three times what batches take at most, 30 MB; here they mostly take
    what others have left.
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
            f"cannot write {settings.folder}: {error.strerror}. Choose another place."
        ) from error
