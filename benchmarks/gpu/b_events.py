"""(b) Host cost of timing events, also in graphs, and the device's busy share within a span."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from load import Decoding, blocks_for, open_engine
from part import Bank, Setting, Unmet, main, release, shown
from watched import Sampler, Windows, ring_records

from inferscope.engine import Engine
from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.probe import Probe
from inferscope.records import StepSpan

_CALLS = 2000
_BATCHES = (1, 16, 64)
_CONTEXT, _STEPS = 256, 100
_REPLAYS = 20
_COPY_BYTES, _COPIES = 1 << 30, 8


def measure(setting: Setting, bank: Bank) -> None:
    """Time the calls, try events in graphs, then hold spans against PM sampling's busy share."""
    setting.need_gpu()
    with bank.row("calls"):
        costs = call_costs()
        line = ", ".join(f"{name} {ns / 1e3:.2f} µs" for name, ns in costs.items())
        bank.keep("calls", costs, f"events: {line}")
    with bank.row("in graphs"):
        bank.keep("in graphs", *events_in_graphs())
    release()
    with bank.row("spans"):
        engine = open_engine(setting, num_blocks=blocks_for(max(_BATCHES), _CONTEXT + 2 * _STEPS))
        spans_against_busy(setting, engine, bank)


def call_costs() -> dict[str, float]:
    """Return the host's nanoseconds per call, the device idle before each batch of calls."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALLS)]
    aside = torch.cuda.Stream()
    calls: dict[str, Callable[[int], object]] = {
        "first record": lambda at: events[at].record(),  # makes the event
        "record": lambda at: events[at].record(),
        "query": lambda at: events[at].query(),
        "elapsed": lambda at: events[at].elapsed_time(events[-1]),
        "record aside": lambda at: events[at].record(aside),
    }
    found = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        began_ns = time.perf_counter_ns()
        for at in range(_CALLS):
            call(at)
        found[name] = (time.perf_counter_ns() - began_ns) / _CALLS
    return found


def events_in_graphs() -> tuple[dict[str, Any], str]:
    """Record events within a CUDA graph, and hold what they say against events around its replay.

    Raises:
        Unmet: this torch has no events for that.
    """
    try:
        first, last = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    except TypeError:
        raise Unmet("this torch's events take no external=True") from None
    source = torch.ones(_COPY_BYTES // 4, device="cuda")
    copied = torch.zeros_like(source)
    torch.cuda.synchronize()
    graphs = {}
    for is_timed in (True, False):
        graphs[is_timed] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[is_timed]):
            if is_timed:
                first.record()
            for _ in range(_COPIES):
                copied.copy_(source)
            if is_timed:
                last.record()
    inside_ms, launch_ns = [], dict[bool, list[int]]()
    around_ms: dict[bool, list[float]] = {True: [], False: []}
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_REPLAYS):
        for is_timed, graph in graphs.items():
            before.record()
            began_ns = time.perf_counter_ns()
            graph.replay()
            launch_ns.setdefault(is_timed, []).append(time.perf_counter_ns() - began_ns)
            after.record()
            torch.cuda.synchronize()
            around_ms[is_timed].append(before.elapsed_time(after))
            if is_timed:
                inside_ms.append(first.elapsed_time(last))
    row = {
        "inside_ms": statistics.median(inside_ms),
        "around_ms": statistics.median(around_ms[True]),
        "around_without_ms": statistics.median(around_ms[False]),
        "launch_us": statistics.median(launch_ns[True]) / 1e3,
        "launch_without_us": statistics.median(launch_ns[False]) / 1e3,
    }
    return row, (
        f"events in a graph say {row['inside_ms']:.3f} ms, those around it "
        f"{row['around_ms']:.3f} ({row['around_without_ms']:.3f} without the inner ones); its "
        f"replay takes the host {row['launch_us']:.0f} µs, {row['launch_without_us']:.0f} without"
    )


def spans_against_busy(setting: Setting, engine: Engine, bank: Bank) -> None:
    """Decode under probe and PM sampling; compare sums over the same stretch."""
    with Sampler("pm", pm_despite=setting.pm_despite) as sampler:
        sampler.of("pm")
        for batch in _BATCHES:
            name = f"batch {batch}"
            with bank.row(name):
                row = spans_of(engine, setting.model, batch, sampler)
                bank.keep(
                    name,
                    row,
                    f"batch {batch}: spans are {row['span_over_wall']:.1%} of the wall, the device "
                    f"is busy for {shown(row['busy_over_span'], '.1%')} of them",
                )


def spans_of(engine: Engine, model: str, batch: int, sampler: Sampler) -> dict[str, Any]:
    """Return a batch's spans against its busy time; None for what PM sampling did not see."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INFERSCOPE_DIR"] = folder
        timer = step_timer(engine.model.device)
        probe = engine.probe = Probe.open(describe(engine, name=model), timer=timer)
        try:
            with closing(Decoding(engine, batch=batch, context=_CONTEXT)) as decoding:
                phase = decoding.run(_STEPS)
            sampler.refresh()
        finally:
            probe.close()
            engine.probe = Probe.disabled()
        if probe.path is None:
            raise Unmet("the probe has no ring here")
        spans = [
            span
            for span in ring_records(probe.path, StepSpan)
            if phase.start_ns <= span.launch_start_ns <= phase.end_ns
        ]
    span_ns = sum(
        span.device_end_ns - span.device_start_ns
        for span in spans
        if span.device_start_ns is not None and span.device_end_ns is not None
    )
    if not span_ns:
        raise Unmet(f"none of {len(spans)} spans has device times")
    wall_ns = phase.end_ns - phase.start_ns
    busy = Windows(sampler.of("pm"), "busy_share").mean(phase.start_ns, phase.end_ns)
    return {
        "num_spans": len(spans),
        "num_steps": phase.num_steps,
        "span_over_wall": span_ns / wall_ns,
        "busy_over_wall": busy,
        "busy_over_span": None if busy is None else busy * wall_ns / span_ns,
    }


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
