"""The live exporters of a collector: each is fed until it raises; its end is not the others'."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot
from inferscope.errors import BadInput
from inferscope.exporting import (
    Checkable,
    Dropping,
    KeepsTraces,
    LinksTraces,
    LiveExporter,
    load_live_exporter,
    missing_extra,
)

Final = TypeVar("Final")

FLUSH_S = 5.0
"""For all exporters together, to send what is left."""


def make_exporters(
    sections: Mapping[str, Mapping[str, object]],
) -> dict[str, LiveExporter]:
    """Return an exporter for each section of the configuration, none of them open.

    Raises:
        BadInput: there is no such exporter, or a setting of it cannot be used.
    """
    made = {}
    for name, settings in sections.items():
        kind = load_live_exporter(name)
        try:
            made[name] = kind(settings)
        except BadInput as error:
            raise BadInput(f"exporters.{name}: {error}") from error
    return made


def check_exporters(exporters: Mapping[str, LiveExporter]) -> None:
    """Find out whether all could be opened, as far as they can tell without being opened.

    Raises:
        BadInput: one could not, with the reason.
    """
    for name, exporter in exporters.items():
        if isinstance(exporter, Checkable):
            try:
                exporter.check()
            except ImportError as error:
                raise missing_extra(name, error) from error


class Outlets:
    """Feeds exporters.

    An exporter is somebody else's code: whatever it raises costs one line and that exporter.
    """

    def __init__(
        self, exporters: Mapping[str, LiveExporter], *, say: Callable[[str], None]
    ) -> None:
        """Take exporters that are not open, and what prints a line."""
        self._on: dict[str, LiveExporter] = {}
        self._switch_on(exporters)
        self._closing: list[_Closing] = []
        self._say = say
        for exporter in exporters.values():
            if isinstance(exporter, LinksTraces):
                exporter.link_traces(self._kept_trace)

    def open(self) -> None:
        """Open all.

        Raises:
            BadInput: one cannot be opened; those before it are closed again.
        """
        opened: dict[str, LiveExporter] = {}
        for name, exporter in self._on.items():
            try:
                exporter.open()
            except Exception as error:
                self._switch_on(opened)
                self.close()
                if isinstance(error, ImportError):
                    raise missing_extra(name, error) from error
                raise
            opened[name] = exporter
            self._say(f"{name}: {exporter.describe()}")

    def step(self, step: FinalStep) -> None:
        """Hand on a step."""
        for name, take in self._steps:
            try:
                take(step)
            except Exception as error:  # noqa: PERF203  # one's end is not the others'
                self._switch_off(name, error)

    def request(self, request: FinalRequest) -> None:
        """Hand on a request."""
        for name, take in self._requests:
            try:
                take(request)
            except Exception as error:  # noqa: PERF203  # one's end is not the others'
                self._switch_off(name, error)

    def look(self, snapshot: Snapshot) -> None:
        """Hand on a view, with what the exporters could not send so far."""
        dropped: dict[str, dict[str, int]] = {}
        for name, exporter in tuple(self._on.items()):
            self._hand_on(name, partial(_account, exporter, name), dropped)
        snapshot = replace(snapshot, dropped=dropped)
        for name, exporter in tuple(self._on.items()):
            self._hand_on(name, exporter.look, snapshot)

    def close(self) -> bool:
        """Close all, within a bounded time; tell whether all of them came to an end."""
        self._closing += [_Closing(name, exporter) for name, exporter in self._on.items()]
        self._switch_on({})
        end_s = time.monotonic() + FLUSH_S
        for one in self._closing:
            one.join(max(0.0, end_s - time.monotonic()))
            if one.is_alive():
                self._say(f"the exporter {one.name} was not through after {FLUSH_S:g} s")
            elif one.error is not None:
                self._say(f"the exporter {one.name} did not close well: {_words(one.error)}")
        return not any(one.is_alive() for one in self._closing)

    def _switch_on(self, exporters: Mapping[str, LiveExporter]) -> None:
        """Feed these from now on. What is called thousands of times a second is looked up here."""
        self._on = dict(exporters)
        self._steps = [(name, exporter.step) for name, exporter in exporters.items()]
        self._requests = [(name, exporter.request) for name, exporter in exporters.items()]
        self._keepers = [
            (name, exporter.kept_trace)
            for name, exporter in exporters.items()
            if isinstance(exporter, KeepsTraces)
        ]

    def _kept_trace(self, request: FinalRequest) -> str | None:
        """Return the trace of a request, as whoever keeps traces tells."""
        for name, tell in self._keepers:
            try:
                return tell(request)
            except Exception as error:  # noqa: PERF203  # likewise
                self._switch_off(name, error)
        return None

    def _hand_on(self, name: str, take: Callable[[Final], None], what: Final) -> None:
        try:
            take(what)
        except Exception as error:
            self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        exporter = self._on.get(name)
        if exporter is None:
            return
        self._switch_on({other: one for other, one in self._on.items() if other != name})
        self._say(f"the exporter {name} is switched off, it raised {_words(error)}")
        # What it serves would be stale from now on. It may hang as well as raise.
        self._closing.append(_Closing(name, exporter))


def _account(exporter: LiveExporter, name: str, dropped: dict[str, dict[str, int]]) -> None:
    if isinstance(exporter, Dropping):
        dropped[name] = exporter.num_dropped


class _Closing(threading.Thread):
    """Closes an exporter on a thread that nobody has to wait for."""

    def __init__(self, name: str, exporter: LiveExporter) -> None:
        super().__init__(name=name, daemon=True)
        self._exporter = exporter
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Close it."""
        try:
            self._exporter.close()
        except Exception as error:
            self.error = error


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
