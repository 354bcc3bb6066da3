"""Reads a trace as Perfetto's importer does, and refuses what that would misunderstand.

After src/trace_processor/importers/json of github.com/google/perfetto: times are microseconds times
1000 in floating point, cut off; threads are found by their number alone; events are sorted by time,
stably; slices of a track are stacked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}
"""Required fields by event kind: complete, counter, metadata (names of processes, threads)."""


@dataclass
class Slice:
    """A slice with what is inside of it."""

    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    inside: list[Slice] = field(default_factory=list)


@dataclass
class Imported:
    """Contents of the trace, by the names of processes and tracks; times since its origin."""

    origin_ns: int
    other: dict[str, Any]
    slices: dict[tuple[str, str], list[Slice]]
    counters: dict[tuple[str, str], list[tuple[int, float]]]

    def of(self, process: str) -> dict[str, list[Slice]]:
        """Return the outermost slices of a process, by track."""
        return {track: found for (of, track), found in self.slices.items() if of == process}


def nanoseconds(us: float) -> int:
    """Return what the importer makes of a number of microseconds."""
    return int(us * 1000.0)


def imported(content: bytes) -> Imported:
    """Read a trace."""
    document = json.loads(content)
    assert set(document) == {"displayTimeUnit", "traceEvents", "otherData"}
    events = document["traceEvents"]
    process, track, owner = dict[int, str](), dict[int, str](), dict[int, int]()
    for event in events:
        check(event)
        if event["ph"] == "M":
            (name,) = event["args"].values()
            if event["name"] == "process_name":
                assert event["pid"] not in process
                process[event["pid"]] = name
            else:
                assert event["name"] == "thread_name"
                assert event["tid"] not in track, "two tracks share a number"
                track[event["tid"]], owner[event["tid"]] = name, event["pid"]
        else:
            assert event["pid"] in process, "named before its first event"
    assert 0 not in track, "the idle thread's"
    assert not track.keys() & process.keys(), "a process has a thread of its own number"
    slices = defaultdict[tuple[str, str], list[Slice]](list)
    counters = defaultdict[tuple[str, str], list[tuple[int, float]]](list)
    open_slices = defaultdict[int, list[Slice]](list)
    timed = [event for event in events if event["ph"] != "M"]
    for event in sorted(timed, key=lambda event: nanoseconds(event["ts"])):
        start_ns, of = nanoseconds(event["ts"]), process[event["pid"]]
        if event["ph"] == "C":
            for series, value in event["args"].items():
                counters[of, f"{event['name']} {series}"].append((start_ns, value))
            continue
        assert owner[event["tid"]] == event["pid"]
        end_ns = start_ns + nanoseconds(event["dur"])
        one = Slice(event["name"], start_ns, end_ns, event["args"])
        stack = open_slices[event["tid"]]
        while stack and stack[-1].end_ns <= start_ns:
            stack.pop()
        if stack:
            assert end_ns <= stack[-1].end_ns, "it overlaps another, and is not inside of it"
        (stack[-1].inside if stack else slices[of, track[event["tid"]]]).append(one)
        stack.append(one)
    other = document["otherData"]
    return Imported(other["origin_ns"], other, dict(slices), dict(counters))


def check(event: dict[str, Any]) -> None:
    """Hold an event to what its kind has."""
    fields = FIELDS[event["ph"]]
    optional = {"tid"} if event["ph"] == "M" and event["name"] == "thread_name" else set()
    assert set(event) - {"ph"} == set(fields) | optional
    for name, kind in fields.items():
        wanted = (int, float) if kind is float else kind
        assert isinstance(event[name], wanted), (name, event[name])
    if event["ph"] != "M":
        assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] >= 0
    if event["ph"] == "C":
        for value in event["args"].values():
            assert isinstance(value, int | float)
            assert not isinstance(value, bool)
