"""Exporters: their interfaces, and how the installed ones are found.

An exporter is a class in the entry-point group `inferscope.exporters`. The core imports none by
name, so ours and those of others load the same way. There are two kinds. An `Exporter` converts a
file (`inferscope export`). A `LiveExporter` has `is_live` set, and serves or sends the data of a
collector while it runs (`inferscope collect`). Both receive each final step and request, in fold
order, and are closed once. A live exporter that writes files can also write those of a recording:
its `into` returns a `FolderExporter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, runtime_checkable

from inferscope.document import near
from inferscope.errors import BadInput
from inferscope.fold import DeviceTime, FinalRequest, FinalStep, RunTotals, Snapshot
from inferscope.records import Record

GROUP = "inferscope.exporters"
_OURS = "inferscope-llm"
"""The distribution whose extras are named as its exporters are."""


class Exporter(Protocol):
    """Exporter that writes final steps and requests to a file."""

    def __init__(self, out: IO[bytes]) -> None:
        """Keep the file, which is open for writing; the caller closes it."""

    def on_step(self, step: FinalStep) -> None:
        """Receive a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Receive a request."""

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """Write the totals, which are known only at the end."""


@runtime_checkable
class Listening(Protocol):
    """Optional part of an `Exporter`: it also receives each record, once the record is folded."""

    def on_record(self, ring: int, record: Record) -> None:
        """Receive a record of the ring with this number."""


class LiveExporter(Protocol):
    """Exporter that serves or sends a collector's data.

    One thread calls all of its methods, so that none of them may wait for a peer. If a method
    raises, the exporter is closed and not called again; the others continue.
    """

    is_live: ClassVar[bool]

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Read its section of the configuration; open nothing.

        Raises:
            BadInput: a setting cannot be used, with its key.
        """

    def describe(self) -> str:
        """Return one line about what the exporter does, or will do once it is open."""

    def open(self) -> None:
        """Import heavy packages; bind or connect.

        Raises:
            BadInput: it cannot be opened; the message has the reason.
            ImportError: its extra is not installed.
        """

    def on_step(self, step: FinalStep) -> None:
        """Receive a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Receive a request."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Receive the view of all engines, about once a second.

        Totals count from the collector's start. An engine that has ended stays in the snapshot
        until the collector forgets it; its numbers can be dropped then.
        """

    def close(self) -> None:
        """Send what is buffered, within a bounded time, and release all resources."""


class FolderExporter(Protocol):
    """Exporter that writes final steps and requests into a folder."""

    def on_step(self, step: FinalStep) -> None:
        """Receive a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Receive a request."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Receive the view of all engines, once per second of the recording and at its end."""

    def close(self) -> None:
        """Write what is buffered.

        Raises:
            BadInput: the folder cannot be written; the message has the reason.
        """


@runtime_checkable
class Checkable(Protocol):
    """Optional part of a live exporter, for `inferscope collect --check`."""

    def check(self) -> None:
        """Raise what `open` would raise, and leave nothing open."""


@runtime_checkable
class NamingFiles(Protocol):
    """Optional part of a live exporter: the names of its settings that are paths.

    A relative path is then relative to the folder of the configuration file.
    """

    path_settings: ClassVar[tuple[str, ...]]


@runtime_checkable
class Dropping(Protocol):
    """Optional part of a live exporter: counts of the data that it could not send."""

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return the number of dropped items so far, by reason."""


@runtime_checkable
class KeepsTraces(Protocol):
    """Optional part of a live exporter that sends traces: which requests have one."""

    def kept_trace(self, request: FinalRequest) -> str | None:
        """Return the ID of a request's trace, None if none is sent; has no side effect."""


@runtime_checkable
class LinksTraces(Protocol):
    """Optional part of a live exporter: its data link to traces."""

    def link_traces(self, kept_trace: Callable[[FinalRequest], str | None]) -> None:
        """Keep the function that returns a request's trace ID; called once, before `open`."""


@runtime_checkable
class Sharing(Protocol):
    """Optional part of a live exporter: several collectors can use the same section.

    Several collectors may divide a host's engines under one configuration. For a port or a file,
    which only one of them can have, each uses a number or a name of its own.
    """

    def share(self, number: int, total: int) -> None:
        """Use the resources of one of several collectors; called before `check` and `open`.

        Args:
            number: number of this collector, from 1.
            total: number of collectors.

        Raises:
            BadInput: the limit does not fit that number of shards.
        """


@runtime_checkable
class Replaceable(Protocol):
    """Optional part of a live exporter: it can replace one with other settings.

    If a reloaded configuration changes an exporter's section, another exporter is made. It is
    opened while the former one is still open, so that unusable settings change nothing. The former
    one is closed afterwards.
    """

    def open_replacing(self, former: Any) -> None:
        """Open; `former`, of the same class, may hold resources that `open` needs, and continues.

        Raises:
            BadInput: it cannot be opened; the message has the reason.
            ImportError: its extra is not installed.
        """

    def take_over(self, former: Any) -> None:
        """Take over the former one's resources and counts; the former receives nothing more."""


def exporter_names() -> list[str]:
    """Return the formats that the installed exporters write."""
    return _names(lambda exporter: not is_live(exporter) or _writes_a_folder(exporter))


def live_exporter_names() -> list[str]:
    """Return the names of the installed live exporters."""
    return _names(is_live)


def load_exporter(name: str) -> type[Exporter]:
    """Return an exporter by its format's name.

    Raises:
        BadInput: there is none of that name, or its package's extra is not installed.
    """
    loaded: type[Exporter] = _load(name, exporter_names)
    if _writes_a_folder(loaded):
        raise BadInput(f"{name} writes a folder: `inferscope export FILE --format {name}`.")
    if is_live(loaded):
        raise BadInput(
            f"{name} writes no file: `inferscope collect` feeds it from running engines. "
            f"Formats: {', '.join(exporter_names())}."
        )
    return loaded


def load_folder_exporter(name: str) -> Callable[[Path], FolderExporter] | None:
    """Return a function that makes a folder's exporter; None if the format is a file.

    Raises:
        BadInput: there is no format of that name, or its package's extra is not installed.
    """
    loaded = _load(name, exporter_names)
    if not _writes_a_folder(loaded):
        return None

    def make(folder: Path) -> FolderExporter:
        try:
            exporter: FolderExporter = loaded.into(folder)
        except ImportError as error:
            raise missing_extra(name, error) from error
        return exporter

    return make


def load_live_exporter(name: str) -> type[LiveExporter]:
    """Return a live exporter by its name.

    Raises:
        BadInput: there is none of that name, or its package's extra is not installed.
    """
    loaded: type[LiveExporter] = _load(name, live_exporter_names)
    if not is_live(loaded):
        raise BadInput(
            f"{name} writes files: `inferscope export FILE --format {name}`. "
            f"Exporters of a collector: {', '.join(live_exporter_names())}."
        )
    return loaded


def path_settings(name: str) -> tuple[str, ...]:
    """Return the settings of a live exporter that are paths; none if it cannot be loaded."""
    with suppress(BadInput):  # reported when the exporter is made
        loaded = load_live_exporter(name)
        if isinstance(loaded, NamingFiles):
            return loaded.path_settings
    return ()


def is_live(exporter: type[object]) -> bool:
    """Return whether an exporter is live."""
    return bool(getattr(exporter, "is_live", False))


def missing_extra(name: str, error: ImportError) -> BadInput:
    """Return the error for an exporter that lacks a package; our own have it as an extra."""
    owner = next((e.dist.name for e in metadata.entry_points(group=GROUP, name=name) if e.dist), "")
    if error.name is None:
        why = (str(error).splitlines() or ["its import failed"])[0]
        return BadInput(f"the exporter {name} cannot be loaded: {why}. Ask {owner or 'its maker'}.")
    if owner == _OURS:
        advice = f'Install it with: pip install "{_OURS}[{name}]"'
    else:
        advice = f"Install what {owner or 'its maker'} says that it needs."
    return BadInput(f"the exporter {name} needs {error.name}. {advice}")


def _writes_a_folder(exporter: type[object]) -> bool:
    return hasattr(exporter, "into")


def _names(is_wanted: Callable[[type[object]], bool]) -> list[str]:
    entries = metadata.entry_points(group=GROUP)
    return sorted({entry.name for entry in entries if _may_be(entry, is_wanted)})


def _may_be(entry: metadata.EntryPoint, is_wanted: Callable[[type[object]], bool]) -> bool:
    """Return whether an exporter may be of a kind; one that cannot be loaded may be of any."""
    try:
        return is_wanted(entry.load())
    except (ImportError, AttributeError):
        return True


def _load(name: str, names: Callable[[], list[str]]) -> Any:
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == name:
            try:
                return entry.load()
            except ImportError as error:
                raise missing_extra(name, error) from error
    raise BadInput(f"no exporter is called {name!r}. {near(name, names())}")
