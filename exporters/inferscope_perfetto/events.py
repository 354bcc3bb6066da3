"""Chrome JSON trace, one event at a time, as Perfetto's importer reads it.

The importer has three properties to account for. It multiplies microseconds by 1000 in floating
point and truncates: times are written so that whole nanoseconds result, counted from the trace's
start (a machine up for months has too many); earlier starts are cut there, with the amount as an
argument. It identifies a thread by its number alone: no two tracks share one, and none is 0, the
idle thread. It stacks the slices of a track: one that would overlap another without nesting goes to
a track of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import IO, Any

import msgspec

_NS_PER_US = 1000

Args = dict[str, Any]


class TraceFile:
    """Writer of events; names of processes and tracks are written with the first event of each."""

    def __init__(self, out: IO[bytes]) -> None:
        """Keep the file and write its beginning."""
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self._origin_ns: int | None = None
        self._num_ids = 0
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], int] = {}
        self._lanes: dict[tuple[str, str], list[int]] = {}
        self._is_first = True
        self._out.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def lane(self, process: str, track: str, start_ns: int, end_ns: int) -> str:
        """Return the track's name, or that of an additional one without an overlapping slice."""
        ends_ns = self._lanes.setdefault((process, track), [])
        free = (n for n, until_ns in enumerate(ends_ns) if until_ns <= start_ns)
        number = next(free, len(ends_ns))
        ends_ns[number : number + 1] = [end_ns]
        return f"{track}, overlapping ({number})" if number else track

    def begin(self, at_ns: int) -> None:
        """Set the trace's origin, unless an earlier call has."""
        if self._origin_ns is None:
            self._origin_ns = at_ns

    def slice(
        self, process: str, track: str, name: str, start_ns: int, end_ns: int, args: Args
    ) -> None:
        """Write a slice; nested ones come after it."""
        start_ns, end_ns = self._since_origin(start_ns), self._since_origin(end_ns)
        if start_ns < 0:
            if end_ns <= 0:
                return
            args, start_ns = args | {"ns_before_trace": -start_ns}, 0
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": self._process(process),
                "tid": self._track(process, track),
                "ts": microseconds(start_ns),
                "dur": microseconds(end_ns - start_ns),
                "args": args,
            }
        )

    def count(self, process: str, name: str, at_ns: int, values: Mapping[str, float]) -> None:
        """Write counter values from a time on."""
        self._write(
            {
                "ph": "C",
                "name": name,
                "pid": self._process(process),
                "ts": microseconds(max(self._since_origin(at_ns), 0)),
                "args": values,
            }
        )

    def end(self, other: Args) -> None:
        """Write the file's end."""
        event = other | {"origin_ns": self._origin_ns}
        self._out.write(b'],"otherData":' + self._encode(event) + b"}\n")

    def _since_origin(self, at_ns: int) -> int:
        self.begin(at_ns)
        assert self._origin_ns is not None
        return at_ns - self._origin_ns

    def _process(self, name: str) -> int:
        number = self._processes.get(name)
        if number is None:
            number = self._processes[name] = self._new_id()
            event = {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
            self._write(event)
        return number

    def _track(self, process: str, name: str) -> int:
        number = self._tracks.get((process, name))
        if number is None:
            number = self._tracks[process, name] = self._new_id()
            event = {"ph": "M", "name": "thread_name", "pid": self._process(process)}
            self._write(event | {"tid": number, "args": {"name": name}})
        return number

    def _new_id(self) -> int:
        self._num_ids += 1
        return self._num_ids

    def _write(self, event: dict[str, Any]) -> None:
        if not self._is_first:
            self._out.write(b",\n")
        self._is_first = False
        self._out.write(self._encode(event))


def microseconds(ns: int) -> float:
    """Return the number that the importer converts to these nanoseconds; exact up to 52 days."""
    us = ns / _NS_PER_US
    return us if int(us * 1000.0) >= ns else math.nextafter(us, math.inf)
