"""The live exporters of a collector: an exporter that raises is disabled, the others continue."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeGuard, TypeVar

from inferscope.daemon.shard import ALL, Shard
from inferscope.errors import BadInput, InferScopeError
from inferscope.exporting import (
    Checkable,
    Dropping,
    KeepsTraces,
    LinksTraces,
    LiveExporter,
    Replaceable,
    Sharing,
    load_live_exporter,
    missing_extra,
)
from inferscope.fold import FinalRequest, FinalStep, Snapshot

Final = TypeVar("Final")
Sections = Mapping[str, Mapping[str, object]]
"""Settings of each exporter, by its name."""

FLUSH_S = 5.0
"""Maximum time in seconds in which all exporters flush at the end."""


def make_exporters(sections: Sections, shard: Shard = ALL) -> dict[str, LiveExporter]:
    """Return an unopened exporter for each section of the configuration.

    Args:
        sections: settings by name of exporter.
        shard: part of the engines; exporters that support it share resources with other shards.

    Raises:
        BadInput: there is no such exporter, or one of its settings is invalid.
    """
    made = {}
    for name, settings in sections.items():
        kind = load_live_exporter(name)
        try:
            made[name] = exporter = kind(settings)
            if not shard.is_all and isinstance(exporter, Sharing):
                exporter.share(shard.number, shard.total)
        except BadInput as error:
            raise BadInput(f"exporters.{name}: {error}") from error
    return made


def check_exporters(exporters: Mapping[str, LiveExporter]) -> None:
    """Check that the exporters can be opened, as far as possible without opening them.

    Raises:
        BadInput: one cannot be opened, with the reason.
    """
    for name, exporter in exporters.items():
        if isinstance(exporter, Checkable):
            try:
                exporter.check()
            except ImportError as error:
                raise missing_extra(name, error) from error


class ExporterSet:
    """The exporters that receive final steps, requests and snapshots.

    An exporter can be third-party code: any exception it raises is logged and disables it alone.
    """

    def __init__(
        self,
        exporters: Mapping[str, LiveExporter],
        *,
        log_line: Callable[[str], None],
        sections: Sections | None = None,
        shard: Shard = ALL,
    ) -> None:
        """Store unopened exporters, the function that prints a line, and their settings."""
        self._shard = shard
        self._on: dict[str, LiveExporter] = {}
        self._switch_on(exporters)
        self._sections = sections or {}
        self._closing: list[_Closing] = []
        self._replaced: list[_Closing] = []
        self._num_dropped: dict[str, Counter[str]] = {}
        """Records dropped by exporters that were replaced and closed, by name and reason."""
        self._log_line = log_line
        self._link(exporters)

    def open(self) -> None:
        """Open all exporters.

        Raises:
            BadInput: one cannot be opened; those opened before it are closed again.
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
            self._log_line(f"{name}: {exporter.describe()}")

    def change(self, sections: Sections) -> None:
        """Apply other sections; exporters with an unchanged section are not touched.

        New exporters are opened before they take over from those they replace. A disabled exporter
        is started again.

        Raises:
            BadInput: a new exporter cannot be made or opened; then nothing changes.
        """
        before = self._on
        stay = {n for n in before if n in sections and sections[n] == self._sections.get(n)}
        new: dict[str, LiveExporter] = {}
        for name in [name for name in sections if name not in stay]:
            try:
                made = make_exporters({name: sections[name]}, self._shard)
                self._link(made)
                _open_beside(made[name], before.get(name))
            except Exception as error:
                self._closing += [_Closing(each, new[each]) for each in new]
                if isinstance(error, ImportError):
                    raise missing_extra(name, error) from error
                if isinstance(error, InferScopeError):
                    raise
                raise BadInput(f"exporter {name} raised {_summary(error)}") from error
            new |= made
        self._sections = sections
        self._switch_on({name: new[name] if name in new else before[name] for name in sections})
        for name, former in before.items():
            if name in stay:
                continue
            successor = new.get(name)
            if _can_succeed(successor, former):
                self._deliver(name, successor.take_over, former)
            self._replaced.append(_Closing(name, former))
            if successor is None:
                self._log_line(f"{name}: closed")
        for name, exporter in new.items():
            self._log_line(f"{name}: {exporter.describe()}")

    def on_step(self, step: FinalStep) -> None:
        """Pass a step to all exporters."""
        for name, take in self._steps:
            try:
                take(step)
            except Exception as error:  # noqa: PERF203  # the other exporters continue
                self._disable(name, error)

    def on_request(self, request: FinalRequest) -> None:
        """Pass a request to all exporters."""
        for name, take in self._requests:
            try:
                take(request)
            except Exception as error:  # noqa: PERF203  # the other exporters continue
                self._disable(name, error)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Pass a snapshot to all exporters, with the number of records that each has dropped."""
        self._release_closed()
        dropped = {name: dict(counts) for name, counts in self._num_dropped.items()}
        for one in self._replaced:
            _try_to_account(one, dropped)
        for name, exporter in tuple(self._on.items()):
            self._deliver(name, partial(_account, exporter, name), dropped)
        snapshot = replace(snapshot, dropped=dropped)
        for name, exporter in tuple(self._on.items()):
            self._deliver(name, exporter.on_snapshot, snapshot)

    def close(self) -> bool:
        """Close all exporters within `FLUSH_S`; return whether all of them closed in time."""
        self._closing += self._replaced
        self._closing += [_Closing(name, exporter) for name, exporter in self._on.items()]
        self._switch_on({})
        end_s = time.monotonic() + FLUSH_S
        for one in self._closing:
            one.join(max(0.0, end_s - time.monotonic()))
            if one.is_alive():
                self._log_line(f"exporter {one.name} did not close within {FLUSH_S:g} s")
            else:
                self._report_end(one)
        return not any(one.is_alive() for one in self._closing)

    def _switch_on(self, exporters: Mapping[str, LiveExporter]) -> None:
        """Set the active exporters, and bind the methods that are called for every record."""
        self._on = dict(exporters)
        self._steps = [(name, exporter.on_step) for name, exporter in exporters.items()]
        self._requests = [(name, exporter.on_request) for name, exporter in exporters.items()]
        self._keepers = [
            (name, exporter.kept_trace)
            for name, exporter in exporters.items()
            if isinstance(exporter, KeepsTraces)
        ]

    def _link(self, exporters: Mapping[str, LiveExporter]) -> None:
        for exporter in exporters.values():
            if isinstance(exporter, LinksTraces):
                exporter.link_traces(self._kept_trace)

    def _release_closed(self) -> None:
        """Add up the drops of replaced exporters that have closed, and release them."""
        for one in [each for each in self._replaced if not each.is_alive()]:
            self._replaced.remove(one)
            self._report_end(one)
            dropped: dict[str, dict[str, int]] = {}
            _try_to_account(one, dropped)
            for name, by_reason in dropped.items():
                self._num_dropped.setdefault(name, Counter()).update(by_reason)

    def _report_end(self, one: _Closing) -> None:
        if one.error is not None:
            self._log_line(f"exporter {one.name} failed to close: {_summary(one.error)}")

    def _kept_trace(self, request: FinalRequest) -> str | None:
        """Return the trace ID of a request from the exporter that keeps traces."""
        for name, trace_of in self._keepers:
            try:
                return trace_of(request)
            except Exception as error:  # noqa: PERF203  # the other exporters continue
                self._disable(name, error)
        return None

    def _deliver(self, name: str, take: Callable[[Final], None], what: Final) -> None:
        try:
            take(what)
        except Exception as error:
            self._disable(name, error)

    def _disable(self, name: str, error: Exception) -> None:
        exporter = self._on.get(name)
        if exporter is None:
            return
        self._switch_on({other: one for other, one in self._on.items() if other != name})
        self._log_line(f"exporter {name} disabled after error: {_summary(error)}")
        # Closed, because its page would be stale; on a thread, because it can hang as well.
        self._closing.append(_Closing(name, exporter))


def _account(exporter: LiveExporter, name: str, dropped: dict[str, dict[str, int]]) -> None:
    """Add an exporter's dropped records to the counts of its name."""
    if isinstance(exporter, Dropping):
        by_reason = dropped.setdefault(name, {})
        for reason, num in exporter.num_dropped.items():
            by_reason[reason] = by_reason.get(reason, 0) + num


def _try_to_account(one: _Closing, dropped: dict[str, dict[str, int]]) -> None:
    with suppress(Exception):  # a replaced exporter's error must not disable its successor
        _account(one.exporter, one.name, dropped)


def _can_succeed(successor: LiveExporter | None, former: LiveExporter) -> TypeGuard[Replaceable]:
    return isinstance(successor, Replaceable) and type(successor) is type(former)


def _open_beside(exporter: LiveExporter, former: LiveExporter | None) -> None:
    if former is not None and _can_succeed(exporter, former):
        exporter.open_replacing(former)
    else:
        exporter.open()


class _Closing(threading.Thread):
    """A daemon thread that closes an exporter."""

    def __init__(self, name: str, exporter: LiveExporter) -> None:
        super().__init__(name=name, daemon=True)
        self.exporter = exporter
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Close the exporter."""
        try:
            self.exporter.close()
        except Exception as error:
            self.error = error


def _summary(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
