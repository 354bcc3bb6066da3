"""Exporters: what they are, and how the ones installed here are found.

An exporter is a class in the entry-point group `inferscope.exporters`. The core knows none by
import: ours and a third party's load the same way. There are two kinds. An `Exporter` turns a file
into another (`inferscope export`); a `LiveExporter` says so by `is_live` and serves or sends what a
collector sees, for as long as it runs (`inferscope collect`). Both are told everything that becomes
final, in fold order, and closed once. A live one that writes files may do so for a recording too:
`into` returns its `FolderExporter`.
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
    """Writes final steps and requests to a file."""

    def __init__(self, out: IO[bytes]) -> None:
        """Take the file, open for writing; the caller closes it."""

    def on_step(self, step: FinalStep) -> None:
        """Take a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Take a request."""

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """Write what is only known at the end."""


@runtime_checkable
class Listening(Protocol):
    """Optional part of an `Exporter` that also receives each record once it is folded."""

    def on_record(self, ring: int, record: Record) -> None:
        """Take a record of the ring with this number."""


class LiveExporter(Protocol):
    """Serves or sends what a collector sees. One thread calls it: it must never wait for a peer.

    If a method raises, the exporter is closed and not called again; the others go on.
    """

    is_live: ClassVar[bool]

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Take its section of the configuration; open nothing.

        Raises:
            BadInput: a setting cannot be used, with its key.
        """

    def describe(self) -> str:
        """Return one line about what the exporter does, or will do once it is open."""

    def open(self) -> None:
        """Import what is heavy; bind or connect.

        Raises:
            BadInput: it cannot, with the reason.
            ImportError: its extra is not installed.
        """

    def on_step(self, step: FinalStep) -> None:
        """Take a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Take a request."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the view of all engines, about once a second.

        Totals count from when the collector began to count. An engine that is gone stays in it
        until it is forgotten; then its numbers can be dropped.
        """

    def close(self) -> None:
        """Send what is left, within a bounded time, and let go of everything."""


class FolderExporter(Protocol):
    """Writes final steps and requests into a folder."""

    def on_step(self, step: FinalStep) -> None:
        """Take a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Take a request."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the view of all engines, about once in a second of the recording, and at its end."""

    def close(self) -> None:
        """Write what is left.

        Raises:
            BadInput: it cannot, with the reason.
        """


@runtime_checkable
class Checkable(Protocol):
    """What a live exporter may offer besides: `inferscope collect --check` asks for it."""

    def check(self) -> None:
        """Find out whether `open` would take_over, and leave nothing open; raise what it would."""


@runtime_checkable
class NamingFiles(Protocol):
    """What a live exporter may offer besides: which of its settings are files or folders.

    One that is relative is then found beside the configuration that names it.
    """

    path_settings: ClassVar[tuple[str, ...]]


@runtime_checkable
class Dropping(Protocol):
    """What a live exporter may offer besides: an account of what it could not send."""

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return how much it gave up so far, by reason."""


@runtime_checkable
class KeepsTraces(Protocol):
    """What a live exporter may offer besides: it knows which requests have traces."""

    def kept_trace(self, request: FinalRequest) -> str | None:
        """Return the id of the trace that is kept of a request, None where none is; pure."""


@runtime_checkable
class LinksTraces(Protocol):
    """What a live exporter may offer besides: it links what it tells to traces."""

    def link_traces(self, kept_trace: Callable[[FinalRequest], str | None]) -> None:
        """Take what tells a request's trace; called once, before it is opened."""


@runtime_checkable
class Sharing(Protocol):
    """What a live exporter may offer besides: it leaves room for others of the same section.

    Several collectors may share a host's engines and one configuration. What only one can have, a
    port or a file, each then takes under a name or a number of its own.
    """

    def share(self, number: int, total: int) -> None:
        """Be one of several; called before it is checked or opened.

        Args:
            number: which one, from 1 on.
            total: how many there are.

        Raises:
            BadInput: the limit does not fit that number of shards.
        """


@runtime_checkable
class Replaceable(Protocol):
    """What a live exporter may offer besides: it goes on where one with other settings ends.

    Where a configuration that is read again changes an exporter's section, another one is made. It
    is opened while the former one is open still, so that settings that cannot be used change
    nothing; the former one is closed after that.
    """

    def open_replacing(self, former: Any) -> None:
        """Open; `former`, of the same class, may hold what `open` would want, and goes on.

        Raises:
            BadInput: it cannot, with the reason.
            ImportError: its extra is not installed.
        """

    def take_over(self, former: Any) -> None:
        """Take over what the former one holds and counts; it is fed no more, and then closed."""


def exporter_names() -> list[str]:
    """Return the formats that can be exported here."""
    return _names(lambda exporter: not is_live(exporter) or _writes_a_folder(exporter))


def live_exporter_names() -> list[str]:
    """Return the exporters that a collector can feed here."""
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
    """Return what makes an exporter of a folder; None where the format is a file.

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
    """Return which settings of a live exporter are paths; none of one that cannot be loaded."""
    with suppress(BadInput):  # reported when the exporter is made
        loaded = load_live_exporter(name)
        if isinstance(loaded, NamingFiles):
            return loaded.path_settings
    return ()


def is_live(exporter: type[object]) -> bool:
    """Return whether an exporter is live."""
    return bool(getattr(exporter, "is_live", False))


def missing_extra(name: str, error: ImportError) -> BadInput:
    """Return what to say of an exporter that misses a package: ours have it as an extra."""
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
    """Return whether an exporter can be of a kind; one that cannot be loaded may be of any."""
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
