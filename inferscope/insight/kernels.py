"""Kernels and operations of a torch trace, by the phase of the step that they ran in.

Times are self times: an operation's own time without the operations that it called. GPU kernels
call none. The phase is that of the engine's step at that moment: prefill, decode, or both (mixed).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from inferscope.json_document import Document
from inferscope.records import PREFILL, Clock, Record, StepSlices, StepSpan

KERNEL, OPERATION = "kernel", "cpu_op"
BETWEEN = "between steps"
_ENOUGH_STEPS, _RECENT_STEPS = 8, 200
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceStep(NamedTuple):
    """One step and its phase; times on the trace's clock in microseconds."""

    start_us: float
    end_us: float
    number: int
    phase: str


class KernelTime(msgspec.Struct, frozen=True):
    """Time of one kernel or operation in one phase."""

    phase: str
    """prefill, decode, mixed, unknown, or between steps."""
    name: str
    """Name of the kernel or operation."""
    kind: str
    """kernel, or cpu_op for an operation of the host."""
    self_ns: int
    """Time of its own, without the operations that it called."""
    num_calls: int
    """Number of calls."""


class ProfileDocument(Document, frozen=True, kw_only=True):
    """Kernels of a running engine (`inferscope profile --json`)."""

    pid: int
    """Process that was profiled."""
    trace: str
    """File of the trace."""
    slowdown: float | None
    """Added share of a decode step's time while the profiler ran; null where too few steps ran."""
    stall_ns: int | None
    """Longest step while the trace was made; null where none was open."""
    rows: tuple[KernelTime, ...]
    """Kernels and operations, the longest first."""


def steps_of(records: Iterable[Record], trace: Mapping[str, Any]) -> list[TraceStep]:
    """Return the steps in an engine's rings, on the trace's clock."""
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    phases: dict[int, str] = {}
    spans: list[StepSpan] = []
    offset_ns: int | None = None
    for record in records:
        if isinstance(record, StepSlices):
            phases[record.step] = _phase(record.phases)
        elif isinstance(record, StepSpan):
            spans.append(record)
        elif isinstance(record, Clock):
            offset_ns = record.real_ns - (record.t_ns if record.host_ns is None else record.host_ns)
    if offset_ns is None:
        return []
    shift_ns = offset_ns - base_ns
    found = [
        TraceStep(
            (span.launch_start_ns + shift_ns) / 1e3,
            (span.ready_ns + shift_ns) / 1e3,
            span.step,
            phases.get(span.step, "unknown"),
        )
        for span in spans
    ]
    return sorted(found)


def kernel_times(trace: Mapping[str, Any], steps: Sequence[TraceStep]) -> list[KernelTime]:
    """Return the time of kernels and operations by phase, the longest first."""
    starts = [step.start_us for step in steps]
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, kind, start_us, self_us in _self_times(trace.get("traceEvents", ())):
        at = bisect_right(starts, start_us) - 1
        is_inside = at >= 0 and start_us < steps[at].end_us
        cell = sums[steps[at].phase if is_inside else BETWEEN, name, kind]
        cell[0] += self_us
        cell[1] += 1
    rows = [
        KernelTime(*key, round(self_us * 1e3), int(num)) for key, (self_us, num) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.self_ns)


def slowdown(trace: Mapping[str, Any], steps: Sequence[TraceStep]) -> float | None:
    """Return the relative slowdown of decode steps within the trace; None if too few steps ran.

    It compares medians of the most frequent phase before and within the trace; any other change in
    between is included.
    """
    first, last = _window(trace)
    decodes = [step for step in steps if step.phase == "decode"]
    before = [_took(step) for step in decodes if step.end_us < first]
    within = [_took(step) for step in decodes if first <= step.start_us and step.end_us <= last]
    if min(len(before), len(within)) < _ENOUGH_STEPS:
        return None
    return statistics.median(within) / statistics.median(before[-_RECENT_STEPS:]) - 1


def stall_ns(trace: Mapping[str, Any], steps: Sequence[TraceStep]) -> int | None:
    """Return the duration of the longest step still open when recording ended.

    Torch then builds a trace from the recorded events and blocks the interpreter meanwhile.
    """
    _, last = _window(trace)
    took = [_took(step) for step in steps if last and step.end_us > last]
    return round(max(took) * 1e3) if took else None


def _took(step: TraceStep) -> float:
    return step.end_us - step.start_us


def _window(trace: Mapping[str, Any]) -> tuple[float, float]:
    times = [event["ts"] for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    return (min(times), max(times)) if times else (0.0, 0.0)


def with_steps(trace: Mapping[str, Any], steps: Sequence[TraceStep]) -> dict[str, Any]:
    """Return the trace with a track of our steps; steps outside its window are left out."""
    events = list(trace.get("traceEvents", ()))
    first, last = _window(trace)
    track = {"pid": "inferscope", "tid": "steps"}
    ours = [
        {
            **track,
            "ph": "X",
            "cat": "inferscope",
            "name": step.phase,
            "ts": step.start_us,
            "dur": max(0.0, step.end_us - step.start_us),
            "args": {"step": step.number},
        }
        for step in steps
        if step.end_us >= first and step.start_us <= last
    ]
    return {**trace, "traceEvents": events + ours}


def _phase(phases: bytes) -> str:
    kinds = {"prefill" if phase == PREFILL else "decode" for phase in phases}
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "unknown"


def _self_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Return name, kind, start and self time of kernels and operations."""
    found: list[tuple[str, str, float, float]] = []
    by_thread: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        if event.get("cat") in _DEVICE:
            found.append((str(event["name"]), KERNEL, event["ts"], event.get("dur", 0.0)))
        elif event.get("cat") == OPERATION:
            by_thread[event.get("pid"), event.get("tid")].append(event)
    for of_thread in by_thread.values():
        found += _own_times(of_thread)
    return found


def _own_times(events: list[Mapping[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Subtract the time of called operations from each one; calls of one thread are nested."""
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    own = [event.get("dur", 0.0) for event in events]
    open_: list[int] = []
    for at, event in enumerate(events):
        while open_ and _end_us(events[open_[-1]]) <= event["ts"]:
            open_.pop()
        if open_:
            own[open_[-1]] -= event.get("dur", 0.0)
        open_.append(at)
    return [
        (str(event["name"]), OPERATION, event["ts"], max(0.0, own_us))
        for event, own_us in zip(events, own, strict=True)
    ]


def _end_us(event: Mapping[str, Any]) -> float:
    end_us: float = event["ts"] + event.get("dur", 0.0)
    return end_us
