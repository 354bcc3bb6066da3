"""The live exporters of a collector: each is fed until it raises; its end is not the others'."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeGuard, TypeVar

from inferscope.collecting.shard import ALL, Shard
from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.snapshot import Snapshot
from inferscope.errors import BadInput, InferScopeError
from inferscope.exporting import (
    Checkable,
    Dropping,
    KeepsTraces,
    LinksTraces,
    LiveExporter,
    Sharing,
    Succeeding,
    load_live_exporter,
    missing_extra,
)

Final = TypeVar("Final")
Sections = Mapping[str, Mapping[str, object]]
"""Of a configuration: the settings of each exporter, by its name."""

FLUSH_S = 5.0
"""For all exporters together, to send what is left."""


def make_exporters(sections: Sections, shard: Shard = ALL) -> dict[str, LiveExporter]:
    """Return an exporter for each section of the configuration, none of them open.

    Args:
        sections: of the exporters.
        shard: of whose engines they are told; who can leaves room for the others.

    Raises:
        BadInput: there is no such exporter, or a setting of it cannot be used.
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
        self,
        exporters: Mapping[str, LiveExporter],
        *,
        say: Callable[[str], None],
        sections: Sections | None = None,
        shard: Shard = ALL,
    ) -> None:
        """Take exporters that are not open, what prints a line, and what they were made of."""
        self._shard = shard
        self._on: dict[str, LiveExporter] = {}
        self._switch_on(exporters)
        self._sections = sections or {}
        self._closing: list[_Closing] = []
        self._replaced: list[_Closing] = []
        self._gave_up: dict[str, Counter[str]] = {}
        """By exporter and reason, what those gave up that are replaced and closed."""
        self._say = say
        self._link(exporters)

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

    def change(self, sections: Sections) -> None:
        """Go on with other sections; whose section stays is not touched.

        Those that are new are opened first, and only then take over from those they replace. One
        that was switched off gets another chance.

        Raises:
            BadInput: one of the new ones cannot be made or opened; then all stays as it was.
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
                raise BadInput(f"the exporter {name} raised {_words(error)}") from error
            new |= made
        self._sections = sections
        self._switch_on({name: new[name] if name in new else before[name] for name in sections})
        for name, former in before.items():
            if name in stay:
                continue
            successor = new.get(name)
            if _can_succeed(successor, former):
                self._hand_on(name, successor.succeed, former)
            self._replaced.append(_Closing(name, former))
            if successor is None:
                self._say(f"{name}: ended")
        for name, exporter in new.items():
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
        self._settle()
        dropped = {name: dict(gave_up) for name, gave_up in self._gave_up.items()}
        for one in self._replaced:
            _try_to_account(one, dropped)
        for name, exporter in tuple(self._on.items()):
            self._hand_on(name, partial(_account, exporter, name), dropped)
        snapshot = replace(snapshot, dropped=dropped)
        for name, exporter in tuple(self._on.items()):
            self._hand_on(name, exporter.look, snapshot)

    def close(self) -> bool:
        """Close all, within a bounded time; tell whether all of them came to an end."""
        self._closing += self._replaced
        self._closing += [_Closing(name, exporter) for name, exporter in self._on.items()]
        self._switch_on({})
        end_s = time.monotonic() + FLUSH_S
        for one in self._closing:
            one.join(max(0.0, end_s - time.monotonic()))
            if one.is_alive():
                self._say(f"the exporter {one.name} was not through after {FLUSH_S:g} s")
            else:
                self._tell_how_it_ended(one)
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

    def _link(self, exporters: Mapping[str, LiveExporter]) -> None:
        for exporter in exporters.values():
            if isinstance(exporter, LinksTraces):
                exporter.link_traces(self._kept_trace)

    def _settle(self) -> None:
        """Keep what those gave up in the end that are replaced, and let go of them."""
        for one in [each for each in self._replaced if not each.is_alive()]:
            self._replaced.remove(one)
            self._tell_how_it_ended(one)
            dropped: dict[str, dict[str, int]] = {}
            _try_to_account(one, dropped)
            for name, by_reason in dropped.items():
                self._gave_up.setdefault(name, Counter()).update(by_reason)

    def _tell_how_it_ended(self, one: _Closing) -> None:
        if one.error is not None:
            self._say(f"the exporter {one.name} did not close well: {_words(one.error)}")

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
    """Add what an exporter gave up to what others of its name did."""
    if isinstance(exporter, Dropping):
        told = dropped.setdefault(name, {})
        for reason, num in exporter.num_dropped.items():
            told[reason] = told.get(reason, 0) + num


def _try_to_account(one: _Closing, dropped: dict[str, dict[str, int]]) -> None:
    with suppress(Exception):  # somebody else's code, and its successor's is not to suffer for it
        _account(one.exporter, one.name, dropped)


def _can_succeed(successor: LiveExporter | None, former: LiveExporter) -> TypeGuard[Succeeding]:
    return isinstance(successor, Succeeding) and type(successor) is type(former)


def _open_beside(exporter: LiveExporter, former: LiveExporter | None) -> None:
    if former is not None and _can_succeed(exporter, former):
        exporter.open_beside(former)
    else:
        exporter.open()


class _Closing(threading.Thread):
    """Closes an exporter on a thread that nobody has to wait for."""

    def __init__(self, name: str, exporter: LiveExporter) -> None:
        super().__init__(name=name, daemon=True)
        self.exporter = exporter
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Close it."""
        try:
            self.exporter.close()
        except Exception as error:
            self.error = error


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
