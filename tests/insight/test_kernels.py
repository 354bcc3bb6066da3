from __future__ import annotations

from typing import Any

from inferscope.insight.kernels import (
    BETWEEN,
    KERNEL,
    OPERATION,
    kernel_times,
    slowdown,
    stall_ns,
    steps_of,
    with_steps,
)
from inferscope.records import DECODE, PREFILL, Clock, Record, StepSlices, StepSpan

BASE_NS = 1_000_000_000_000
"""Wall time at which the trace's clock is 0; the monotonic clock is 400 s behind the wall's."""
OFFSET_NS = 400_000_000_000
US = 1000


def mono(us: float) -> int:
    """Return the monotonic time of a time of the trace."""
    return round(BASE_NS + us * US) - OFFSET_NS


def op(name: str, ts: float, dur: float, *, cat: str = OPERATION, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": list(events)}


def records_of(*steps: tuple[float, float, bytes]) -> list[Record]:
    """Return records of steps: start, end, phases of their rows."""
    records: list[Record] = [Clock(mono(0), mono(0) + OFFSET_NS)]
    for number, (start, end, phases) in enumerate(steps):
        records.append(StepSlices(mono(end), number, 1, b"", phases, b"", b""))
        records.append(StepSpan(mono(end), number, 1, mono(start), mono(end), mono(end)))
    return records


def test_an_operation_is_billed_without_those_it_called() -> None:
    events = trace(
        op("linear", 10, 100), op("addmm", 20, 60), op("copy_", 30, 10), op("add", 120, 5)
    )
    rows = {row.name: row.self_ns for row in kernel_times(events, [])}
    assert rows == {"linear": 40 * US, "addmm": 50 * US, "copy_": 10 * US, "add": 5 * US}


def test_threads_and_devices_are_no_callers_of_each_other() -> None:
    events = trace(
        op("mm", 10, 100),
        op("mm", 20, 50, tid=2),
        op("gemm", 30, 40, cat="kernel", tid=7),
        op("Memcpy", 40, 5, cat="gpu_memcpy", tid=7),
    )
    rows = {(row.name, row.kind): (row.self_ns, row.num_calls) for row in kernel_times(events, [])}
    assert rows["mm", OPERATION] == (150 * US, 2)
    assert rows["gemm", KERNEL] == (40 * US, 1)
    assert rows["Memcpy", KERNEL] == (5 * US, 1)


def test_steps_determine_the_phase_of_a_kernel() -> None:
    records = records_of(
        (0, 100, bytes([PREFILL])),
        (100, 200, bytes([DECODE, DECODE])),
        (250, 300, bytes([DECODE, PREFILL])),
    )
    events = trace(
        op("a", 50, 5), op("b", 100, 5), op("c", 220, 5), op("d", 260, 5), op("e", 400, 5)
    )
    steps = steps_of(records, events)
    assert [step.phase for step in steps] == ["prefill", "decode", "mixed"]
    phases = {row.name: row.phase for row in kernel_times(events, steps)}
    assert phases == {"a": "prefill", "b": "decode", "c": BETWEEN, "d": "mixed", "e": BETWEEN}


def test_the_sum_over_phases_is_the_time_of_the_outermost_operations() -> None:
    events = trace(*(op(str(at % 3), 10.0 * at, 9.0 - at % 4) for at in range(50)))
    steps = steps_of(records_of((0, 200, bytes([DECODE])), (200, 400, bytes([PREFILL]))), events)
    assert sum(row.self_ns for row in kernel_times(events, steps)) == US * sum(
        event["dur"] for event in events["traceEvents"]
    )


def test_our_steps_are_a_track_of_the_trace_and_those_beyond_its_window_are_left_out() -> None:
    events = trace(op("a", 100, 5), op("b", 190, 5))
    steps = steps_of(records_of((0, 50, b"\1"), (90, 150, b"\1"), (300, 400, b"\1")), events)
    merged = with_steps(events, steps)
    ours = [event for event in merged["traceEvents"] if event["cat"] == "inferscope"]
    assert [(event["name"], event["ts"], event["dur"]) for event in ours] == [("decode", 90, 60)]
    assert len(merged["traceEvents"]) == 3
    assert len(events["traceEvents"]) == 2, "the trace given is not changed"


def test_slowdown_compares_decodes_before_and_within() -> None:
    before = [(100.0 * at, 100.0 * at + 10, bytes([DECODE])) for at in range(20)]
    within = [(100.0 * at, 100.0 * at + 15, bytes([DECODE])) for at in range(20, 40)]
    events = trace(op("a", 2000, 5), op("b", 3990, 5))
    assert slowdown(events, steps_of(records_of(*before, *within), events)) == 0.5
    assert slowdown(events, steps_of(records_of(*within), events)) is None


def test_stall_while_the_trace_is_made_is_reported() -> None:
    events = trace(op("a", 1000, 5), op("b", 2000, 5))
    steps = [(10.0, 1800.0, b"\1"), (1900.0, 52_005.0, b"\1"), (53_000.0, 53_100.0, b"\1")]
    assert stall_ns(events, steps_of(records_of(*steps), events)) == 50_105_000
    assert stall_ns(events, steps_of(records_of((10, 900, b"\1")), events)) is None, "all were over"
    assert stall_ns({}, []) is None


def test_a_trace_without_anything_in_it_breaks_nothing() -> None:
    assert kernel_times({}, []) == []
    assert with_steps({}, []) == {"traceEvents": []}
    assert steps_of([], {}) == []
